"""Tiny networks of every kind, a chi-square test, the command line, and the rule that `gpu` needs a CUDA device."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from in_process import Ended, exit_code_of
from maskless.nn.causal import CausalConfig, CausalTransformer
from maskless.nn.masked import MaskedConfig, MaskedTransformer
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from tiny_networks import shaken

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)  # tiny tensors: more threads only wait for one another

SIZES = {"vocab": 11, "length": 8, "width": 16, "heads": 2, "condition": 8}
PARTITION = {kind: {"queries": kind} for kind in ("position", "mean", "logsumexp")} | {
    "ordered": {"context": "ordered"}
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def steady_clock(monkeypatch) -> None:
    """Every look at the clock of a training run takes a hundredth of a second, on any machine."""
    reads = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(reads) / 100)
    for module in ("cli.entry", "train.folder", "train.loop"):
        monkeypatch.setattr(f"maskless.{module}.time", clock)


def make_tiny(kind: str, *, scale: float = 0.05, seed: int = 0, **sizes: Any) -> nn.Module:
    torch.manual_seed(seed)
    network: nn.Module
    sizes = SIZES | sizes
    if kind == "masked":
        network = MaskedTransformer(MaskedConfig(**{"mask": sizes["vocab"] - 1, "layers": 2} | sizes))
    elif kind == "causal":
        network = CausalTransformer(CausalConfig(**{"layers": 2} | sizes))
    else:
        network = PartitionTransformer(PartitionConfig(**PARTITION[kind] | {"encoder": 2, "decoder": 2} | sizes))
    return shaken(network, scale)


def make_p_value(observed: Tensor, expected: Tensor, spare: int = 1) -> float:
    """Of Pearson's chi-square test, cells pooled until each expects 10 or more; spare: constraints on the counts."""
    order = expected.flatten().argsort()
    o, e = observed.flatten().double()[order], expected.flatten().double()[order]
    assert (o[e == 0] == 0).all(), "something happened that has probability 0"
    small = int((e < 10).sum())
    if small:
        while small < len(e) and e[:small].sum() < 10:
            small += 1
        o, e = (torch.cat([x[:small].sum(0, keepdim=True), x[small:]]) for x in (o, e))
    assert len(e) > spare
    return float(torch.special.gammaincc(torch.tensor((len(e) - spare) / 2), ((o - e) ** 2 / e).sum().float() / 2))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """tiny(kind, scale=, seed=, **sizes): a network in eval mode whose parameters all differ from their start."""
    return make_tiny


@pytest.fixture(scope="session")
def p_value() -> Callable[..., float]:
    return make_p_value


@pytest.fixture
def command(capsys) -> Callable[..., Ended]:
    """command(*words): how `maskless` ends, and what it has said."""

    def call(*words: object) -> Ended:
        capsys.readouterr()
        return Ended(exit_code_of(*words), *capsys.readouterr())

    return call


@pytest.fixture(params=[*PARTITION, "masked"])
def network(request: pytest.FixtureRequest) -> nn.Module:
    """A network of each kind that answers problems in any order."""
    return make_tiny(request.param)
