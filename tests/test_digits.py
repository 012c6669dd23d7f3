"""Pictures from end to end, without a codec's network: a PGM learns to draw digits that a classifier recognises."""

import dataclasses

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import maskless
from maskless.codec.vq import PixelCodec
from maskless.data.image_prepare import prepare_images
from maskless.train.config import TrainConfig
from maskless.train.plan import image_network_config
from maskless.train.run import RunConfig, run

LEVELS = 17  # of grey in scikit-learn's digits
FEW = 5  # of the small ones
KINDS = (0, 1)  # of the small ones


def prepared(folder, images, labels, levels: int):
    """Pictures of so many levels of grey as a folder for each class, and as tokens, one for each level."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        to = folder / "pictures" / str(label)
        to.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / (levels - 1)).round().astype(np.uint8)).save(to / f"{number}.png")
    return prepare_images([folder / "pictures"], folder / "data", PixelCodec(levels), size=images.shape[1])


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    data = load_digits()
    return prepared(tmp_path_factory.mktemp("digits"), data.images[:300], data.target[:300], LEVELS)


@pytest.fixture(scope="module")
def small_digits():
    """Two of the digits, 4 x 4 and in few levels of grey: a minute's work in a second.  (N, 4, 4), (N,)"""
    data = load_digits()
    chosen = np.isin(data.target, KINDS)
    means = data.images[chosen].reshape(-1, 4, 2, 4, 2).mean((2, 4))
    return (means / (LEVELS - 1) * (FEW - 1)).round(), data.target[chosen]


def trained(folder, data, model: str, steps: int, *, kinds: dict | None = None, **settings):
    network = image_network_config(model, data, width=64, dropout=0.0, **{"layers": 4} | (kinds or {}))
    usual = {"weights": "arccos", "batch": 32, "learning_rate": 3e-3, "warmup": 10, "decay": "cosine", "ema": 0.98}
    quiet = {"tracker": "none", "evaluate_every": 0, "save_every": 0}
    train = TrainConfig(model=model, steps=steps, **usual | quiet | settings)
    config = RunConfig(data=str(data.folder), network=dataclasses.asdict(network), train=train)
    return run(folder, config, Console(quiet=True))


@pytest.mark.parametrize("wrong", [{"context": "ordered"}, {"rope": "2d"}, {"encoder": 1}])
def test_what_only_a_pgm_has_is_refused_for_maskgit(digits, wrong):
    with pytest.raises(ValueError, match="rope and encoder belong to pgm: the model is maskgit"):
        image_network_config("maskgit", digits, width=64, layers=4, **wrong)


def levels(pictures) -> np.ndarray:
    return np.stack([np.asarray(one.image, dtype=float).ravel() for one in pictures]) / 255


def test_a_classifier_recognises_the_digits_that_a_pgm_draws(small_digits, tmp_path):
    images, labels = small_digits
    chain = {"objective": "chain", "orders": "random=1,halton=1", "weights": "bounded"}
    kinds = {"context": "ordered", "swap": "gated", "rope": "2d", "layers": 2}
    data = prepared(tmp_path, images, labels, FEW)
    artist = trained(tmp_path / "run", data, "pgm", 60, kinds=kinds, learning_rate=8e-3, ema=0.9, **chain)
    judge = SVC(gamma=0.01 * (FEW - 1) ** 2).fit(images.reshape(len(images), -1) / (FEW - 1), labels)
    wanted = [str(KINDS[i % 2]) for i in range(100)]
    drawn = maskless.generate(artist.model, labels=wanted, guidance=2.0, steps=16, seed=1)
    right = (judge.predict(levels(drawn)).astype(str) == wanted).mean()
    assert right >= 0.8  # after 2 steps 0.44 to 0.49, of four seeds 0.97 to 0.99
    assert [one.label for one in drawn] == wanted


def test_maskgit_trains_and_draws_too(digits, tmp_path):
    made = trained(tmp_path / "run", digits, "maskgit", 2)
    losses = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(losses) == 2
    assert (tmp_path / "run" / "samples.png").exists()
    assert len(maskless.generate(made.model, labels=[0, 1], steps=4, guidance=1.0)) == 2
