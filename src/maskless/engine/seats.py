"""Seats: sequences that join and leave between steps, each with what was encoded of it kept; for a server.

A run knows its rows and their plan before the first step, a server does not. Here each sequence has a seat, which is a
row of the caches, and a step encodes only what became known since the last one. The sequences of a step sit in the
first seats: when one leaves, the last takes its place. A newcomer is encoded on a board of its own before it sits
down, so that a long prompt pads nobody else's step.

Shapes: S sequences of a step, L length, U targets, B seats, N slots of a seat, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.board import Board
from maskless.engine.bodies import Body, CausalBody, PartitionBody, PartitionMemory
from maskless.engine.engine import Engine
from maskless.nn.threads import threads_for
from maskless.plans import Plan
from maskless.problems import Offsets

FEWEST = 8  # seats that are kept when nobody is there


@dataclass(frozen=True)
class Question:
    """What a sequence asks in a step. What is known of it may only grow at its end from one step to the next."""

    owner: Hashable  # whose seat it is
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
    """Whether what this engine has encoded stays valid, so that sequences can have seats."""
    body = engine.body
    return isinstance(body, CausalBody) or (isinstance(body, PartitionBody) and body.keeps)


class Seats:
    """The sequences under way of one network, at most `length` tokens each.

    memory: bytes of keys and values for which there are seats; more are made only if more sequences come than `most`.
    """

    def __init__(self, engine: Engine, length: int, memory: int = 1 << 32):
        if not keeps(engine):
            raise ValueError("what this network encodes changes with each token: expected ordered context, or causal")
        self.body, self.device, self.slots = engine.body, engine.device, length + engine.body.lead
        self.engine = engine
        self.owners: list[Hashable] = []  # of each seat
        self.encoded: list[int] = []  # slots of each seat that hold keys and values
        self.table: _Table | None = None
        slot = _Table(self.body, 1, 1, self.device).memory.caches
        self.size = self.slots * sum(cache.nbytes for cache in slot)  # of a seat
        self.most = max(1, memory // self.size)

    def keep(self, owners: Collection[Hashable]) -> None:
        """All others leave."""
        for seat in reversed(range(len(self.owners))):
            if self.owners[seat] in owners:
                continue
            owner, encoded = self.owners.pop(), self.encoded.pop()
            if seat < len(self.owners):
                assert self.table is not None
                self.table.take(seat, self.table, len(self.owners), encoded)
                self.owners[seat], self.encoded[seat] = owner, encoded
        if not self.owners and self.table is not None and self.table.rows > FEWEST:
            self.table = None

    def logits(self, asks: Sequence[Question]) -> Tensor:
        """Logits at what each sequence asks for, one after the other, as the network gives them.  -> (U, V) float32"""
        threads = threads_for(self._work(asks))
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False), self.engine.turn, threads:
            there = set(self.owners)
            old, new = {a.owner: a for a in asks if a.owner in there}, [a for a in asks if a.owner not in there]
            found: dict[Hashable, Tensor] = {}
            table = self._room(len(self.owners) + len(new))
            if old:
                self._come_forward(old)
                found |= table.ask([old[owner] for owner in self.owners[: len(old)]], self.encoded)
            if new:
                slots = max(ask.end for ask in new) + self.body.lead
                guests = _Table(self.body, len(new), slots, self.device)
                found |= guests.ask(new, [0] * len(new))
            logits = self._logits(torch.cat([found[ask.owner] for ask in asks]))
            for seat, owner in enumerate(self.owners[: len(old)]):  # only now: a step that fails changes nothing
                self.encoded[seat] = old[owner].start + self.body.lead
            for place, ask in enumerate(new):
                table.take(len(self.owners), guests, place, ask.start + self.body.lead)
                self.owners.append(ask.owner)
                self.encoded.append(ask.start + self.body.lead)
            return logits

    def check(self, asks: Sequence[Question]) -> Tensor:
        """Logits behind each drafted token of sequences that have seats, given all up to it.  -> (U, V) float32

        What is encoded of drafts is not kept: some may be dropped.
        """
        threads = threads_for(self._work(asks))
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False), self.engine.turn, threads:
            of, table = {ask.owner: ask for ask in asks}, self._room(len(self.owners))
            self._come_forward(of)
            found = table.ask([of[owner] for owner in self.owners[: len(of)]], self.encoded)
            return self._logits(torch.cat([found[ask.owner] for ask in asks]))

    def _logits(self, x: Tensor) -> Tensor:
        head = self.body.head
        return (kernels.logits_of(x, head.weight) + head.bias)[:, : head.vocab]

    def _work(self, asks: Sequence[Question]) -> int:
        """Of a step on the CPU."""
        if self.device.type != "cpu":
            return 0
        encoded = dict(zip(self.owners, self.encoded, strict=True))
        return self.engine.size.work(len(asks), sum(ask.end - encoded.get(ask.owner, 0) for ask in asks))

    def _come_forward(self, owners: Collection[Hashable]) -> None:
        """Exchange seats until these owners have the first ones."""
        assert self.table is not None
        front = len(owners)
        away = [seat for seat in range(front) if self.owners[seat] not in owners]
        here = [seat for seat in range(front, len(self.owners)) if self.owners[seat] in owners]
        for a, b in zip(away, here, strict=True):
            self.table.exchange(a, b)
            self.owners[a], self.owners[b] = self.owners[b], self.owners[a]
            self.encoded[a], self.encoded[b] = self.encoded[b], self.encoded[a]

    def _room(self, seats: int) -> _Table:
        """A table of so many seats or more, with all that is kept."""
        if self.table is None or self.table.rows < seats:
            rows = max(seats, min(self.most, max(FEWEST, 1 << (seats - 1).bit_length())))
            larger = _Table(self.body, rows, self.slots, self.device)
            if self.table is not None:
                for seat, encoded in enumerate(self.encoded):
                    larger.take(seat, self.table, seat, encoded)
            self.table = larger
        return self.table


class _Table:
    """A board with caches, of so many rows; between steps only the caches count."""

    def __init__(self, body: Body, rows: int, slots: int, device: torch.device):
        self.body, self.rows, self.slots = body, rows, slots
        self.board, self.memory = Board.empty(rows, slots, device), body.open(rows, slots, True)
        self.labels: list[int] = []

    def take(self, seat: int, other: _Table, place: int, encoded: int) -> None:
        """What is encoded at a place of another table, or of this one, is also at this seat."""
        for own, its in zip(self.memory.caches, other.memory.caches, strict=True):
            own[:, :, seat, :, :encoded] = its[:, :, place, :, :encoded]

    def exchange(self, a: int, b: int) -> None:
        for cache in self.memory.caches:
            cache[:, :, [a, b]] = cache[:, :, [b, a]]

    def ask(self, asks: list[Question], encoded: list[int]) -> dict[Hashable, Tensor]:
        """What the head reads at the targets of each sequence; encoded: how many slots of its seat are filled."""
        body, board, lead = self.body, self.board, self.body.lead
        begun = [encoded[seat] for seat in range(len(asks))]
        known, asked = [ask.start + lead for ask in asks], [ask.asked for ask in asks]
        assert not isinstance(body, CausalBody) or set(asked) == {1}
        device, laid = board.at.device, [self._laid(seat, *of) for seat, of in enumerate(zip(asks, begun, strict=True))]
        index, positions, tokens = (torch.cat(parts).to(device) for parts in zip(*laid, strict=True))
        board.order.view(-1).index_copy_(0, index, positions)
        board.tokens.view(-1).index_copy_(0, index, tokens)
        board.at[: len(asks)] = torch.tensor(known, dtype=torch.int32).to(device)
        labels = [body.dropped or 0 if ask.label is None else ask.label for ask in asks]
        if labels != self.labels:
            self.memory.norms.label(torch.tensor(labels))
            self.labels = labels
        fresh = torch.tensor(known) - torch.tensor(begun)
        context, targets = (Offsets.from_lengths(x).map(lambda y: y.to(device)) for x in (fresh, torch.tensor(asked)))
        whole = not any(begun)
        if asks[0].drafted:
            assert isinstance(self.memory, PartitionMemory)
            x = self.memory.chain(board, context, targets, whole)
        else:
            x, _ = self.memory(board, context, targets, whole)
        return {ask.owner: part for ask, part in zip(asks, x.split(asked), strict=True)}

    def _laid(self, seat: int, ask: Question, begun: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots in the flat board, positions and tokens of what became known and of the targets.  -> (n,) x 3"""
        body, lead = self.body, self.body.lead
        order = ask.order[max(0, begun - lead) : ask.end]
        positions, tokens = order + body.places, ask.tokens[order]
        if lead and not begun:
            assert isinstance(body, PartitionBody | CausalBody)
            ids, places = body.first(Plan(ask.order[None], torch.tensor([[ask.start, ask.end]])))
            positions, tokens = torch.cat([places, positions]), torch.cat([ids, tokens])
        first = seat * self.slots + begun
        return torch.arange(first, first + len(positions)), positions, tokens
