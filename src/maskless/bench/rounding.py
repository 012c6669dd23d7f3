"""What a precision costs: how far the answers of an engine are from those in float32, on real text.

Shapes: N sequences, L length, U targets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table as Grid
from torch import Tensor, nn

from maskless.bench.case import PRECISIONS, at_least_1, one_of
from maskless.engine import Engine
from maskless.nn.causal import CausalTransformer
from maskless.problems import Problems, split

TARGETS = 32  # at most so many of a sequence are predicted


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """The answers in a precision beside those in float32, means over all targets."""

    precision: str
    nats: float  # the cost of the true token
    kl: float  # nats, of the distribution in float32 from this one
    error: float  # root mean square of the difference of logits
    spread: float  # standard deviation of the logits in float32
    same: float  # share of targets with the same most likely token


def rounding(
    network: nn.Module,
    tokens: Tensor,
    precisions: list[str],
    *,
    pad: int | None = None,
    batch: int = 8,
    seed: int = 0,
    on_batch: Callable[[int], None] | None = None,
) -> list[Rounding]:
    """What each precision costs on sequences tokens (N, L) of which from little to nearly everything is known."""
    at_least_1("batch", batch)
    for name in precisions:
        one_of("precision", name, PRECISIONS)
    if isinstance(network, CausalTransformer):
        raise ValueError("rounding is measured with tokens known in any order: expected pgm or mdlm, not ar")
    exact = Engine(network, precision=torch.float32, graphs=False)
    engines = {name: Engine(network, precision=PRECISIONS[name], graphs=False) for name in precisions}
    sums = {name: torch.zeros(5, dtype=torch.float64) for name in precisions}
    targets, entries = 0, 0
    for problems, truth, rows in _problems(tokens, pad, batch, seed):
        reference = exact.answer(problems)  # (U, V)
        real = reference.isfinite()
        targets, entries = targets + len(reference), entries + int(real.sum())
        for name, engine in engines.items():
            sums[name] += _compared(reference, engine.answer(problems), truth.to(reference.device), real).cpu()
        if on_batch is not None:
            on_batch(rows)
    found = []
    for name, (nats, kl, same, error, spread) in ((name, x.tolist()) for name, x in sums.items()):
        roots = {"error": (error / entries) ** 0.5, "spread": (spread / entries) ** 0.5}
        found.append(Rounding(precision=name, nats=nats / targets, kl=kl / targets, same=same / targets, **roots))
    return found


def _compared(exact: Tensor, mine: Tensor, truth: Tensor, real: Tensor) -> Tensor:
    """Sums over all targets: cost, divergence, agreement, squares of the differences and of the logits.  -> (5,)"""
    p, q = exact.double().log_softmax(-1), mine.double().log_softmax(-1)
    nats = -q.gather(1, truth[:, None]).sum()
    kl = torch.where(real, p.exp() * (p - q), 0).sum()
    same = (p.argmax(-1) == q.argmax(-1)).sum()
    mean = torch.where(real, exact, 0).sum(-1, keepdim=True) / real.sum(-1, keepdim=True)
    squares = [torch.where(real, x, 0).double().square().sum() for x in (mine - exact, exact - mean)]
    return torch.stack([nats, kl, same.double(), *squares])


def _problems(tokens: Tensor, pad: int | None, batch: int, seed: int) -> Iterator[tuple[Problems, Tensor, int]]:
    """Problems with their true tokens (U,), and of how many sequences; the first token is known, padding left out."""
    N, L = tokens.shape
    counted = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
    place = torch.rand(N, L, generator=torch.Generator().manual_seed(seed))
    place[:, 0] = -1
    order = place.masked_fill(~counted, 2).argsort(1)
    n = counted.sum(1)
    long = (n > 1).nonzero()[:, 0]
    if not len(long):
        raise ValueError("nothing to measure on: expected sequences of 2 tokens or more")
    starts = (1 + (torch.arange(N) + 0.5) / N * (n - 1)).long()
    ends = n.minimum(starts + TARGETS)
    for rows in long.split(batch):
        problems, index = split(tokens[rows], order[rows], starts[rows], ends[rows])
        yield problems, tokens[rows].flatten()[index], len(rows)


def as_dict(found: list[Rounding]) -> dict[str, Any]:
    """By precision, for JSON."""
    return {one.precision: {name: value for name, value in vars(one).items() if name != "precision"} for one in found}


def grid(found: list[Rounding]) -> Grid:
    """One line for each precision."""
    shown = Grid(box=box.SIMPLE_HEAD, caption="beside answers in float32; nats per target", caption_justify="left")
    shown.add_column("precision")
    for column in ("cost of the true token", "KL divergence", "error of logits", "of their deviation", "same argmax"):
        shown.add_column(column, justify="right")
    for one in found:
        share = one.error / one.spread
        figures = f"{one.nats:.4f}", f"{one.kl:.2e}", f"{one.error:.2e}", f"{share:.2%}", f"{one.same:.2%}"
        shown.add_row(one.precision, *figures)
    return shown
