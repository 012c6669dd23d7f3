"""Released image tokenizers: their weights come out, whatever else is pickled in them stays inert."""

import argparse
import os
from pathlib import Path

import pytest
import torch

from maskless import official
from maskless.codec.vq import VQ, VQConfig
from official_logits import without

IMAGES = torch.rand(2, 3, 8, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.fixture(scope="module", params=[(1, 2), (1, 1, 2)], ids=["factor 2", "factor 4"])
def codec(request) -> VQ:
    torch.manual_seed(0)
    sizes = {"codes": 16, "code_width": 4, "latent": 8, "width": 32, "blocks": 1 + len(request.param) % 2}
    return VQ(VQConfig(multipliers=request.param, **sizes)).eval()


def released(codec: VQ) -> dict:
    return {"model": codec.state_dict() | {"quantize.codebook_used": torch.zeros(65_536)}}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_released_file_gives_its_codec(codec, zipped, tmp_path):
    torch.save(released(codec), tmp_path / "vq.pt", _use_new_zipfile_serialization=zipped)
    read = official.read_codec(tmp_path / "vq.pt")
    assert read.config == codec.config
    assert not read.training
    assert read.encode(IMAGES).equal(codec.encode(IMAGES))
    assert read.decode(codec.encode(IMAGES)).equal(codec.decode(codec.encode(IMAGES)))


class Harmful:
    """Runs a command when a plain reader meets it."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_nothing_in_the_file_is_run(codec, tmp_path):
    mark = tmp_path / "was run"
    settings = {
        "args": argparse.Namespace(lr=1e-4, out=Path("runs")),
        "call": Harmful(exec, f"open({str(mark)!r}, 'w')"),
    }
    torch.save(released(codec) | settings, tmp_path / "vq.pt")
    assert official.read_codec(tmp_path / "vq.pt").encode(IMAGES).equal(codec.encode(IMAGES))
    assert not mark.exists()
    torch.save(released(codec) | {"call": Harmful(os.mkdir, str(mark))}, tmp_path / "system.pt")
    assert official.read_codec(tmp_path / "system.pt").config == codec.config
    assert not mark.exists()
    torch.load(tmp_path / "system.pt", weights_only=False)  # the harm is real
    assert mark.exists()


def test_what_is_no_released_tokenizer_is_named(codec, tmp_path):
    path, state = tmp_path / "vq.pt", released(codec)["model"]
    lacks = r"vq.pt is not a released image tokenizer: it lacks 'encoder.conv_in"
    few = without(state, "decoder.mid.0.conv1.weight")
    for content, says in (
        *((content, lacks) for content in ({"model": {}}, {"state_dict": {}}, [1, 2])),
        ({"model": few}, r"mid.0.conv1.weight' is missing, expected \(64, 64, 3, 3\)"),
        ({"model": state | {"quantize.embedding.weight": torch.zeros(3)}}, "its tensors have other shapes"),
        ({"model": state | {"loss.weight": torch.zeros(1)}}, r"holds the unknown tensor 'loss.weight'"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=says):
            official.read_codec(path)
    whole = path.read_bytes()
    for damaged in (b"", b"no checkpoint", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"vq.pt is damaged or not a checkpoint"):
            official.read_codec(path)
    with pytest.raises(ValueError, match=r"absent.pt does not exist"):
        official.read_codec(tmp_path / "absent.pt")
