"""The rows of requests, as the batcher deals them out: drafts of different lengths, plans and progress in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.drafts import Drafts, Step
from maskless.nn.calls import evaluating
from maskless.sampling import CELLS, Plain, revise, take


@dataclass(frozen=True)
class ActiveSequence:
    """One of the drafts of a request."""

    drafts: Drafts
    at: int

    @property
    def done(self) -> bool:
        return self.drafts.over(self.at) and self.drafts.round_of(self.at) == self.drafts.revise

    @property
    def due(self) -> bool:
        """Whether the next round has to begin."""
        return self.drafts.over(self.at) and self.drafts.round_of(self.at) < self.drafts.revise

    @property
    def number(self) -> int:
        """The step that comes next."""
        return self.drafts.step_of(self.at)

    @property
    def round(self) -> tuple[int, int]:
        """The round that is under way, of how many."""
        return self.drafts.round_of(self.at), self.drafts.revise

    @property
    def size(self) -> int:
        """How many positions the next call is about; a round that begins looks at all that were sampled."""
        if self.due:
            return int(self.drafts.wanted[self.at].sum())
        span = self.drafts.span(self.at)
        return span.end - span.start


def batches(rows: Sequence[ActiveSequence], vocab: int, cells: int = CELLS) -> list[list[ActiveSequence]]:
    """Rows in groups whose logits fit into the memory that a call may take; a row that alone does not is alone."""
    groups: list[list[ActiveSequence]] = []
    room = 0
    for row in rows:
        needed = row.size * vocab
        if not groups or needed > room:
            groups.append([])
            room = cells
        groups[-1].append(row)
        room -= needed
    return groups


def due(rows: Sequence[ActiveSequence], vocab: int, cells: int = CELLS) -> list[list[ActiveSequence]]:
    """The rows whose next round has to begin, in groups that can share a call."""
    alike: dict[tuple[int, int], list[ActiveSequence]] = {}
    for row in rows:
        if row.due:
            alike.setdefault(row.round, []).append(row)
    return [group for some in alike.values() for group in batches(some, vocab, cells)]


def by_drafts(rows: Sequence[ActiveSequence]) -> list[tuple[Drafts, Tensor]]:
    """The rows of each request."""
    found: dict[Drafts, list[int]] = {}
    for row in rows:
        found.setdefault(row.drafts, []).append(row.at)
    return [(drafts, torch.tensor(sorted(own))) for drafts, own in found.items()]


def advance(rows: Sequence[ActiveSequence], backend: Plain) -> dict[Drafts, list[Step]]:
    """One step of every row, each at its own place in its own plan, by one call."""
    asks = [drafts.ask(own) for drafts, own in by_drafts(rows)]
    with torch.no_grad(), evaluating(backend.network):
        return {ask.drafts: steps for ask, steps in zip(asks, take(asks, backend), strict=True)}


def begin(rows: Sequence[ActiveSequence], backend: Plain) -> dict[Drafts, list[Step]]:
    """Begin the next round of rows that are due in the same one, by one call."""
    with torch.no_grad(), evaluating(backend.network):
        revise(by_drafts(rows), backend.network)
    return {}
