"""Prediction problems: some tokens at some positions (the context), and other positions to predict (the targets).

Sampling one step of B sequences is B problems; training on B partitioned sequences is 2B problems, because each group
of a partition predicts the other. Problems are packed end to end, so a network never sees a group, a mask or a flag,
and nothing can leak between groups: they are in different problems. A chain is one problem for a whole sequence: its
context is the sequence in some order, and each target sees only what came before it.

Shapes: B sequences, L length, S problems, T context tokens in all, U targets in all, K steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Value = TypeVar("Value")
TIE = 2.0**-16  # what rounding in float32 may make of equal log-probabilities


class computed_once(Generic[Value]):  # noqa: N801
    """`functools.cached_property` without its lock, which up to Python 3.11 all instances share, and a fork may leave
    held for ever. Two threads may both compute the value: it is the same."""

    def __init__(self, compute: Callable[[Any], Value]):
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> Value:
        if torch.compiler.is_compiling():  # its tracer cannot follow the dictionary
            return self.compute(instance)
        value: Value = instance.__dict__.setdefault(self.name, self.compute(instance))
        return value


@dataclass(frozen=True)
class Offsets:
    """Where each of S segments begins and ends in a packed array.

    `total` elements in all, and no segment longer than `longest`: plain numbers, so that nothing need wait for the
    device. `equal` says that every segment has exactly the longest length.
    """

    bounds: Tensor  # (S+1,) int32
    total: int
    longest: int
    equal: bool = False

    @staticmethod
    def from_lengths(lengths: Tensor) -> Offsets:
        """Offsets of segments with these lengths.  (S,) -> Offsets"""
        longest = int(lengths.max()) if len(lengths) else 0
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        bounds[1:] = lengths.cumsum(0)
        return Offsets(bounds, int(bounds[-1]), longest, bool((lengths == longest).all()))

    @staticmethod
    def regular(segments: int, length: int, device: torch.device | None = None) -> Offsets:
        """Offsets of segments that all have one length."""
        bounds = torch.arange(segments + 1, dtype=torch.int32, device=device) * length
        return Offsets(bounds, segments * length, length, equal=True)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Tensor:
        return self.bounds.diff().long()

    @computed_once
    def owner(self) -> Tensor:
        """Which segment each packed element belongs to.  (total,)"""
        if self.bounds.device.type == "cpu":  # there torch shares even two segments out over all cores, and waits
            ends = self.bounds[1:-1].long()
            return ends.new_zeros(self.total + 1).index_add_(0, ends, torch.ones_like(ends)).cumsum(0)[:-1]
        segments = torch.arange(len(self), device=self.bounds.device)
        return torch.repeat_interleave(segments, self.lengths, output_size=self.total)

    @computed_once
    def within(self) -> Tensor:
        """Where each packed element stands in its segment.  (total,)"""
        return torch.arange(self.total, device=self.bounds.device) - self.bounds[:-1].long()[self.owner]

    @computed_once
    def slots(self) -> Tensor:
        """Where each packed element stands in the padded array of shape (S, longest), flattened.  (total,)"""
        return self.owner * self.longest + self.within

    @computed_once
    def real(self) -> Tensor:
        """Which slots of the padded array hold an element.  (S, longest) bool"""
        return torch.arange(self.longest, device=self.bounds.device) < self.lengths[:, None]

    def ranked(self, values: Tensor) -> Tensor:
        """Where the packed values of each segment are, from its largest on, equals in order.  (total,) -> (total,)

        Values are equal where only rounding parts them: neighbours in rank that are no further apart than TIE.
        """
        here = self.map(lambda x: x.to(values.device))
        padded = values.new_full((len(here) * here.longest,), -torch.inf).scatter(0, here.slots, values)
        falling, ranks = padded.view(len(here), -1).sort(dim=1, descending=True, stable=True)
        level = F.pad((falling.diff(dim=1) < -TIE).long().cumsum(1), (1, 0))
        ranks = ranks.gather(1, (level * here.longest + ranks).argsort(1))
        return ranks[here.real] + here.bounds[:-1].long()[here.owner]

    def grown(self) -> Offsets:
        """Offsets of the same segments with one more element in each."""
        more = torch.arange(len(self.bounds), dtype=torch.int32, device=self.bounds.device)
        return Offsets(self.bounds + more, self.total + len(self), self.longest + 1, self.equal)

    def twice(self) -> Offsets:
        """Offsets of the same segments, and then of the same ones again."""
        return replace(self, bounds=torch.cat([self.bounds, self.bounds[1:] + self.total]), total=2 * self.total)

    def map(self, change: Callable[[Tensor], Tensor]) -> Offsets:
        return replace(self, bounds=change(self.bounds))


@dataclass(frozen=True)
class Seen:
    """How much of its problem's context each target sees: the first so many tokens, never fewer than the target before.

    `chain` says, as plain Python for the same reason, that it is a staircase: each target sees one token more than the
    target before it, and the last one all of the context.
    """

    counts: Tensor  # (U,) int32
    chain: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Seen:
        return replace(self, counts=change(self.counts))


@dataclass(frozen=True)
class Problems:
    """S prediction problems, packed. The order of a problem's context is the order in which its tokens became known."""

    tokens: Tensor  # (T,) context tokens, problem after problem
    positions: Tensor  # (T,) where each stands in its sequence
    offsets: Offsets  # of the S contexts
    targets: Tensor  # (U,) positions to predict
    target_offsets: Offsets  # of the S target lists
    labels: Tensor | None = None  # (S,) class labels
    seen: Seen | None = None  # how much of its context each target sees; None: all of it

    def __len__(self) -> int:
        return len(self.offsets)

    def labelled(self, labels: Tensor | None) -> Problems:
        """The same problems with the labels of B sequences, each with S/B problems one after the other.  (B,)"""
        if labels is None:
            return replace(self, labels=None)
        if len(labels) == 0 or len(self) % len(labels):
            raise ValueError(f"{len(labels)} labels for {len(self)} problems: expected one for each sequence")
        return replace(self, labels=labels.repeat_interleave(len(self) // len(labels)))

    def doubled(self, dropped: int) -> Problems:
        """The problems, and then the same ones with their labels dropped."""
        assert self.labels is not None
        return Problems(
            tokens=self.tokens.repeat(2),
            positions=self.positions.repeat(2),
            offsets=self.offsets.twice(),
            targets=self.targets.repeat(2),
            target_offsets=self.target_offsets.twice(),
            labels=torch.cat([self.labels, torch.full_like(self.labels, dropped)]),
            seen=None if self.seen is None else self.seen.map(lambda counts: counts.repeat(2)),
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Problems:
        """The same problems with every tensor changed: moved, pinned."""
        return Problems(
            tokens=change(self.tokens),
            positions=change(self.positions),
            offsets=self.offsets.map(change),
            targets=change(self.targets),
            target_offsets=self.target_offsets.map(change),
            labels=None if self.labels is None else change(self.labels),
            seen=None if self.seen is None else self.seen.map(change),
        )

    def check_whole(self, network: str) -> None:
        """Raise a ValueError about a chain: this network cannot hide a part of the context from a target."""
        if self.seen is not None:
            raise ValueError(f"{network} shows every target its whole context: expected no chain")

    def to(self, device: torch.device | str) -> Problems:
        """The same problems on another device."""
        return self.map(lambda x: x.to(device, non_blocking=True))


def partition(
    tokens: Tensor, order: Tensor, sizes: Tensor, labels: Tensor | None = None, *, given: int = 0
) -> tuple[Problems, Tensor]:
    """The 2B problems of a batch split in two groups, and the index of every target in the flat batch.

    Problem 2b has the first `sizes[b]` positions of `order[b]` as its context and predicts the others; problem 2b+1
    is the reverse. T = U = B*L whatever the split, so shapes are static.  PGM, Sec. 3.1

    given: so many first positions of each order (a BOS) are in the first group and are never predicted; U = B*(L-given)

    tokens (B, L), order (B, L) a permutation per row, sizes (B,) at least `given` -> Problems, (U,)
    """
    B, L = tokens.shape
    row = torch.arange(B, device=tokens.device)[:, None] * L
    first, second = sizes - given, L - sizes  # how many of each group are predicted
    rolled = (torch.arange(L - given, device=tokens.device) + first[:, None]) % max(1, L - given)
    targets = order[:, given:].gather(1, rolled)  # second group first: what the first context predicts
    lengths = torch.stack([sizes, second], 1).flatten()
    target_lengths = torch.stack([second, first], 1).flatten()
    problems = Problems(
        tokens=tokens.gather(1, order).flatten(),
        positions=order.flatten(),
        offsets=replace(Offsets.from_lengths(lengths), longest=L, equal=False),  # a constant bound: static shapes
        targets=targets.flatten(),
        target_offsets=replace(Offsets.from_lengths(target_lengths), longest=L, equal=False),
        labels=None if labels is None else labels.repeat_interleave(2),
    )
    return problems, (row + targets).flatten()


def split(tokens: Tensor, order: Tensor, starts: Tensor, ends: Tensor) -> tuple[Problems, Tensor]:
    """B problems: row b knows the first `starts[b]` positions of its order and predicts the next, up to `ends[b]`.

    This is one step of sampling (the state in order of becoming known), and also the single problem of a masked
    sequence (`ends` = L).  tokens (B, L), order (B, N), starts (B,), ends (B,) -> Problems, (U,) flat indices
    """
    L = tokens.shape[1]
    offsets, target_offsets = Offsets.from_lengths(starts), Offsets.from_lengths(ends - starts)
    positions = order[offsets.owner, offsets.within]
    targets = order[target_offsets.owner, starts[target_offsets.owner] + target_offsets.within]
    problems = Problems(
        tokens=tokens[offsets.owner, positions],
        positions=positions,
        offsets=offsets,
        targets=targets,
        target_offsets=target_offsets,
    )
    return problems, target_offsets.owner * L + targets


def chain(
    tokens: Tensor, order: Tensor, starts: Tensor, ends: Tensor, seen: Tensor | None = None
) -> tuple[Problems, Tensor]:
    """B problems: row b knows the first `starts[b]` positions of its order and predicts each of the next, up to
    `ends[b]`, from all that come before it: the conditionals of a whole order in one pass.

    seen (B, N): how many positions of its order each place of it sees, if fewer than all before it; it must not fall
    along a row. So the tokens that one step of a sampler decides together see only the steps before.

    tokens (B, L), order (B, N), starts (B,), ends (B,) -> Problems, (U,) flat indices
    """
    targets, index = split(tokens, order, starts, ends)
    owner, within = targets.target_offsets.owner, targets.target_offsets.within
    place = starts[owner] + within
    context, _ = split(tokens, order, (ends - 1).clamp_min(0), ends)
    counts = place if seen is None else seen[owner, place]
    problems = replace(
        context,
        targets=targets.targets,
        target_offsets=targets.target_offsets,
        seen=Seen(counts.int(), chain=seen is None),
    )
    return problems, index


def joined(parts: Sequence[Problems]) -> Problems:
    """Several packs of problems end to end; all of them have labels, or none has. The same of chains."""
    if len(parts) == 1:
        return parts[0]
    labels = [part.labels for part in parts if part.labels is not None]
    seen = [part.seen for part in parts if part.seen is not None]
    return Problems(
        tokens=torch.cat([part.tokens for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        offsets=Offsets.from_lengths(torch.cat([part.offsets.bounds.diff() for part in parts])),
        targets=torch.cat([part.targets for part in parts]),
        target_offsets=Offsets.from_lengths(torch.cat([part.target_offsets.bounds.diff() for part in parts])),
        labels=torch.cat(labels) if labels else None,
        seen=Seen(torch.cat([one.counts for one in seen]), all(one.chain for one in seen)) if seen else None,
    )


def dense(
    tokens: Tensor, positions: Tensor, targets: Tensor, lengths: Tensor | None = None, labels: Tensor | None = None
) -> Problems:
    """Problems from padded rows: row b knows its first `lengths[b]` tokens (all, by default).

    tokens (B, n), positions (B, n), targets (B, k), lengths (B,) -> Problems
    """
    B, n = tokens.shape
    if lengths is None:
        offsets = Offsets.regular(B, n, tokens.device)
        tokens, positions = tokens.flatten(), positions.flatten()
    else:
        offsets = Offsets.from_lengths(lengths)
        real = torch.arange(n, device=tokens.device) < lengths[:, None]
        tokens, positions = tokens[real], positions[real]
    return Problems(
        tokens=tokens,
        positions=positions,
        offsets=offsets,
        targets=targets.flatten(),
        target_offsets=Offsets.regular(B, targets.shape[1], targets.device),
        labels=labels,
    )
