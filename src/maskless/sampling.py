"""Sampling: the state grows in a fixed order, some positions in each step, until every wanted position is decided.

The order, the counts per step and the draw are independent choices (order.py, logits.py). Prompts and gaps are just
more context. One loop serves every network that answers problems; a causal network has its own, with its cache.

Shapes: B rows, L length, K steps, U targets of a step, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.nn import Network, device_of
from maskless.nn.causal import CausalTransformer
from maskless.order import Counts, Order
from maskless.problems import split

ORDER, COUNT, DRAW = range(3)  # purposes of random numbers
Filter = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits (U, V), rows (U,), positions (U,) -> logits


@dataclass(frozen=True)
class Step:
    """What one step decided: U tokens, each with its row and position."""

    number: int  # 0 .. K-1
    rows: Tensor
    positions: Tensor
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Temperature, then top-k, then nucleus; the defaults leave the model's distribution as it is."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is out of range: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is out of range: expected 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is out of range: expected more than 0 and at most 1")

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        logits = lg.temper(logits.float(), self.temperature)
        if self.top_k is not None:
            logits = lg.top_k(logits, self.top_k)
        return logits if self.top_p is None or self.top_p == 1 else lg.top_p(logits, self.top_p)


def sample(
    network: Network,
    tokens: Tensor,
    known: Tensor,
    wanted: Tensor,
    keys: Tensor,
    *,
    steps: int,
    order: Order,
    counts: Counts,
    filter: Filter,
) -> Iterator[Step]:
    """Decide the wanted positions of each row in K steps, in place, yielding each step.

    tokens (B, L) with the given ones where `known`; keys (B,) from `row_keys`. A row with fewer than K unknown
    positions takes one step for each, so it comes out as it would alone. A step that decides nothing (counts may be 0)
    yields nothing and costs nothing.  PGM, Alg. 2 and 3
    """
    m = wanted.sum(1)
    check_steps(steps, int(m.max()))
    each = m.clamp(1, steps)
    columns = torch.arange(tokens.shape[1])
    stage = torch.where(known, 0, torch.where(wanted, 1, 2))
    sequence = order(stage, lg.uniforms(keys[:, None], columns, ORDER))  # (B, L)
    ends = known.sum(1, keepdim=True) + counts(m, each, lg.uniforms(keys[:, None], columns, COUNT)).cumsum(1)
    starts = torch.cat([known.sum(1, keepdim=True), ends[:, :-1]], 1)  # (B, K)
    device = device_of(network)
    for number in range(ends.shape[1]):
        busy = (ends[:, number] > starts[:, number]).nonzero()[:, 0]
        if not len(busy):
            continue
        problems, _ = split(tokens[busy], sequence[busy], starts[busy, number], ends[busy, number])
        rows, positions = busy[problems.target_offsets.owner], problems.targets
        with torch.no_grad():
            logits = network(problems.to(device))
        drawn = _draw(logits, filter, rows, positions, keys)
        tokens[rows, positions] = drawn
        yield Step(number, rows, positions, drawn)


def sample_causal(
    network: CausalTransformer, tokens: Tensor, known: Tensor, wanted: Tensor, keys: Tensor, *, filter: Filter
) -> Iterator[Step]:
    """Decide the wanted positions from left to right with the cache, in place, yielding each step.

    Known positions must be a prefix of each row; where prefixes differ in length, the longer ones are read along.
    """
    m = known.sum(1)
    if not (known == (torch.arange(known.shape[1]) < m[:, None])).all():
        raise ValueError("a causal model continues a prompt: it cannot fill a gap that has text after it")
    device, cache = device_of(network), network.cache(len(tokens))
    begin, end = int(m.min()), int((known | wanted).sum(1).max())
    fresh = tokens[:, :begin]
    for number, position in enumerate(range(begin, end)):
        with torch.no_grad():
            logits = network.extend(fresh.to(device), cache)
        rows = wanted[:, position].nonzero()[:, 0]
        positions = torch.full_like(rows, position)
        drawn = _draw(logits[rows.to(device)], filter, rows, positions, keys)
        tokens[rows, position] = drawn
        fresh = tokens[:, position : position + 1]
        if len(rows):
            yield Step(number, rows, positions, drawn)


def check_steps(steps: int, unknown: int) -> None:
    if unknown == 0:
        raise ValueError("nothing to decide: every token is known")
    if not 1 <= steps <= unknown:
        raise ValueError(f"steps {steps} is out of range: expected 1 to {unknown}, the number of unknown positions")


def _draw(logits: Tensor, filter: Filter, rows: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    u = lg.uniforms(keys[rows], positions, DRAW)
    device = logits.device
    u = u.float().to(device) if device.type == "mps" else u.to(device)
    return lg.draw(filter(logits, rows.to(device), positions.to(device)), u).cpu()
