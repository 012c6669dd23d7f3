"""The state of a batch on the device: which tokens are known, in which order, and where the next ones are.

Shapes: B rows, N columns of a row, S rows of a span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.kernels import Past
from maskless.problems import Offsets


class Places(NamedTuple):
    """Some places of the flattened batch."""

    at: Tensor  # (T,) index
    positions: Tensor  # (T,)
    tokens: Tensor  # (T,)


@dataclass
class BatchState:
    """The rows of a batch on the device; everything stands in the order in which it becomes known."""

    order: Tensor  # (B, N) positions
    tokens: Tensor  # (B, N) ids
    known: Tensor  # (B,) int32, how many
    starts: Tensor  # (B,) int32, where each row begins in the flattened batch
    columns: Tensor  # (N,) 0, 1, ...

    @staticmethod
    def empty(rows: int, columns: int, device: torch.device) -> BatchState:
        order, tokens = torch.zeros(2, rows, columns, dtype=torch.long, device=device)
        known = torch.zeros(rows, dtype=torch.int32, device=device)
        starts = torch.arange(rows, dtype=torch.int32, device=device) * columns
        return BatchState(order, tokens, known, starts, torch.arange(columns, device=device))

    def last(self, span: Offsets) -> Places:
        """The last known tokens, as many of each row as the span says."""
        return self._places(span, -1)

    def next(self, span: Offsets) -> Places:
        """The first unknown ones."""
        return self._places(span, 0)

    def following(self, span: Offsets) -> Places:
        """What follows each of the last known tokens, as many as the span says."""
        return self._places(span, -1, 1)

    def _places(self, span: Offsets, lengths: int, more: int = 0) -> Places:
        """From where the known tokens end, so many times the length of each row and so many places further on."""
        if span.equal and kernels.on_cuda(self.order):
            shift = lengths * span.longest + more
            return Places(
                *kernels.triton().places(self.order, self.tokens, self.known, span.longest, span.total, shift)
            )
        S = len(span)
        begin = self.starts[:S] + self.known[:S] + more + lengths * (span.longest if span.equal else span.bounds.diff())
        if span.equal:
            index = (begin[:, None] + self.columns[: span.longest]).flatten()
        else:
            index = begin[span.owner] + span.within
        return Places(index, *(x.view(-1).index_select(0, index) for x in (self.order, self.tokens)))

    def past(self, span: Offsets) -> Past:
        """All that is known of the rows of a span."""
        return Past(self.starts[: len(span)], self.known[: len(span)])

    def columns_of(self, rows: int, places: int) -> Tensor:
        """The column of the known token that stands at each place; where none does, one that is not known, or N.

        At the end, for what is nowhere, is such a column too.  -> (S, places + 1)
        """
        columns = self.columns.expand(rows, -1)
        where = torch.where(columns < self.known[:rows, None], self.order[:rows], places)
        return self.order.new_full((rows, places + 1), len(self.columns)).scatter(1, where, columns)

    def lay_out(self, into: Tensor, mask: int) -> Tensor:
        """The first rows by position, with the mask id wherever nothing is known.  (S, L) -> (S, L) itself"""
        rows = len(into)
        known = self.columns < self.known[:rows, None]
        return into.fill_(mask).scatter_(1, self.order[:rows], torch.where(known, self.tokens[:rows], mask))
