"""Sampling: drafts grow, some positions in each step, until every wanted position is decided.

The order, the counts per step and the draw are independent choices (order.py, plans.py, draw.py). Prompts and gaps are
just more context. What answers a step is a backend: the network itself (`Plain`), or an engine. The library, the
command line, evaluation and the server all decide tokens here.

Shapes: B rows, L length, S rows of a step, U targets of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from maskless import logits as lg
from maskless.drafts import Ask, Drafts, OnStep, Step
from maskless.draw import DRAW, NOISE, Filter, guided
from maskless.nn import Network, device_of
from maskless.nn.threads import threads_for_draws, threads_for_pass
from maskless.plans import Plan
from maskless.problems import Offsets, Problems, joined
from maskless.revision import to_revise
from maskless.speculation import accept, checking

CELLS = 1 << 25  # logits that are drawn from at once: filters take ten times their memory
CPU_CELLS = 1 << 21  # the same on a processor, where these take up to half a second and 100 MB


class Plain:
    """The definition of a backend, what drafts ask: every step is a call of a network with all that is known.

    answer: in place of the network's own call. Engines do the same with less work.
    """

    def __init__(self, network: Network, answer: Network | None = None):
        self.network, self.answer = network, answer or network

    @torch.no_grad()
    def logits(self, asks: Sequence[Ask]) -> Tensor:
        """Logits at what drafts ask about, one ask after the other, guided where they are.  -> (U, V)"""
        return self._asked(asks, joined([ask.problems() for ask in asks]), self.answer)

    @torch.no_grad()
    def check(self, asks: Sequence[Ask], drawn: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
        """Logits at the same targets, each with those that were drawn before it in its row known too.  -> (U, V)

        drawn (U,), before (U, V) of each ask: tokens, and the logits that they were drawn from.
        """
        problems = joined([checking(ask, tokens) for ask, tokens in zip(asks, drawn, strict=True)])
        return self._asked(asks, problems, self.network)

    def _asked(self, asks: Sequence[Ask], problems: Problems, answer: Network) -> Tensor:
        guidance = asks[0].drafts.guidance
        if guidance is not None and guidance.dropped is not None:
            answer = guided(answer, torch.cat([ask.weights for ask in asks]), guidance.dropped)
        problems = problems.to(device_of(self.network))
        with threads_for_pass(self.network, problems):
            return answer(problems)

    def follow(self, drafts: Drafts, on_step: OnStep | None) -> None:
        """Take all steps of the plans of all rows."""
        while len(rows := drafts.next()):
            self._step(drafts, rows, on_step)

    def _step(self, drafts: Drafts, rows: Tensor, on_step: OnStep | None) -> None:
        """The next step of rows (S,)."""
        for step in take([drafts.ask(rows)], self)[0]:
            if on_step is not None:
                on_step(step)


def run(drafts: Drafts, backend: Plain, on_step: OnStep | None = None) -> list[list[int]]:
    """Decide all drafts; returns of each row the decided positions, in the order in which they came."""
    backend.follow(drafts, on_step)
    decided = drafts.plan.decided()
    while bool(drafts.due.any()):
        rows = torch.arange(len(drafts))
        again = revise([(drafts, rows)], backend.network)[0]
        backend.follow(drafts, on_step)
        old = [[p for p in row if not again[i, p]] for i, row in enumerate(decided)]
        decided = [kept + new for kept, new in zip(old, drafts.plan.decided(), strict=True)]
    return decided


def sample(network: Network, tokens: Tensor, plan: Plan, keys: Tensor, **how: Any) -> Iterator[Step]:
    """Decide tokens (B, L) as planned, in place, yielding each step; how: the other fields of `Drafts`.

    This is the method in its plainest form, for any network that answers problems. A step that decides nothing (counts
    may be 0) yields nothing and costs nothing.
    """
    drafts, backend = Drafts(tokens=tokens, plan=plan, keys=keys, **how), Plain(network)
    while len(rows := drafts.next()):
        yield from take([drafts.ask(rows)], backend)[0]


@torch.no_grad()
def take(asks: Sequence[Ask], backend: Plain) -> list[list[Step]]:
    """One step of the rows of some drafts, by one call; they change only if all is well. Returns what each decided."""
    logits = backend.logits(asks)  # (U, V)
    with threads_for_draws(logits):
        drawn, sure = _drawn(logits, asks)
    lengths = [sum(ask.lengths) for ask in asks]
    split = (x.split(lengths) for x in (logits, drawn, sure, sure.cpu().double().exp()))
    parts = list(zip(asks, *split, strict=True))
    checked = _checked([part[:3] for part in parts if part[0].drafts.draft], backend)
    found: list[tuple[Tensor, ...]] = []
    for ask, own, tokens, log_p, chances in parts:
        positions = ask.positions
        if ask.drafts.confident:
            first = _surest(ask, log_p).cpu()
            positions, tokens, chances = positions[first], tokens[first], chances[first]
        found.append((positions, *checked[ask]) if ask in checked else (positions, tokens, chances))
        if ask.drafts.top:
            _keep(ask, own)
    return [ask.drafts.land(ask, *decided) for ask, decided in zip(asks, found, strict=True)]


def _checked(parts: Sequence[tuple[Ask, Tensor, Tensor]], backend: Plain) -> dict[Ask, tuple[Tensor, ...]]:
    """Of drafts that are exact: tokens and their probabilities (U,) after the check, how many of each row stand, and
    the tokens (U,) before it."""
    if not parts:
        return {}
    asks, drawn = [ask for ask, _, _ in parts], [tokens for _, _, tokens in parts]
    after = backend.check(asks, drawn, [logits for _, logits, _ in parts]).split([len(tokens) for tokens in drawn])
    found: dict[Ask, tuple[Tensor, ...]] = {}
    for (ask, before, tokens), q in zip(parts, after, strict=True):
        keys, columns, *_ = _targets([ask])
        with threads_for_draws(q):
            stand, counts, tally = accept(tokens, _shaped(before, ask), _shaped(q, ask), ask.offsets, keys, columns)
        lg.check_drawn(int(stand.max()), q.shape[1])
        ask.drafts.tally += tally
        found[ask] = stand, lg.log_probability(q, stand.to(q.device)).cpu().double().exp(), counts, tokens
    return found


def revise(parts: Sequence[tuple[Drafts, Tensor]], network: Network) -> list[Tensor]:
    """Begin the next round of rows (S,) of some drafts that are due, all in the same round of as many, by one call.

    Returns what they decide again.  -> of each (S, L) bool
    """
    drafts, rows = parts[0]
    number, rounds = int(drafts.round[rows[0]]), drafts.revise
    longest = max(one.tokens.shape[1] for one, _ in parts)

    def together(name: str) -> Tensor:
        rows = [getattr(one, name)[own] for one, own in parts]
        return torch.cat([pad(x, (0, longest - x.shape[1])) for x in rows])

    tokens, known, wanted = (together(name) for name in ("tokens", "known", "wanted"))
    keys = torch.cat([one.keys_of(own, number + 1) for one, own in parts])
    of = [one.labels[own] for one, own in parts if one.labels is not None]
    labels = torch.cat(of) if of else None
    again = to_revise(network, tokens, known, wanted, keys, number=number, rounds=rounds, labels=labels)
    some = again.split([len(own) for _, own in parts])
    found = [part[:, : one.tokens.shape[1]] for part, (one, _) in zip(some, parts, strict=True)]
    for (one, own), part in zip(parts, found, strict=True):
        one.begin(own, part)
    return found


def cells_of(device: torch.device) -> int:
    """How many logits are drawn from at once."""
    return CPU_CELLS if device.type == "cpu" else CELLS


def _drawn(logits: Tensor, asks: Sequence[Ask]) -> tuple[Tensor, Tensor]:
    """A token for each target, on the CPU, and log p of it, before any filter: after a greedy one all are equally sure.

    (U, V) -> (U,), (U,)
    """
    device, vocab = logits.device, logits.shape[1]
    there = torch.device("cpu") if device.type == "mps" else device  # which has float64
    keys, columns, rows, positions, warm = _targets(asks)
    u = lg.uniforms(keys.to(there), columns.to(there), DRAW)
    u = u.float().to(device) if device.type == "mps" else u
    shape = _Shape(asks, rows.to(device), positions.to(device), warm)
    parts, some = [], max(1, cells_of(device) // vocab)
    for begin in range(0, len(u), some):
        part = slice(begin, begin + some)
        tokens = lg.draw(shape(logits, part), u[part])
        lg.check_drawn(int(tokens.max()), vocab)
        parts.append((tokens, lg.log_probability(logits[part], tokens)))
    tokens, sure = (torch.cat(x) for x in zip(*parts, strict=True))
    return tokens.cpu(), sure


def _shaped(logits: Tensor, ask: Ask) -> Tensor:
    """Logits as they are drawn from.  (U, V) -> (U, V)"""
    _, _, rows, positions, warm = _targets([ask])
    return _Shape([ask], rows.to(logits.device), positions.to(logits.device), warm)(logits, slice(None))


class _Shape:
    """What is done to logits before a draw: ids ruled out, then spaces, then warmth, then the filter of each row."""

    def __init__(self, asks: Sequence[Ask], rows: Tensor, positions: Tensor, warm: Tensor | None):
        device = rows.device
        self.never, self.rows, self.positions = asks[0].drafts.never, rows, positions
        self.warm = warm.to(device) if warm is not None and bool(warm.any()) else None
        self.spaced, self.kinds = _spaced(asks, device), _kinds(asks, device)

    def __call__(self, logits: Tensor, part: slice) -> Tensor:
        """The logits of a part of the targets.  (U, V) -> (u, V)"""
        shaped = lg.rule_out(logits[part], self.never) if self.never else logits[part]
        if self.spaced is not None:
            shaped = shaped.masked_fill(self.spaced[0][part, None] & ~self.spaced[1], -torch.inf)
        if self.warm is not None:
            shaped = torch.where(self.warm[part, None], 0.5 * shaped, shaped)
        rows, positions = self.rows[part], self.positions[part]
        if len(self.kinds) == 1:
            return self.kinds[0][0](shaped, rows, positions)
        done = torch.empty_like(shaped, dtype=torch.float32)
        for filter, members in self.kinds:
            own = members[part]
            done[own] = filter(shaped[own], rows[own], positions[own]).float()
        return done


def _targets(asks: Sequence[Ask]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Of each target: the key, the column of its random numbers, the row, the position, and whether it is warmed."""
    keys = []
    for ask in asks:
        own = ask.drafts.keys.tolist()
        keys += [own[span.row] for span in ask.spans]
    owner = Offsets.from_lengths(torch.tensor([length for ask in asks for length in ask.lengths])).owner
    rows, positions = torch.cat([ask.at for ask in asks]), torch.cat([ask.positions for ask in asks])
    warm = torch.cat([_warm(ask) for ask in asks]) if any(ask.drafts.warmup for ask in asks) else None
    moving = any(ask.drafts.draft or ask.drafts.confident for ask in asks)
    columns = torch.cat([_columns(ask) for ask in asks]) if moving else positions
    return torch.tensor(keys)[owner], columns, rows, positions, warm


def _warm(ask: Ask) -> Tensor:
    """Which targets are in the first steps, which draw at temperature 2.  -> (U,) bool"""
    return (ask.numbers < ask.drafts.cold[ask.at]) & (ask.drafts.round[ask.at] == 0)


def _columns(ask: Ask) -> Tensor:
    """Where in its random numbers a target looks: those that are still open draw anew in each step."""
    drafts, rows = ask.drafts, ask.rows
    if not (drafts.draft or drafts.confident):
        return ask.positions
    step = drafts.taken[rows] if drafts.draft else torch.where(drafts.searching(rows), drafts.number[rows], 0)
    return ask.positions + (step << 32)[ask.offsets.owner]


def _spaced(asks: Sequence[Ask], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Which targets have to begin with a space, and which tokens do.  -> (U,), (V,)"""
    begins = next((ask.drafts.spaced[1] for ask in asks if ask.drafts.spaced is not None), None)
    if begins is None:
        return None
    places = [
        torch.zeros(sum(ask.lengths), dtype=torch.bool)
        if ask.drafts.spaced is None
        else ask.drafts.spaced[0][ask.at, ask.positions]
        for ask in asks
    ]
    return torch.cat(places).to(device), begins.to(device)


def _kinds(asks: Sequence[Ask], device: torch.device) -> list[tuple[Filter, Tensor]]:
    """The filters, and which targets are theirs."""
    of = [filter for ask in asks for filter in ask.drafts.filters(ask.rows)]
    kinds = list(dict.fromkeys(of))
    lengths = torch.tensor([length for ask in asks for length in ask.lengths])
    return [(kind, torch.tensor([one == kind for one in of]).repeat_interleave(lengths).to(device)) for kind in kinds]


def _surest(ask: Ask, sure: Tensor) -> Tensor:
    """The targets of each row from the surest on; equals, and rows with an order, as they stand.  (U,) -> (U,)"""
    drafts, owner = ask.drafts, ask.offsets.owner
    there = torch.device("cpu") if sure.device.type == "mps" else sure.device
    sure, rows = sure.to(there).double(), ask.at
    if drafts.noises is not None:
        noise = drafts.noises[rows, drafts.number[rows]].to(there)
        sure = sure + noise * lg.gumbel(lg.uniforms(drafts.keys[rows].to(there), _columns(ask).to(there), NOISE))
    searching = drafts.searching(ask.rows)[owner].to(there)
    return ask.offsets.ranked(torch.where(searching, sure, -ask.offsets.within.to(there).double()))


def _keep(ask: Ask, logits: Tensor) -> None:
    """Write down the likeliest tokens at each target."""
    chances, tokens = logits.float().softmax(-1).topk(min(ask.drafts.top, logits.shape[1]), dim=-1)
    for position, some, p in zip(ask.positions.tolist(), tokens.tolist(), chances.tolist(), strict=True):
        ask.drafts.alternatives[position] = [pair for pair in zip(some, p, strict=True) if pair[1] > 0]
