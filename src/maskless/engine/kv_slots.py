"""KV slots: sequences that join and leave between steps, each with its keys and values cached; for a server.

A run knows its rows and their plan before the first step, a server does not. Here each sequence has a slot, which is a
row of the cache, and a step encodes only what became known since the last one. The sequences of a step have the first
slots: when one leaves, the last one moves into its slot. A new sequence is encoded in a pool of its own before it gets
a slot, so that a long prompt does not pad the steps of the others.

Shapes: S sequences of a step, L length, U targets, B slots, N columns of a slot, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.engine.backbones import Backbone, CausalBackbone, PartitionBackbone, PartitionCache
from maskless.engine.batch_state import BatchState
from maskless.engine.engine import Engine
from maskless.plans import Plan
from maskless.problems import Offsets

FEWEST = 8  # slots that stay allocated without a sequence


@dataclass(frozen=True)
class SlotQuery:
    """What a sequence asks in a step. What is known of it may only grow at its end from one step to the next."""

    owner: Hashable  # whose slot it is
    tokens: Tensor  # (L,) by position
    order: Tensor  # (L,) all positions, the known ones first
    start: int  # how many are known
    end: int  # where the positions that are asked for end, in the order
    label: int | None = None
    drafted: int = 0  # of a check: so many of the known ones are drafts, and what follows each is asked for

    @property
    def asked(self) -> int:
        """How many positions."""
        return self.drafted or self.end - self.start


def keeps(engine: Engine) -> bool:
    """Whether what this engine has encoded stays valid, so that sequences can have slots."""
    backbone = engine.backbone
    return isinstance(backbone, CausalBackbone) or (isinstance(backbone, PartitionBackbone) and backbone.keeps)


class KVSlots:
    """The sequences under way of one network, at most `length` tokens each.

    memory: bytes for keys and values; slots beyond that (`most`) are made only if more sequences come.
    """

    def __init__(self, engine: Engine, length: int, memory: int = 1 << 32):
        if not keeps(engine):
            raise ValueError("what this network encodes changes with each token: expected ordered context, or causal")
        self.backbone, self.device, self.columns = engine.backbone, engine.device, length + engine.backbone.lead
        self.engine = engine
        self.owners: list[Hashable] = []  # of each slot
        self.encoded: list[int] = []  # columns of each slot that hold keys and values
        self.pool: _Pool | None = None
        one = _Pool(self.backbone, 1, 1, self.device).cache.tensors
        self.size = self.columns * sum(tensor.nbytes for tensor in one)  # of a slot
        self.most = max(1, memory // self.size)

    def keep(self, owners: Collection[Hashable]) -> None:
        """Free the slots of all others."""
        for slot in reversed(range(len(self.owners))):
            if self.owners[slot] in owners:
                continue
            owner, encoded = self.owners.pop(), self.encoded.pop()
            if slot < len(self.owners):
                assert self.pool is not None
                self.pool.copy(slot, self.pool, len(self.owners), encoded)
                self.owners[slot], self.encoded[slot] = owner, encoded
        if not self.owners and self.pool is not None and self.pool.slots > FEWEST:
            self.pool = None

    def logits(self, queries: Sequence[SlotQuery]) -> Tensor:
        """Logits at what each sequence asks for, one after the other, as the network gives them.  -> (U, V) float32"""
        with self.engine.computing(self._work(queries)):
            there = set(self.owners)
            old, new = {q.owner: q for q in queries if q.owner in there}, [q for q in queries if q.owner not in there]
            found: dict[Hashable, Tensor] = {}
            pool = self._room(len(self.owners) + len(new))
            if old:
                self._come_forward(old)
                found |= pool.answer([old[owner] for owner in self.owners[: len(old)]], self.encoded)
            if new:
                columns = max(query.end for query in new) + self.backbone.lead
                guests = _Pool(self.backbone, len(new), columns, self.device)
                found |= guests.answer(new, [0] * len(new))
            logits = self.backbone.head.logits(torch.cat([found[query.owner] for query in queries]))
            for slot, owner in enumerate(self.owners[: len(old)]):  # only now: a step that fails changes nothing
                self.encoded[slot] = old[owner].start + self.backbone.lead
            for place, query in enumerate(new):
                encoded = query.start + self.backbone.lead
                pool.copy(len(self.owners), guests, place, encoded)
                self.owners.append(query.owner)
                self.encoded.append(encoded)
            return logits

    def check(self, queries: Sequence[SlotQuery]) -> Tensor:
        """Logits behind each drafted token of sequences that have slots, given all up to it.  -> (U, V) float32

        What is encoded of drafts is not kept: some may be dropped.
        """
        with self.engine.computing(self._work(queries)):
            of, pool = {query.owner: query for query in queries}, self._room(len(self.owners))
            self._come_forward(of)
            found = pool.answer([of[owner] for owner in self.owners[: len(of)]], self.encoded)
            return self.backbone.head.logits(torch.cat([found[query.owner] for query in queries]))

    def _work(self, queries: Sequence[SlotQuery]) -> int:
        """Multiply-adds of a step, about."""
        encoded = dict(zip(self.owners, self.encoded, strict=True))
        return self.engine.size.work(len(queries), sum(query.end - encoded.get(query.owner, 0) for query in queries))

    def _come_forward(self, owners: Collection[Hashable]) -> None:
        """Exchange slots until these owners have the first ones."""
        assert self.pool is not None
        front = len(owners)
        away = [slot for slot in range(front) if self.owners[slot] not in owners]
        here = [slot for slot in range(front, len(self.owners)) if self.owners[slot] in owners]
        for a, b in zip(away, here, strict=True):
            self.pool.exchange(a, b)
            self.owners[a], self.owners[b] = self.owners[b], self.owners[a]
            self.encoded[a], self.encoded[b] = self.encoded[b], self.encoded[a]

    def _room(self, slots: int) -> _Pool:
        """A pool of so many slots or more, with all that is kept."""
        if self.pool is None or self.pool.slots < slots:
            more = max(slots, min(self.most, max(FEWEST, 1 << (slots - 1).bit_length())))
            larger = _Pool(self.backbone, more, self.columns, self.device)
            if self.pool is not None:
                for slot, encoded in enumerate(self.encoded):
                    larger.copy(slot, self.pool, slot, encoded)
            self.pool = larger
        return self.pool


class _Pool:
    """So many slots: the state of a batch, and its cache; between steps only the cache counts."""

    def __init__(self, backbone: Backbone, slots: int, columns: int, device: torch.device):
        self.backbone, self.slots, self.columns = backbone, slots, columns
        self.state, self.cache = BatchState.empty(slots, columns, device), backbone.new_cache(slots, columns, True)
        self.labels: list[int] = []

    def copy(self, slot: int, other: _Pool, source: int, encoded: int) -> None:
        """What is encoded in a slot of another pool, or of this one, is also in this slot."""
        for own, its in zip(self.cache.tensors, other.cache.tensors, strict=True):
            own[:, :, slot, :, :encoded] = its[:, :, source, :, :encoded]

    def exchange(self, a: int, b: int) -> None:
        for tensor in self.cache.tensors:
            tensor[:, :, [a, b]] = tensor[:, :, [b, a]]

    def answer(self, queries: list[SlotQuery], encoded: list[int]) -> dict[Hashable, Tensor]:
        """What the head reads at the targets of each sequence; encoded: how many columns of its slot are filled."""
        backbone, state, lead = self.backbone, self.state, self.backbone.lead
        begun = encoded[: len(queries)]
        known, asked = [query.start + lead for query in queries], [query.asked for query in queries]
        assert not isinstance(backbone, CausalBackbone) or set(asked) == {1}
        device = state.known.device
        laid = [self._laid(slot, *of) for slot, of in enumerate(zip(queries, begun, strict=True))]
        index, positions, tokens = (torch.cat(parts).to(device) for parts in zip(*laid, strict=True))
        state.order.view(-1).index_copy_(0, index, positions)
        state.tokens.view(-1).index_copy_(0, index, tokens)
        state.known[: len(queries)] = torch.tensor(known, dtype=torch.int32).to(device)
        labels = [backbone.dropped or 0 if query.label is None else query.label for query in queries]
        if labels != self.labels:
            self.cache.norms.label(torch.tensor(labels))
            self.labels = labels
        fresh = torch.tensor(known) - torch.tensor(begun)
        context, targets = (Offsets.from_lengths(x).map(lambda y: y.to(device)) for x in (fresh, torch.tensor(asked)))
        whole = not any(begun)
        if queries[0].drafted:
            assert isinstance(self.cache, PartitionCache)
            x = self.cache.chain(state, context, targets, whole)
        else:
            x, _ = self.cache.forward(state, context, targets, whole)
        return {query.owner: part for query, part in zip(queries, x.split(asked), strict=True)}

    def _laid(self, slot: int, query: SlotQuery, begun: int) -> tuple[Tensor, Tensor, Tensor]:
        """Index in the flattened batch, position and token of what became known and of the targets.  -> (n,) x 3"""
        backbone, lead = self.backbone, self.backbone.lead
        order = query.order[max(0, begun - lead) : query.end]
        positions, tokens = order + backbone.places, query.tokens[order]
        if lead and not begun:
            assert isinstance(backbone, PartitionBackbone | CausalBackbone)
            ids, places = backbone.first(Plan(query.order[None], torch.tensor([[query.start, query.end]])))
            positions, tokens = torch.cat([places, positions]), torch.cat([ids, tokens])
        first = slot * self.columns + begun
        return torch.arange(first, first + len(positions)), positions, tokens
