"""Plans: which positions of each row are decided in which step, all fixed before the first network call.

Shapes: B rows, L length, K steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.order import Counts, Order, strand_steps, strands

ORDER, COUNT = 0, 1  # purposes of random numbers


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

    def first(self) -> Tensor:
        """The first step of each row that decides something: steps may be empty.  -> (B,)"""
        return (self.ends.diff(dim=1) > 0).int().argmax(1)

    def progress(self) -> Tensor:
        """How far each row is in each step: 0 in the first that decides something, 1 in the last.  -> (B, K) float64

        By a row's own steps: others in the batch may have more. A row with one step only is at 1, its last.
        """
        busy = (self.ends.diff(dim=1) > 0).int()
        first, last = self.first()[:, None], self.steps - 1 - busy.flip(1).argmax(1, keepdim=True)
        first = first - (first == last).int()
        return ((torch.arange(self.steps) - first) / (last - first).clamp_min(1).double()).clamp(0, 1)

    def seen(self) -> Tensor:
        """How many positions each place of a row's order is decided from: those of the steps before it.  -> (B, L)"""
        place = torch.arange(self.order.shape[1]).expand_as(self.order).contiguous()
        step = (torch.searchsorted(self.ends, place, right=True) - 1).clamp_max(self.steps - 1)
        return torch.where(step < 0, place, self.ends.gather(1, step.clamp_min(0)))

    def came(self) -> Tensor:
        """The step that decides each position, -1 where none does.  -> (B, L)"""
        place = torch.arange(self.order.shape[1]).expand_as(self.order).contiguous()
        step = torch.searchsorted(self.ends, place, right=True) - 1
        return torch.full_like(step, -1).scatter(1, self.order, step.masked_fill(step == self.steps, -1))

    def one_by_one(self) -> Plan:
        """The same order, a position in each step."""
        first, last = self.ends[:, :1], self.ends[:, -1:]
        return Plan(self.order, (first + torch.arange(int((last - first).max()) + 1)).minimum(last))

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


def plan_strands(
    known: Tensor, wanted: Tensor, keys: Tensor, *, longest: Tensor, shape: Callable[[Order], Order]
) -> Plan:
    """Decide the wanted positions in strands of at most `longest` (B, 1) each, all strands in step.  -> Plan

    shape: what is made of the order, such as `in_place`.
    """
    steps = strand_steps(wanted, longest)
    check_steps(1, int(wanted.sum(1).max()))
    each = torch.zeros(len(wanted), int(steps.max()) + 1, dtype=torch.long).scatter_add(1, steps, wanted.long())
    ends = torch.cat([known.sum(1, keepdim=True), each], 1).cumsum(1)
    stage = torch.where(known, 0, torch.where(wanted, 1, 2))
    u = lg.uniforms(keys[:, None], torch.arange(known.shape[1]), ORDER)
    return Plan(shape(strands(longest))(stage, u), ends)


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


def check_steps(steps: int, unknown: int) -> None:
    if unknown == 0:
        raise ValueError("nothing to decide: every token is known")
    if not 1 <= steps <= unknown:
        raise ValueError(f"steps {steps} is out of range: expected 1 to {unknown}, the number of unknown positions")
