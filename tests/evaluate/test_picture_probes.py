"""The leak probe on networks of pictures: none leaks, one that does is found out, and the command says so."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from in_process import Ended, done, one_line
from maskless.checkpoint import Model
from maskless.codec.vq import PixelCodec
from maskless.nn.maskgit import MaskGIT, MaskGITConfig
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.problems import Problems
from tiny_networks import shaken

CODES, CLASSES, GRID = 9, 3, (3, 3)
SIZES = {"length": 10, "grid": GRID, "width": 32, "heads": 2, "classes": CLASSES}


def make(kind: str) -> nn.Module:
    """A network of pictures whose parameters all differ from their start."""
    torch.manual_seed(0)
    network: nn.Module
    if kind == "maskgit":
        network = MaskGIT(MaskGITConfig(**SIZES, vocab=CODES + 1, mask=CODES, layers=2))
    else:
        halves = {"encoder": 1, "decoder": 1, "registers": True, "never": CODES}
        network = PartitionTransformer(PartitionConfig(**SIZES, **halves, vocab=CODES + 2))
    return shaken(network, 0.1)


def leaking(forward: Callable[..., Tensor], *given: Any) -> Tensor:
    """Adds to the predictions of every problem a little of what the next problem knows."""
    problems: Problems = given[-1]
    assert problems.labels is not None
    told = torch.zeros(len(problems)).index_add(0, problems.offsets.owner, problems.tokens.float()).roll(-1, 0)
    return forward(*given) + 1e-2 * told[problems.target_offsets.owner, None]


@pytest.fixture
def probed(command, tmp_path):
    """probed(network, *words): how `maskless evaluate` ends on an image model."""

    def call(network: nn.Module, *words: object) -> Ended:
        names = tuple(f"class {i}" for i in range(CLASSES))
        Model(network, PixelCodec(CODES), "image", names).save_pretrained(tmp_path / "model")
        return command("evaluate", tmp_path / "model", *words)

    return call


@pytest.mark.parametrize("kind", ["pgm", "maskgit"])
def test_the_command_probes_a_model_of_pictures(kind, probed):
    found = json.loads(done(probed(make(kind), "--what", "leak", "--sequences", 6, "--json")).out)["leak"]
    assert (found["tight"], found["moved"], found["predictions"]) == (True, 0, 6 * 9)  # a BOS is not predicted
    assert found["gradient"] == (0.0 if kind == "pgm" else None)
    assert found["seen"] > 0.9


@pytest.mark.parametrize("kind", ["pgm", "maskgit"])
def test_the_command_finds_a_leak_out(kind, probed, monkeypatch):
    network = make(kind)
    forward = type(network).forward
    monkeypatch.setattr(type(network), "forward", lambda *given: leaking(forward, *given))
    found = json.loads(probed(network, "--what", "leak", "--sequences", 4, "--json").out)["leak"]
    assert not found["tight"]
    assert found["moved"] > found["predictions"] / 2
    assert found["furthest"] > 0
    assert "YES" in probed(network, "--what", "leak").out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--what leak --data x", "--data does not go with --what leak: pictures are probed on random codes"),
        ("--what leak --reference x", "--reference does not go with --what leak"),
        ("--what leak --steps 4", "--steps does not go with --what leak"),
        ("--what leak --sequences 0", "sequences 0 is out of range: expected 1 or more"),
        ("--what variance", "--what variance: expected bound, leak or nothing, since this is an image model"),
        ("--what bound,leak", "--what bound,leak: expected bound, leak or nothing"),
    ],
)
def test_what_pictures_do_not_have_is_one_line(words, says, probed):
    assert says in one_line(probed(make("pgm"), *words.split()))
