"""Distilling an image model: codes and labels mean the same to teacher, data and student, or it is refused."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from command_inputs import photos
from maskless.checkpoint import NETWORKS, Model
from maskless.codec.vq import VQ, ImageCodec, PixelCodec, VQConfig
from maskless.data.image_prepare import prepare_images
from maskless.data.image_tokens import PreparedImages
from maskless.train import distill_run
from maskless.train.config import MODELS, TrainConfig
from maskless.train.plan import image_network_config
from maskless.train.run import Run, RunConfig

TRAIN = {"steps": 2, "batch": 8, "tracker": "none"}


def vq(seed: int) -> VQ:
    torch.manual_seed(seed)
    return VQ(VQConfig(codes=16, width=32, latent=8, multipliers=(1, 2), blocks=1)).eval()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Callable[..., PreparedImages]:
    """prepared(classes, codec): four pictures of 4 x 4 pixels for each name, those of an empty name without a class."""

    def prepared(classes: str, codec: ImageCodec) -> PreparedImages:
        folder = tmp_path_factory.mktemp("pictures")
        photos(folder / "all", classes.split() or [""], count=4, shape=(4, 4, 3))
        return prepare_images([folder / "all"], folder / "data", codec, size=4)

    return prepared


@pytest.fixture(scope="module")
def teacher(prepared, tmp_path_factory) -> Callable[..., tuple[Path, PreparedImages]]:
    """teacher(classes, codec): a model of such pictures, and the pictures; named=False: without codec and names."""

    def teacher(
        classes: str, codec: ImageCodec, kind: str = "pgm", *, named: bool = True
    ) -> tuple[Path, PreparedImages]:
        data = prepared(classes, codec)
        network = NETWORKS[MODELS[kind][0]][1](image_network_config(kind, data, width=32, layers=2))
        model = Model(network, data.codec() if named else None, "image", data.classes if named else ())
        model.save_pretrained(folder := tmp_path_factory.mktemp("model"))
        return folder, data

    return teacher


def begin(to: Path, model: Path, data: PreparedImages) -> distill_run.DistillConfig:
    how = {"rounds": 1, "teacher_steps": 2}
    return distill_run.begin(to, distill_run.DistillRequest(source=str(model), data=data.folder, how=how, train=TRAIN))


@pytest.mark.parametrize(
    ("own", "other"),
    [(partial(vq, 1), partial(vq, 2)), (partial(PixelCodec, 8), partial(PixelCodec, 2, channels=3))],
    ids=["weights", "levels"],
)
def test_data_of_another_codec_with_as_many_codes_are_refused(own, other, teacher, prepared, tmp_path):
    model, data = teacher("a b", own())
    others = prepared("a b", other())
    assert (others.codes, others.length, others.classes) == (data.codes, data.length, data.classes)
    with pytest.raises(ValueError, match=f"^the pictures in {others.folder} have another codec: prepare them with"):
        begin(tmp_path / "out", model, others)
    assert not (tmp_path / "out").exists()
    begin(tmp_path / "out", model, prepared("a b", own()))  # the same codec out of another folder


@pytest.mark.parametrize(
    ("knows", "given", "says"),
    [
        ("a b c", "b c", "class 0 of the pictures in {data} is b, of {model} a:"),
        ("a b c", "a b", "class 2 of the pictures in {data} is missing, of {model} c:"),
        ("a b c", "x y z", "class 0 of the pictures in {data} is x, of {model} a:"),
        ("a b c", "", "class 0 of the pictures in {data} is missing, of {model} a:"),
        ("", "a b", "class 0 of the pictures in {data} is a, of {model} missing:"),
    ],
)
def test_data_of_other_classes_are_refused(knows, given, says, teacher, prepared, tmp_path):
    model, _ = teacher(knows, PixelCodec(4))
    data = prepared(given, PixelCodec(4))
    with pytest.raises(ValueError) as error:
        begin(tmp_path / "out", model, data)
    line = says.format(data=data.folder, model=model)
    assert str(error.value) == f"{line} expected the same classes in the same order"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["pgm", "maskgit"])
def test_pictures_without_classes_fit_a_model_without_classes(kind, teacher, tmp_path):
    assert begin(tmp_path / "out", *teacher("", PixelCodec(4), kind)).groups == ("two" if kind == "pgm" else "one")


def test_a_model_without_codec_and_names_fits_by_its_numbers(teacher, prepared, tmp_path):
    """As the released ones are."""
    model, data = teacher("a b c", PixelCodec(4), named=False)
    with pytest.raises(ValueError, match=f"have 2 classes, {model} 3$"):
        begin(tmp_path / "out", model, prepared("a b", PixelCodec(4)))
    with pytest.raises(ValueError, match=f"have 16 codes, {model} 6 ids$"):
        begin(tmp_path / "out", model, prepared("a b c", PixelCodec(16)))
    begin(tmp_path / "out", model, data)


def test_a_dropped_label_is_the_networks_no_class(prepared, tmp_path):
    """Also where the network has more classes than the data: the number of those would be one of its classes."""
    data = prepared("a b", PixelCodec(4))
    network = dataclasses.asdict(image_network_config("pgm", data, width=32, layers=2)) | {"classes": 5}
    settings = TrainConfig(**TRAIN, weights="arccos", label_dropout=0.5)
    run, seen = Run(tmp_path, RunConfig(data=str(data.folder), network=network, train=settings)), set[int]()
    run.network.condition.register_forward_pre_hook(lambda _, given: seen.update(given[0].tolist()))
    for _ in run:
        pass
    run.close()
    assert seen == {0, 1, 5}
