"""Real pictures as a reference: a side of them is the side that was prepared."""

import json
from pathlib import Path

import pytest
import torch

from command_inputs import INPUTS
from command_inputs import photos as photos_of
from in_process import done, one_line
from maskless.codec.vq import PixelCodec, to_images
from maskless.data.image_prepare import prepare_images
from maskless.evaluate import sets


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """100 different pictures without a split."""
    return photos_of(tmp_path_factory.mktemp("sets") / "photos", [""], count=100, shape=(4, 4, 3))


@pytest.fixture(scope="module")
def parted(photos) -> Path:
    """Pictures that hold out their own."""
    for side, some in (("train", range(20)), ("valid", range(20, 40))):
        target = photos.parent / "parted" / side / "a"
        target.mkdir(parents=True)
        for i in some:
            (target / f"{i}.png").write_bytes((photos / f"{i}.png").read_bytes())
    return photos.parent / "parted"


@pytest.mark.parametrize("share", [0.2, 0.15, 0.5])
def test_a_side_is_what_was_prepared_with_the_same_share(photos, tmp_path, share):
    codec = PixelCodec(256, 3)
    prepared = prepare_images([photos], tmp_path / "data", codec, size=4, valid=share)
    for side in ("train", "valid"):
        found = sets.real(f"{photos}:{side}", share)
        squares = torch.cat(list(found.batches(4)))
        assert found.count == len(squares)
        codes = codec.encode(to_images(squares.numpy())).flatten(1)
        assert torch.equal(codes, prepared.split(side).rows(range(len(squares)))[:, 1:])


def test_without_a_share_it_is_that_of_prepare(photos):
    assert [sets.real(f"{photos}:train", share).count for share in (None, 0.05, 0.2)] == [95, 95, 80]
    assert sets.real(str(photos)).count == 100


@pytest.fixture
def fid(command, tmp_path):
    """The command `fid` through a small network: how it ended."""
    INPUTS["inception.pt"](network := tmp_path / "means.pt")
    return lambda *words: command("fid", *words, "--features", network, "--feature-input", "pixels", "--json")


def test_the_command_line_takes_the_share(photos, parted, fid):
    found = json.loads(done(fid(f"{photos}:train", f"{photos}:valid", "--valid", 0.2)).out)
    assert (found["reference"], found["images"]) == (80, 20)
    assert json.loads(fid(f"{parted}:train", f"{photos}:valid", "--valid", 0.2)[1])["reference"] == 20


def test_a_share_that_is_of_no_use_is_refused(photos, parted, fid):
    for words, says in (
        ((photos, photos, "--valid", 0.2), "--valid 0.2 is for PATH:train or PATH:valid where the data has no split"),
        ((f"{parted}:train", f"{parted}:valid", "--valid", 0.2), f"not for {parted}:train, {parted}:valid"),
        ((f"{photos}:train", photos, "--valid", 0.9), "valid is 0.9: expected a share above 0, at most 0.5"),
    ):
        assert says in one_line(fid(*words))
