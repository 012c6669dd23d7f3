"""Pictures from end to end, without a codec's network: a PGM learns to draw digits that a classifier recognises."""

import dataclasses
import os

import numpy as np
import pytest
import torch
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


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The 8 x 8 digits as a folder of pictures, a folder for each class, and prepared with a token for each level."""
    folder = tmp_path_factory.mktemp("digits")
    data = load_digits()
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        to = folder / "pictures" / str(label)
        to.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / (LEVELS - 1)).round().astype(np.uint8)).save(to / f"{number}.png")
    return prepare_images([folder / "pictures"], folder / "data", PixelCodec(LEVELS), size=8)


def trained(folder, data, model: str, steps: int, **sizes):
    network = image_network_config(model, data, **{"width": 64, "layers": 4, "dropout": 0.0} | sizes)
    settings = TrainConfig(
        model=model,
        weights="arccos",
        steps=steps,
        batch=32,
        learning_rate=3e-3,
        warmup=50,
        decay="cosine",
        ema=0.99,
        tracker="none",
        evaluate_every=0,
        save_every=0,
    )
    config = RunConfig(data=str(data.folder), network=dataclasses.asdict(network), train=settings)
    return run(folder, config, Console(quiet=True))


@pytest.mark.parametrize("wrong", [{"context": "ordered"}, {"rope": "2d"}, {"encoder": 1}])
def test_what_only_a_pgm_has_is_refused_for_maskgit(digits, wrong):
    with pytest.raises(ValueError, match="rope and encoder belong to pgm: the model is maskgit"):
        image_network_config("maskgit", digits, width=64, layers=4, **wrong)


def levels(pictures) -> np.ndarray:
    return np.stack([np.asarray(one.image, dtype=float).ravel() for one in pictures]) * (LEVELS - 1) / 255


@pytest.fixture(scope="module")
def artist(digits, tmp_path_factory):
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    try:
        yield trained(tmp_path_factory.mktemp("run") / "pgm", digits, "pgm", 600)
    finally:
        torch.set_num_threads(1)


def test_a_classifier_recognises_the_digits_that_a_pgm_draws(artist):
    data = load_digits()
    judge = SVC(gamma=0.001).fit(data.data, data.target)
    wanted = [str(i % 10) for i in range(100)]
    drawn = maskless.generate(artist.model, labels=wanted, guidance=2.0, steps=64, warmup=0, seed=1)
    right = (judge.predict(levels(drawn)) == np.arange(100) % 10).mean()
    assert right >= 0.8
    assert [one.label for one in drawn] == wanted


def test_a_saved_model_draws_the_same_and_fills_in(artist, tmp_path):
    artist.model.save_pretrained(tmp_path / "model")
    loaded = maskless.load(tmp_path / "model", device="cpu")
    assert loaded.classes == artist.model.classes
    first, again = (maskless.generate(m, labels=["3", 7], steps=8, seed=5) for m in (artist.model, loaded))
    assert np.array_equal(levels(first), levels(again))
    alone = maskless.generate(loaded, labels=["3"], steps=8, seed=5)
    assert np.array_equal(levels(alone), levels(first[:1]))
    whole = np.asarray(first[0].image)
    known = np.zeros((8, 8), dtype=bool)
    known[:, :4] = True
    filled = maskless.fill(loaded, whole, known=known, label="3", steps=4, seed=1)
    assert np.array_equal(np.asarray(filled.image)[:, :4], whole[:, :4])
    assert (filled.steps[:, :4] == -1).all()
    assert (filled.steps[:, 4:] >= 0).all()


@pytest.mark.parametrize("order", ["halton", "random", "raster", "confidence"])
def test_every_order_decides_every_cell_once(artist, order):
    counts = "arccos-after-one" if order == "confidence" else "arccos"
    (one,) = maskless.generate(artist.model, labels=[4], order=order, counts=counts, steps=16, guidance=1.0)
    assert sorted(set(one.steps.flatten().tolist())) == list(range(16))
    assert ((one.tokens >= 0) & (one.tokens < LEVELS)).all()


def test_maskgit_trains_and_draws_too(digits, tmp_path):
    made = trained(tmp_path / "run", digits, "maskgit", 20)
    losses = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(losses) == 20
    assert (tmp_path / "run" / "samples.png").exists()
    assert len(maskless.generate(made.model, labels=[0, 1], steps=4, guidance=1.0)) == 2


def test_what_a_model_of_pictures_refuses(artist):
    for match, how in (
        ("unknown label 'cat': expected one of 0, 1", {"labels": ["cat"]}),
        ("a label is 10: expected 0 to 9", {"labels": [10]}),
        ("guidance -1 is out of range", {"labels": [1], "guidance": -1}),
        ("unknown order 'spiral'", {"labels": [1], "order": "spiral"}),
        ("steps 65 is out of range: expected 1 to 64", {"labels": [1], "steps": 65}),
        ("n 0 is out of range", {"n": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            maskless.generate(artist.model, **how)
    with pytest.raises(ValueError, match=r"a picture of \(4, 4\) pixels with a mask of \(8, 8\): expected 8 x 8"):
        maskless.fill(artist.model, np.zeros((4, 4), np.uint8), known=np.ones((8, 8), bool))
