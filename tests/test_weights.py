"""A file takes the memory that its tensors need: what its configuration claims beyond that is refused first."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from maskless import official
from maskless.checkpoint import Model
from maskless.codec.vq import VQ, PixelCodec, VQConfig, read_codec
from nn.reference import random_state
from official_logits import LENGTH, PGM
from tiny_networks import Largest

MUCH = 4_000_000  # times the sizes of a tiny network, hundreds of megabytes
LITTLE = 16 << 20


@pytest.fixture
def little() -> Iterator[None]:
    """In such a test no tensor may be large."""
    with Largest() as largest:
        yield
    assert largest.bytes < LITTLE


def change(folder: Path, part: str, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[part] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def refused(read, path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("kind", ["position", "masked", "causal"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab": MUCH}, r"'embedding.weight' is \(11, 16\), expected \(4000000, 16\)"),
        ({"vocab": 10**30}, "cannot hold a network of these sizes"),
        ({"width": 2048}, r"is \(\d+, 16\), expected \(\d+, 2048\)"),
        ({"condition": MUCH}, "expected .*4000000"),
        ({"length": 10**7}, r"bytes of weights, but a length of 10,000,000 takes [\d,]+ more for its positions"),
    ],
    ids=str,
)
def test_a_model_cannot_ask_for_more_memory_than_its_weights_have(tiny, tmp_path, kind, wrong, message):
    Model(tiny(kind)).save_pretrained(tmp_path)
    change(tmp_path, "network", **wrong)
    refused(Model.from_pretrained, tmp_path, message)


def test_layers_are_counted_before_any_is_made(tiny, tmp_path):
    Model(tiny("position")).save_pretrained(tmp_path)
    change(tmp_path, "network", encoder=2_000)
    refused(Model.from_pretrained, tmp_path, r"holds \d+ tensors: expected those of 2,002 layers")


@pytest.fixture
def codec() -> VQ:
    return VQ(VQConfig(codes=20, code_width=4, latent=8, width=32, blocks=1, multipliers=(1, 1)))


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"codes": MUCH}, r"'quantize.embedding.weight' is \(20, 4\), expected \(4000000, 4\)"),
        ({"channels": MUCH}, "expected .*4000000"),
        ({"width": 1024}, "expected .*1024"),
        ({"blocks": 500}, r"holds \d+ tensors: expected those of 500 layers"),
    ],
    ids=str,
)
def test_a_codec_cannot_ask_for_more_memory_than_its_weights_have(codec, tmp_path, wrong, message):
    codec.save(tmp_path)
    change(tmp_path, "codec", **wrong)
    refused(read_codec, tmp_path, message)


@pytest.mark.usefixtures("little")
def test_a_codec_without_weights_takes_no_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"kind": "vq", "codec": {"codes": MUCH}}))
    refused(read_codec, tmp_path, "is not a codec folder: it has no model.safetensors")


def test_levels_are_not_multiplied_before_they_are_known_to_be_few():
    class Level(int):
        def __pow__(self, *_):
            raise AssertionError("of such a number the power may take all memory")

    for levels, channels in ((Level(3), 10**9), (Level(10**9), 3)):
        with pytest.raises(ValueError, match=rf"{levels} levels of {channels} channel\(s\): expected"):
            PixelCodec(levels, channels)


# Released files


def saved(path: Path, **content) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"vocab_embed.embedding": torch.zeros(1).expand(MUCH, 16)}, r"bytes, but its tensors claim 256,\d+,\d+"),
        ({"vocab_embed.embedding": torch.zeros(2, 1024)}, r"expected \(.*1024"),
        ({"sigma_map.mlp.0.weight": torch.zeros(1).expand(MUCH, 256)}, "but its tensors claim"),
    ],
    ids=["repeated", "wide", "condition"],
)
def test_a_released_file_cannot_ask_for_more_memory_than_it_has(tmp_path, odd, message):
    path = saved(tmp_path / "odd.ckpt", state_dict=random_state(**PGM) | odd)
    refused(lambda path: official.read(path, weights="raw", length=LENGTH), path, message)


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("length", [10**7, "long", 2.5, -3])
def test_the_length_that_a_released_file_says_is_checked(tmp_path, length):
    settings = {"config": {"model": {"length": length}}}
    path = saved(tmp_path / "odd.ckpt", state_dict=random_state(**PGM), hyper_parameters=settings)
    refused(lambda path: official.read(path, weights="raw"), path, "length")


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_released_tokenizer_cannot_ask_for_more_memory_than_it_has(codec, tmp_path, dtype):
    odd = {"quantize.embedding.weight": torch.zeros(1, dtype=dtype).expand(MUCH, 4)}
    path = saved(tmp_path / "vq.pt", model=codec.state_dict() | odd)
    refused(official.read_codec, path, "but its tensors claim")


def test_a_compressed_archive_is_refused(codec, tmp_path):
    """It would grow a thousandfold; torch writes none."""
    for name, read, content in (
        ("pgm.ckpt", official.read, {"state_dict": random_state(**PGM)}),
        ("vq.pt", official.read_codec, {"model": codec.state_dict()}),
    ):
        path, packed = saved(tmp_path / name, **content), tmp_path / f"packed-{name}"
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
            for part in source.namelist():
                target.writestr(part, source.read(part))
        refused(read, packed, r"damaged or not a checkpoint: ValueError: .* is compressed in it")
