"""Rows on their way: sequences of different lengths, plans and progress that take one step together.

A row owns its plan, its key and its filter. Every random number it uses depends on its key alone, so that its tokens
are the same whoever shares the step (up to the rounding of float32 in a batch of another shape). A row that has second
thoughts goes on where its plan ends, with a new plan for what it erased; its steps are counted on.

Shapes: B rows, L length of a row, K steps of its plan, U targets of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.nn.threads import threads_for_draws
from maskless.plans import Plan
from maskless.problems import Offsets
from maskless.revision import cooled, steps_of
from maskless.sampling import DRAW, NOISE, Truncation

CELLS = 1 << 25  # logits of one call: what more rows would need waits for the next call
CPU_CELLS = 1 << 21  # the same on a processor, where a call of these takes up to half a second and 100 MB


@dataclass(frozen=True)
class Landed:
    """What one step decided in a row."""

    step: int
    positions: list[int]
    tokens: list[int]
    probabilities: list[float]  # the network's own, before temperature and truncation


@dataclass(frozen=True)
class Rules:
    """What holds for all rows of a network."""

    device: torch.device
    never: tuple[int, ...] = ()  # ids that are not drawn
    dropped: int | None = None  # the label that stands for none, where there are labels
    spaced: Tensor | None = None  # (V,) bool: tokens that begin with a space


@dataclass(eq=False, kw_only=True)
class Row:
    """A sequence that is being decided."""

    tokens: Tensor  # (L,)
    plan: Plan  # of this row alone
    key: Tensor  # () from `row_keys`
    truncation: Truncation = field(default_factory=Truncation)
    spaced: frozenset[int] = frozenset()  # positions whose token has to begin with a space
    confident: bool = False  # decide what is surest, not what comes next in the order
    noise: float = 0.0  # of the confidence: how much chance there is in it at first
    warmup: int = 0  # first steps that draw at half the sharpness
    label: int | None = None
    weights: Sequence[float] = ()  # of the guidance, in each step
    top: int = 0  # keep so many alternatives of each decided token
    revise: int = 0  # rounds of second thoughts after the draft
    replan: Callable[..., Plan] | None = None  # of a round: (known, wanted, keys, steps=)
    round: int = 0  # the one under way, 0 for the draft
    number: int = 0  # the step that comes next
    came: list[int] = field(default_factory=list)  # of each position: the step that decided it, -1 where it was given
    probability: list[float | None] = field(default_factory=list)
    alternatives: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order, self.ends = self.plan.order[0].clone(), self.plan.ends[0].tolist()
        self.came, self.probability = [-1] * len(self.tokens), [None] * len(self.tokens)
        self.wanted = self.plan.came()[0] >= 0  # (L,)
        self.known = torch.zeros_like(self.wanted).index_fill(0, self.order[: self.ends[0]], True)  # (L,) given
        self.rounds = [self.plan.steps, *steps_of(self.plan.steps, self.revise)]  # steps of each
        self.keys = [self.key, *(lg.row_keys(number + 1, self.key) for number in range(self.revise))]
        cool = [cooled(self.truncation.temperature, number, self.revise) for number in range(self.revise)]
        self.truncations = [self.truncation, *(replace(self.truncation, temperature=t) for t in cool)]
        self.steps = sum(self.rounds)
        self._skip()
        self.cold = self.number + self.warmup  # the first step that is not warmed
        self.noises = (self.noise * (1 - self.plan.progress()[0])).tolist() if self.noise else None

    @property
    def done(self) -> bool:
        return self.number >= self.steps

    @property
    def due(self) -> bool:
        """Whether the next round has to begin: it is not known yet what that decides."""
        return not self.done and self.number == len(self.ends) - 1

    @property
    def start(self) -> int:
        """How many positions are known."""
        return self.ends[self.number]

    @property
    def end(self) -> int:
        """The end of the positions that the step asks about, in the order."""
        return self.ends[-1] if self.confident else self.ends[self.number + 1]

    @property
    def asked(self) -> Tensor:
        """The positions that the step asks about."""
        return self.order[self.start : self.end]

    @property
    def size(self) -> int:
        """How many positions the next call is about; a round that begins looks at all that were decided."""
        return int(self.wanted.sum()) if self.due else self.end - self.start

    @property
    def weight(self) -> float:
        return self.weights[self.number] if self.weights else 0.0

    def left(self) -> int:
        """How many tokens are still to come."""
        return 0 if self.done else self.ends[-1] - self.start

    def land(self, positions: Tensor, tokens: Tensor, sure: Tensor) -> Landed:
        """Write down what this step decided, and go on to the next one that decides something."""
        count = self.ends[self.number + 1] - self.start
        if self.confident:
            self.order[self.start : self.end] = positions  # the surest first
        positions, tokens, chances = positions[:count], tokens[:count], sure[:count].exp().tolist()
        self.tokens[positions] = tokens
        landed = Landed(self.number, positions.tolist(), tokens.tolist(), chances)
        for position, chance in zip(landed.positions, chances, strict=True):
            self.came[position], self.probability[position] = self.number, chance
        self.number += 1
        self._skip()
        return landed

    def next_plan(self, erased: Tensor) -> Plan:
        """What the next round does, which decides these positions (L,) again."""
        assert self.replan is not None
        known, number = self.known | (self.wanted & ~erased), self.round + 1
        return self.replan(known[None], erased[None], self.keys[number][None], steps=self.rounds[number])

    def begin(self, made: Plan) -> None:
        """Begin the next round; what it decides again keeps its token until then."""
        self.round += 1
        self.order, self.ends[self.number :] = made.order[0], made.ends[0].tolist()
        self._skip()

    def _skip(self) -> None:
        """Steps may be empty: they cost nothing."""
        while self.number < len(self.ends) - 1 and self.ends[self.number] == self.ends[self.number + 1]:
            self.number += 1


class Answers(Protocol):
    """A network, as rows ask it."""

    @property
    def room(self) -> int:
        """How many rows may be under way at once."""
        ...

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Logits at what the next step of each row asks about, guided where it is.  -> (U, V) float32"""
        ...

    def erased(self, rows: Sequence[Row]) -> Tensor:
        """What rows that are due erase, all in the same round of as many.  -> (B, L) bool"""
        ...

    def keep(self, rows: Sequence[Row]) -> None:
        """All other rows have left, and what was encoded of those that are due has changed."""
        ...


def cells_of(device: torch.device) -> int:
    """How many logits a call may have, and how many of them are drawn from at once."""
    return CPU_CELLS if device.type == "cpu" else CELLS


def batches(rows: Sequence[Row], vocab: int, cells: int = CELLS) -> list[list[Row]]:
    """Rows in groups whose logits fit into the memory that a call may take; a row that alone does not is alone."""
    groups: list[list[Row]] = []
    room = 0
    for row in rows:
        needed = row.size * vocab
        if not groups or needed > room:
            groups.append([])
            room = cells
        groups[-1].append(row)
        room -= needed
    return groups


def due(rows: Sequence[Row], vocab: int, cells: int = CELLS) -> list[list[Row]]:
    """The rows whose next round has to begin, in groups that can share a call."""
    alike: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row.due:
            alike.setdefault((row.round, row.revise), []).append(row)
    return [group for some in alike.values() for group in batches(some, vocab, cells)]


def reconsider(rows: Sequence[Row], answers: Answers) -> None:
    """Begin the next round of rows that are due in the same one, by one call; rows change only if all is well."""
    erased = answers.erased(rows)  # (B, L)
    plans = [row.next_plan(some[: len(row.tokens)]) for row, some in zip(rows, erased, strict=True)]
    for row, made in zip(rows, plans, strict=True):
        row.begin(made)


@torch.no_grad()
def advance(rows: Sequence[Row], answers: Answers, rules: Rules) -> list[Landed]:
    """One step of every row, each at its own place in its own plan, by one call; rows change only if all is well."""
    logits = answers.logits(rows)  # (U, V)
    asked = [row.asked for row in rows]
    offsets, positions = Offsets.from_lengths(torch.tensor([len(places) for places in asked])), torch.cat(asked)
    with threads_for_draws(logits):
        drawn, sure = _drawn(logits, rows, offsets.owner, positions, rules)
    found, bounds = [], offsets.bounds.tolist()
    for row, places, begin, end in zip(rows, asked, bounds, bounds[1:], strict=False):
        tokens, chances = drawn[begin:end], sure[begin:end]
        if row.top:
            _keep(row, places, logits[begin:end])
        if row.confident:
            first = _surest(row, places, chances)
            places, tokens, chances = places[first], tokens[first], chances[first]
        found.append((places, tokens, chances))
    return [row.land(*decided) for row, decided in zip(rows, found, strict=True)]


def _columns(row: Row) -> int:
    """What is added to positions for the random numbers of a step: a confident row draws anew in each of its steps."""
    return row.number << 32 if row.confident else 0


def _drawn(
    logits: Tensor, rows: Sequence[Row], owner: Tensor, positions: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """A token for each target and log p of it, some targets after others: filters take ten times the logits' memory."""
    some = max(1, cells_of(logits.device) // logits.shape[1])
    parts = []
    for begin in range(0, len(positions), some):
        part = slice(begin, begin + some)
        tokens = _draw(logits[part], rows, owner[part], positions[part], rules)
        lg.check_drawn(int(tokens.max()), logits.shape[1])
        parts.append((tokens, lg.log_probability(logits[part], tokens.to(logits.device)).cpu().double()))
    drawn, sure = zip(*parts, strict=True)
    return torch.cat(drawn), torch.cat(sure)  # (U,), (U,)


def _draw(logits: Tensor, rows: Sequence[Row], owner: Tensor, positions: Tensor, rules: Rules) -> Tensor:
    """A token for each target: ids ruled out, then warmth, then the truncation of its row.  -> (U,) on the CPU"""
    device = logits.device
    keys = torch.stack([row.keys[row.round] for row in rows])
    columns = positions + torch.tensor([_columns(row) for row in rows])[owner]
    u = lg.uniforms(keys[owner], columns, DRAW)
    u = (u.float() if device.type == "mps" else u).to(device)
    logits = lg.rule_out(logits, rules.never) if rules.never else logits
    if any(row.spaced for row in rows) and rules.spaced is not None:
        pairs = zip(owner.tolist(), positions.tolist(), strict=True)
        spaced = torch.tensor([position in rows[i].spaced for i, position in pairs], device=device)
        logits = logits.masked_fill(spaced[:, None] & ~rules.spaced, -torch.inf)
    warm = torch.tensor([row.number < row.cold for row in rows])
    if bool(warm.any()):
        logits = torch.where(warm[owner].to(device)[:, None], 0.5 * logits, logits)
    kinds = [row.truncations[row.round] for row in rows]
    if len(set(kinds)) == 1:
        return lg.draw(kinds[0](logits, owner, positions), u).cpu()
    drawn = torch.empty(len(positions), dtype=torch.long)
    for kind in dict.fromkeys(kinds):
        members = torch.tensor([other == kind for other in kinds])[owner]
        if not bool(members.any()):
            continue
        there = members.to(device)
        drawn[members] = lg.draw(kind(logits[there], owner[members], positions[members]), u[there]).cpu()
    return drawn


def _surest(row: Row, positions: Tensor, sure: Tensor) -> Tensor:
    """The targets of a confident row from the surest on; equals in the order of the row.  (U,), (U,) -> (U,)"""
    if row.noises is not None:
        u = lg.uniforms(row.key, positions + _columns(row), NOISE)
        sure = sure + row.noises[row.number] * lg.gumbel(u)
    return Offsets.regular(1, len(sure)).ranked(sure)


def _keep(row: Row, positions: Tensor, logits: Tensor) -> None:
    """Write down the likeliest tokens at each target."""
    chances, tokens = logits.softmax(-1).topk(min(row.top, logits.shape[1]), dim=-1)
    for position, some, p in zip(positions.tolist(), tokens.tolist(), chances.tolist(), strict=True):
        row.alternatives[position] = [(token, chance) for token, chance in zip(some, p, strict=True) if chance > 0]
