"""The residual stream that runs through layers: what each linear reads of it, and how each product joins it.

For text the modulations are constants, which are in the weights already: a norm adds what the stream lacks, and a
product ends in an addition. For images they belong to the label of a row: the product's gated addition to the stream,
the norm that follows, its scale and its shift are then one pass over the tokens.

The norms of a network come in stacks, one for each run of layers. A stack is read from its first norm to its last.

Shapes: B rows, T tokens, n conditions, C condition width, P parts of a modulation, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.kernels import LinearMap, Shifts
from maskless.problems import Offsets


class Stream(Protocol):
    """Tokens on their way through the layers of a stack."""

    x: Tensor  # (T, D), up to date after a read

    def read(self) -> Tensor:
        """The stream after its next norm, as the next linear takes it.  -> (T, D)"""
        ...

    def into(self, linear: LinearMap, *, gelu: bool = False) -> Tensor:
        """A linear map of the stream after its next norm, then GELU if asked for.  -> (T, N)"""
        ...

    def add(self, a: Tensor, linear: LinearMap) -> None:
        """A product joins the stream.  (T, E)"""
        ...

    def select(self, index: Tensor, span: Offsets) -> Stream:
        """These tokens alone, from here on; span: of them in each row."""
        ...


class Norms(Protocol):
    """All norms of a network."""

    def open(self, rows: int) -> OpenNorms: ...


class OpenNorms(Protocol):
    """The norms at work on a batch."""

    def label(self, labels: Tensor) -> None:
        """Rows from here on have these labels.  (B,)"""
        ...

    def stream(self, stack: int, x: Tensor, span: Offsets) -> Stream:
        """x (T, D) enters a stack of layers; span: of its tokens in each row."""
        ...


@dataclass(frozen=True)
class Constants:
    """Norms whose modulations are in the weights: of each stack, what the stream lacks before each norm, (D,) each."""

    stacks: list[list[Tensor]]

    def open(self, rows: int) -> Constants:
        return self

    def label(self, labels: Tensor) -> None:
        """Labels change nothing."""

    def stream(self, stack: int, x: Tensor, span: Offsets) -> Stream:
        return _Folded(x, iter(self.stacks[stack]))


@dataclass
class _Folded:
    x: Tensor
    offsets: Iterator[Tensor]

    def read(self) -> Tensor:
        return kernels.normalise(self.x, next(self.offsets))

    def into(self, linear: LinearMap, *, gelu: bool = False) -> Tensor:
        return kernels.norm_linear(self.x, next(self.offsets), linear, gelu=gelu)

    def add(self, a: Tensor, linear: LinearMap) -> None:
        kernels.add_linear(self.x, a, linear.weight)  # its bias is in the offsets

    def select(self, index: Tensor, span: Offsets) -> _Folded:
        return _Folded(self.x.index_select(0, index), self.offsets)


@dataclass(frozen=True)
class Conditions:
    """Norms that are modulated by the label of a row.

    All parts of all modulations are one linear map of the condition. They stand in the order in which a stream needs
    them: shift and scale (which holds the norm's own weight) of a norm, then the gate of the product that follows.
    """

    table: Tensor  # (classes + 1, C) the condition of each label
    weight: Tensor  # (P*D, C)
    bias: Tensor  # (P*D,) float32
    width: int  # D
    cuts: list[int]  # P of each stack
    centred: bool  # norms take the mean away; else they divide by the root mean square alone

    def open(self, rows: int) -> _OpenConditions:
        return _OpenConditions(self, rows)


class _OpenConditions:
    """Buffers that captured graphs read: the modulations of each distinct label, and which of them each row has."""

    def __init__(self, conditions: Conditions, rows: int):
        self.conditions, device, D = conditions, conditions.bias.device, conditions.width
        most = min(rows, len(conditions.table))
        self.parts = torch.zeros(sum(conditions.cuts), most, D, device=device)
        self.which = torch.zeros(rows, dtype=torch.int32, device=device)
        neutral = [value(1, D, device=device).expand(most, D) for value in (torch.zeros, torch.ones)]
        self.stacks = [[*part, *neutral] for part in self.parts.split(conditions.cuts)]

    def label(self, labels: Tensor) -> None:
        """Once for a run, and for each distinct label: the modulations stay the same in every step."""
        distinct, which = labels.unique(return_inverse=True)
        own, device = self.conditions, self.which.device
        condition = own.table.index_select(0, distinct.to(device))
        parts = kernels.logits_of(condition, own.weight) + own.bias  # (n, P*D)
        self.parts[:, : len(distinct)] = parts.unflatten(1, (-1, own.width)).transpose(0, 1)
        self.which[: len(which)] = which.to(self.which)

    def stream(self, stack: int, x: Tensor, span: Offsets) -> Stream:
        return _Modulated(x, iter(self.stacks[stack]), self.which, span, self.conditions.centred)


class _Modulated:
    """A product waits until the norm that follows is read, so that both are one pass."""

    def __init__(self, x: Tensor, parts: Iterator[Tensor], which: Tensor, span: Offsets, centred: bool):
        self.x, self.parts, self.which, self.span, self.centred = x, parts, which, span, centred
        self.waits: tuple[Tensor, Tensor] | None = None  # a product and its gate

    def read(self) -> Tensor:
        waits, self.waits = self.waits, None
        how = Shifts(next(self.parts), next(self.parts), self.which, self.span, self.centred)
        return kernels.modulate(self.x, waits, how)

    def into(self, linear: LinearMap, *, gelu: bool = False) -> Tensor:
        return kernels.linear(self.read(), linear, gelu=gelu)

    def add(self, a: Tensor, linear: LinearMap) -> None:
        assert self.waits is None, "a stream is read between two products"
        self.waits = kernels.linear(a, linear), next(self.parts)

    def select(self, index: Tensor, span: Offsets) -> _Modulated:
        chosen = _Modulated(self.x.index_select(0, index), self.parts, self.which, span, self.centred)
        if self.waits is not None:
            chosen.waits = self.waits[0].index_select(0, index), self.waits[1]
        return chosen
