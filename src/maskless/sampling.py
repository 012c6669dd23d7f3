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


@dataclass(frozen=True)
class Plan:
    """What is decided when, fixed before the first network call.

    Row b knows the positions order[b, :ends[b, 0]] at first, and step i decides order[b, ends[b, i] : ends[b, i + 1]].
    """

    order: Tensor  # (B, L) a permutation of the positions of each row
    ends: Tensor  # (B, K+1)

    @property
    def steps(self) -> int:
        return self.ends.shape[1] - 1

    def came(self) -> Tensor:
        """The step that decides each position, -1 where none does.  -> (B, L)"""
        place = torch.arange(self.order.shape[1]).expand_as(self.order).contiguous()
        step = torch.searchsorted(self.ends, place, right=True) - 1
        return torch.full_like(step, -1).scatter(1, self.order, step.masked_fill(step == self.steps, -1))

    def decided(self) -> list[list[int]]:
        """Of each row: the decided positions, in the order in which they come."""
        first, last = self.ends[:, 0].tolist(), self.ends[:, -1].tolist()
        return [row[a:b] for row, a, b in zip(self.order.tolist(), first, last, strict=True)]


def plan(known: Tensor, wanted: Tensor, keys: Tensor, *, steps: int, order: Order, counts: Counts) -> Plan:
    """Decide the wanted positions of each row in K steps.  (B, L), (B, L), (B,) -> Plan

    keys from `row_keys`. A row with fewer than K unknown positions takes one step for each, so it comes out as it would
    alone.  PGM, Alg. 2 and 3
    """
    m = wanted.sum(1)
    check_steps(steps, int(m.max()))
    columns = torch.arange(known.shape[1])
    stage = torch.where(known, 0, torch.where(wanted, 1, 2))
    each = counts(m, m.clamp(1, steps), lg.uniforms(keys[:, None], columns, COUNT))  # (B, K)
    ends = torch.cat([known.sum(1, keepdim=True), each], 1).cumsum(1)
    return Plan(order(stage, lg.uniforms(keys[:, None], columns, ORDER)), ends)


def plan_causal(known: Tensor, wanted: Tensor) -> Plan:
    """Decide the wanted positions from left to right, one in each step.  (B, L), (B, L) -> Plan

    Known positions must be a prefix of each row; where prefixes differ in length, the longer ones wait.
    """
    m, L = known.sum(1, keepdim=True), known.shape[1]
    if not (known == (torch.arange(L) < m)).all():
        raise ValueError("a causal model continues a prompt: it cannot fill a gap that has text after it")
    last = (known | wanted).sum(1, keepdim=True)
    check_steps(1, int((last - m).max()))
    ends = torch.arange(int(m.min()), int(last.max()) + 1).maximum(m).minimum(last)
    return Plan(torch.arange(L).repeat(len(known), 1), ends)


def sample(network: Network, tokens: Tensor, plan: Plan, keys: Tensor, *, filter: Filter) -> Iterator[Step]:
    """Decide tokens (B, L) as planned, in place, yielding each step.

    This is the method in its plainest form, for any network that answers problems; engine.py does the same faster. A
    step that decides nothing (counts may be 0) yields nothing and costs nothing.
    """
    device = device_of(network)
    for number in range(plan.steps):
        starts, ends = plan.ends[:, number], plan.ends[:, number + 1]
        busy = (ends > starts).nonzero()[:, 0]
        if not len(busy):
            continue
        problems, _ = split(tokens[busy], plan.order[busy], starts[busy], ends[busy])
        rows, positions = busy[problems.target_offsets.owner], problems.targets
        with torch.no_grad():
            logits = network(problems.to(device))
        drawn = _draw(logits, filter, rows, positions, keys)
        tokens[rows, positions] = drawn
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
