"""Drafts: sequences on their way, each at its own place in its own plan.

Every random number that a draft uses depends on its key alone, so its tokens are the same whoever shares a step. After
its last step a draft may be revised (revision.py), which is one more plan.

Shapes: B rows, L length, K steps, S rows of a step, U targets of a step, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.draw import Filter, Guidance, Truncation, check_warmup
from maskless.plans import Plan
from maskless.problems import Offsets, Problems, split
from maskless.revision import cooled, steps_of


@dataclass(frozen=True)
class Step:
    """What one step decided: U tokens, each with its row and position."""

    number: int  # 0 .. K-1, then on in revision rounds
    rows: Tensor
    positions: Tensor
    tokens: Tensor
    chances: Tensor | None = None  # (U,) the network's own probabilities, before temperature and truncation
    refused: tuple[Tensor, ...] | None = None  # rows, positions, tokens that were drafted and did not stand


OnStep = Callable[[Step], None]


def numbered_from(begin: int, on_step: OnStep) -> OnStep:
    """What watches a part of a call whose rows have the numbers `begin` and on."""
    return lambda step: on_step(replace(step, rows=step.rows + begin))


@dataclass
class Tally:
    """What drafts were worth, so far."""

    rounds: int = 0  # of all rows
    drafted: int = 0  # tokens
    accepted: int = 0
    decided: int = 0  # accepted, or drawn where one was refused
    nats: float = 0.0  # KL of the drafts' distribution from the chain's, estimated from the drafts, added up

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(eq=False, kw_only=True)
class Drafts:
    """Sequences that are being decided, all in the same way, each at its own place in its own plan.

    The plan is that of the round under way: the draft itself, and then as many revision rounds as `revise`
    says, for which `replan` (known, wanted, keys, steps=) makes plans. In confidence order each step draws a token at
    every open position and keeps the surest, as many as the plan has in that step; the plan's order decides between
    equals, and is rewritten to what happened.  MaskGIT, whose released default is a noise of 5
    """

    tokens: Tensor  # (B, L), decided in place
    plan: Plan
    keys: Tensor  # (B,) from `row_keys`
    filter: Filter = field(default_factory=Truncation)
    never: tuple[int, ...] = ()  # ids that are not drawn
    spaced: tuple[Tensor, Tensor] | None = None  # (B, L) where a token has to begin with a space, (V,) which ones do
    confident: bool = False  # decide what is surest, not what comes next in the order
    noise: float = 0.0  # of the confidence: noise * Gumbel * (1 - progress) is added to log p
    warmup: int = 0  # first steps of a row that draw at temperature 2, so that samples differ before they settle
    labels: Tensor | None = None  # (B,) of classes
    guidance: Guidance | None = None
    refresh: int = 1  # of an engine
    revise: int = 0
    replan: Callable[..., Plan] | None = None
    top: int = 0  # keep so many alternatives of each decided token
    draft: int = 0  # tokens that are drawn together and checked (speculation.py); 0: as many as the plan has in a step
    at_once: int | None = None  # rows with such drafts that are under way; when one is done, the next takes its place
    strand: Tensor | None = None  # (B, L) the strand of each wanted position, for those who watch; None: no strands

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise {self.noise} is out of range: expected 0 (none) or more")
        check_warmup(self.warmup)
        if any(i < 0 for i in self.never):
            raise ValueError(f"ids {self.never} that are never drawn: expected 0 or more")
        B, L = self.tokens.shape
        if self.labels is not None and self.labels.shape != (B,):
            raise ValueError(f"labels {tuple(self.labels.shape)}: expected one for each of {B} rows")
        if self.guidance is not None and self.guidance.weight and self.labels is None:
            raise ValueError(f"guidance {self.guidance.weight} needs labels, one for each row")
        self.own = self.keys  # of the draft: those of a round follow from them
        self.rounds = [self.plan.steps, *steps_of(self.plan.steps, self.revise)]  # steps of each
        self.number = torch.zeros(B, dtype=torch.long)  # the step that comes next
        self.round, self.past = torch.zeros(2, B, dtype=torch.long)  # the one under way, and the steps before it
        self.came = torch.full((B, L), -1)  # the step that decided each position, -1 where it was given
        self.chance = torch.full((B, L), torch.nan)
        self.wanted = self.plan.came() >= 0
        columns = torch.arange(L)
        self.known = torch.zeros_like(self.wanted).scatter(1, self.plan.order, columns < self.plan.ends[:, :1])  # given
        self.cold = self.plan.first() + self.warmup  # (B,) the first step that is not warmed
        self.taken = torch.zeros(B, dtype=torch.long)  # calls in which a row had a part
        self._numbers, self._rounds, self._pasts, self._takens = (  # the same memory, for a look at one row
            x.numpy() for x in (self.number, self.round, self.past, self.taken)
        )
        self.tally = Tally()
        self.alternatives: dict[int, list[tuple[int, float]]] = {}
        self._planned()

    def _planned(self) -> None:
        """What follows from the plan."""
        ends, K = self.plan.ends, self.plan.steps
        steps = torch.arange(K + 1).expand(len(ends), K + 1)
        busy = torch.cat([ends.diff(dim=1) > 0, torch.zeros_like(ends[:, :1], dtype=torch.bool)], 1)
        self.upcoming = torch.where(busy, steps, K).flip(1).cummin(1).values.flip(1)  # the next step that is not empty
        self.weights = None if not self._weight else self.guidance.weights(self.plan)  # type: ignore[union-attr]
        self.noises = self.noise * (1 - self.plan.progress()) if self.noise and self.confident else None
        self.number.copy_(self.upcoming.gather(1, self.number[:, None])[:, 0])
        self._ends, self._upcoming = ends.numpy(), self.upcoming.numpy()

    @property
    def _weight(self) -> float:
        return 0.0 if self.guidance is None else self.guidance.weight

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def steps(self) -> int:
        """Of all rounds together."""
        return sum(self.rounds)

    @property
    def open(self) -> Tensor:
        """The rows whose plan has a next step.  -> (B,) bool"""
        return self.number < self.plan.steps

    @property
    def due(self) -> Tensor:
        """The rows whose next round has to begin: it is not known yet what that decides.  -> (B,) bool"""
        return ~self.open & (self.round < self.revise)

    def searching(self, rows: Tensor) -> Tensor:
        """Which of the rows look for what is surest; a revision has an order.  (S,) -> (S,) bool"""
        return (self.round[rows] == 0) & self.confident

    def next(self) -> Tensor:
        """The rows that take the next step together: those that are least far, but exact ones at their own pace."""
        rows = self.open.nonzero()[:, 0]
        if self.draft:
            return rows[: self.at_once]
        return rows[self.number[rows] == self.number[rows].min()] if len(rows) else rows

    def over(self, row: int) -> bool:
        """Whether the plan of a row has no next step."""
        return bool(self._numbers[row] == self.plan.steps)

    def round_of(self, row: int) -> int:
        """The round that is under way."""
        return int(self._rounds[row])

    def step_of(self, row: int) -> int:
        """The step that comes next, of all rounds together."""
        return int(self._pasts[row] + self._numbers[row])

    def span(self, row: int) -> Span:
        """What the next step of a row asks."""
        number, ends = int(self._numbers[row]), self._ends[row]
        start, end = int(ends[number]), int(ends[min(number + max(1, self.draft), self.plan.steps)])
        searching = self.confident and self._rounds[row] == 0
        return Span(row, start, int(ends[-1]) if searching else end, end - start)

    def ask(self, rows: Tensor) -> Ask:
        """What the next step of some rows (S,) asks."""
        return Ask(self, [self.span(row) for row in rows.tolist()])

    def filters(self, rows: Tensor) -> list[Filter]:
        """Of each row: revisions are cooler from round to round.  (S,) -> S filters"""
        if not self.revise or not isinstance(truncation := self.filter, Truncation):
            return [self.filter] * len(rows)
        cool = [cooled(truncation.temperature, number, self.revise) for number in range(self.revise)]
        of = [truncation, *(replace(truncation, temperature=temperature) for temperature in cool)]
        return [of[number] for number in self.round[rows].tolist()]

    def land(
        self,
        ask: Ask,
        positions: Tensor,
        tokens: Tensor,
        chances: Tensor,
        counts: Tensor | None = None,
        drafted: Tensor | None = None,
    ) -> list[Step]:
        """Write down what a step decided, the surest first, and go on to the next one that decides something.

        counts (S,): how many of each row, where that is not what was planned; drafted (U,): tokens before a check.
        """
        at, decided = ask.at, [span.decided for span in ask.spans] if counts is None else counts.tolist()
        lost: tuple[Tensor, ...] | None = None
        if self.confident or self.draft:  # otherwise all that was asked about is decided
            owner, within = ask.offsets.owner, ask.offsets.within
            if self.confident:
                self.plan.order[at, ask.starts[owner] + within] = positions
            kept = within < torch.tensor(decided)[owner]
            if drafted is not None:
                fell = ~kept | (tokens != drafted)
                lost = at[fell], positions[fell], drafted[fell]
            at, positions, tokens, chances = at[kept], positions[kept], tokens[kept], chances[kept]
        self.tokens[at, positions], self.chance[at, positions] = tokens, chances.float()
        numbers = [int(self._takens[row]) if self.draft else self.step_of(row) for row, *_ in ask.spans]
        for (row, *_), count in zip(ask.spans, decided, strict=True):
            self._takens[row] += 1
            self._numbers[row] = self._upcoming[row, self._numbers[row] + (count if self.draft else 1)]
        if len(set(numbers)) == 1:
            self.came[at, positions] = numbers[0]
            return [Step(numbers[0], at, positions, tokens, chances, lost)]
        steps = torch.tensor(numbers).repeat_interleave(torch.tensor(decided))
        self.came[at, positions] = steps
        found = []
        for number in sorted(set(numbers)):
            own, rows = steps == number, torch.tensor([n == number for n in numbers])
            part = None if lost is None else tuple(x[torch.isin(lost[0], ask.rows[rows])] for x in lost)
            found.append(Step(number, at[own], positions[own], tokens[own], chances[own], part))
        return found

    def record(self, rows: Tensor, tokens: Tensor, came: Tensor, chances: Tensor) -> list[Step]:
        """Write down what rounds of rows (S,) have decided since the last time, elsewhere; (S, L) in the plan's order.

        came: the round of each token, -1 where it was not decided.
        """
        order = self.plan.order[rows]
        new = (came >= 0) & (self.came[rows].gather(1, order) < 0)
        owner, place = new.nonzero(as_tuple=True)
        at, positions = rows[owner], order[owner, place]
        tokens, chances, came = tokens[owner, place], chances[owner, place], came[owner, place]
        self.tokens[at, positions], self.chance[at, positions] = tokens, chances.float()
        self.came[at, positions] = came
        self.number[rows] = self.upcoming[rows].gather(1, (self.number[rows] + new.sum(1))[:, None])[:, 0]
        self.taken[rows] = self.came[rows].amax(1) + 1
        numbers = came.unique().tolist()
        parts = [(n, came == n) for n in numbers]
        return [Step(n, at[own], positions[own], tokens[own], chances[own]) for n, own in parts]

    def begin(self, rows: Tensor, again: Tensor) -> None:
        """Begin the next round of rows (S,) that are in the same one, which decides again (S, L) anew.

        What it decides again keeps its token until then.
        """
        assert self.replan is not None
        number = int(self.round[rows[0]])
        keys = self.keys_of(rows, number + 1)
        known = self.known[rows] | (self.wanted[rows] & ~again)
        made = self.replan(known, again, keys, steps=self.rounds[number + 1])
        ends = torch.cat([made.ends, made.ends[:, -1:].expand(-1, self.plan.steps - made.steps)], 1)
        self.plan = Plan(self.plan.order.index_copy(0, rows, made.order), self.plan.ends.index_copy(0, rows, ends))
        self.keys = self.keys.index_copy(0, rows, keys)
        self.round[rows], self.number[rows] = number + 1, 0
        self.past[rows] += self.rounds[number]
        self._planned()

    @property
    def current(self) -> Plan:
        """The plan of the round that is under way, where all rows are in the same."""
        return Plan(self.plan.order, self.plan.ends[:, : self.rounds[int(self.round.max())] + 1])

    def settle(self) -> None:
        """All steps of the plans of all rows were taken, by somebody else."""
        came = self.plan.came()
        self.came = torch.where(came >= 0, self.past[:, None] + came, self.came)
        self.number.fill_(self.plan.steps)

    def keys_of(self, rows: Tensor, number: int) -> Tensor:
        """The keys of a round."""
        return lg.row_keys(number, self.own[rows])


class Span(NamedTuple):
    """What a row asks in a step: about the positions from start to end of its order, of which so many are decided."""

    row: int
    start: int
    end: int
    decided: int


@dataclass(eq=False)
class Ask:
    """What rows of some drafts ask in a step. A server has many with a single row, which are kept cheap."""

    drafts: Drafts
    spans: list[Span]  # S

    def __post_init__(self) -> None:
        self.rows, self.starts, self.ends, _ = torch.tensor(self.spans).unbind(1)  # (S,) each

    @property
    def lengths(self) -> list[int]:
        """How many targets each row has."""
        return [span.end - span.start for span in self.spans]

    @cached_property
    def offsets(self) -> Offsets:
        return Offsets.from_lengths(self.ends - self.starts)

    @cached_property
    def at(self) -> Tensor:
        """The row of each target.  -> (U,)"""
        if len(self.spans) == 1:
            return torch.full((sum(self.lengths),), self.spans[0].row)
        return self.rows[self.offsets.owner]

    @cached_property
    def positions(self) -> Tensor:
        """The targets.  -> (U,)"""
        order = self.drafts.plan.order
        if len(self.spans) == 1:
            (row, start, end, _), *_ = self.spans
            return order[row, start:end]
        return order[self.at, self.starts[self.offsets.owner] + self.offsets.within]

    @cached_property
    def numbers(self) -> Tensor:
        """The step of the plan that each target belongs to.  -> (U,)"""
        number = self.drafts.number[self.rows][self.offsets.owner]
        return number + self.offsets.within if self.drafts.draft else number

    @property
    def weights(self) -> Tensor:
        """Of the guidance at each target.  -> (U,)"""
        weights = self.drafts.weights
        if weights is None:
            return torch.zeros(sum(self.lengths))
        return weights[self.at, self.numbers]

    def problems(self) -> Problems:
        drafts, rows = self.drafts, self.rows
        problems, _ = split(drafts.tokens[rows], drafts.plan.order[rows], self.starts, self.ends)
        return problems if drafts.labels is None else replace(problems, labels=drafts.labels[rows])
