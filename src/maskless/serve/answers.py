"""What answers the rows of a model: its engine, with or without a memory of what was encoded, or the network itself.

A network with ordered context, or a causal one, never changes what it has encoded. Its rows have seats in the engine,
and a step costs only the tokens that are new and those that are asked for. Any other network reads all that is known in
every step.

Shapes: B rows, L length, U targets of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from maskless import logits as lg
from maskless.checkpoint import Model
from maskless.engine import Engine, serves
from maskless.engine.seats import Ask, Seats, keeps
from maskless.nn import Network, autocast
from maskless.nn.threads import threads_for_pass
from maskless.problems import Offsets, Problems
from maskless.revision import erased
from maskless.sampling import guided
from maskless.serve.rows import Answers, Row, Rules

KEPT = 1 << 32  # bytes of keys and values that the rows of a model may keep together


def answers_of(model: Model, rules: Rules) -> Answers:
    """The cheapest that gives the network's own answers."""
    if not serves(model.network):
        return Anew(model, rules, _plain(model))
    engine = Engine(model.network)
    if keeps(engine):
        return Kept(model, rules, Seats(engine, int(model.config.length), KEPT))
    return Anew(model, rules, engine.answer)


class _Reviser:
    """What finished drafts make least likely is found as `texts.fill_text` does it: by the network itself."""

    def __init__(self, model: Model, rules: Rules):
        self.model, self.rules = model, rules

    def erased(self, rows: Sequence[Row]) -> Tensor:
        parts = zip(*((row.tokens, row.known, row.wanted) for row in rows), strict=True)
        tokens, known, wanted = (pad_sequence(list(some), batch_first=True) for some in parts)  # (B, L)
        number, rounds = rows[0].round, rows[0].revise
        keys = torch.stack([row.keys[number + 1] for row in rows])
        with autocast(self.model.device):
            return erased(self.model.network, tokens, known, wanted, keys, number=number, rounds=rounds)


class Anew(_Reviser):
    """Every step is a call of the network with all that is known."""

    room = 1 << 30

    def __init__(self, model: Model, rules: Rules, network: Network):
        super().__init__(model, rules)
        self.network = network

    def logits(self, rows: Sequence[Row]) -> Tensor:
        weights, dropped = torch.tensor([row.weight for row in rows]), self.rules.dropped
        network = self.network if dropped is None else guided(self.network, weights, dropped)
        return network(packed(rows, self.rules).to(self.rules.device)).float()

    def keep(self, rows: Sequence[Row]) -> None:
        """Nothing is kept."""


class Kept(_Reviser):
    """Every row has a seat; a guided one has two, the second for its logits without the label."""

    def __init__(self, model: Model, rules: Rules, seats: Seats):
        super().__init__(model, rules)
        self.seats = seats

    @property
    def room(self) -> int:
        """So many rows at once: what they keep has to fit into the memory."""
        return self.seats.most if self.rules.dropped is None else max(1, self.seats.most // 2)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        twins = [row for row in rows if any(row.weights)]
        asks = [*(_ask(row, row.label) for row in rows), *(_ask(row, self.rules.dropped, twin=True) for row in twins)]
        logits = self.seats.logits(asks)
        if not twins:
            return logits
        parts = logits.split([len(row.asked) for row in (*rows, *twins)])
        without = dict(zip(twins, parts[len(rows) :], strict=True))
        return torch.cat([_guided(row, own, without.get(row)) for row, own in zip(rows, parts, strict=False)])

    def keep(self, rows: Sequence[Row]) -> None:
        self.seats.keep({(row, twin) for row in rows if not row.due for twin in (False, True)})


def _ask(row: Row, label: int | None, twin: bool = False) -> Ask:
    return Ask((row, twin), row.tokens, row.order, row.start, row.end, label)


def _guided(row: Row, own: Tensor, without: Tensor | None) -> Tensor:
    return own if without is None else lg.guide(own, without, torch.full((len(own),), row.weight))


def _plain(model: Model) -> Network:
    def answer(problems: Problems) -> Tensor:
        with torch.no_grad(), autocast(model.device), threads_for_pass(model.network, problems):
            return model.network(problems)

    return answer


def packed(rows: Sequence[Row], rules: Rules) -> Problems:
    """The problems of a step."""
    known, asked = [row.order[: row.start] for row in rows], [row.asked for row in rows]
    offsets, target_offsets = (Offsets.from_lengths(torch.tensor([len(x) for x in parts])) for parts in (known, asked))
    problems = Problems(
        tokens=torch.cat([row.tokens[places] for row, places in zip(rows, known, strict=True)]),
        positions=torch.cat(known),
        offsets=offsets,
        targets=torch.cat(asked),
        target_offsets=target_offsets,
    )
    if rules.dropped is None:
        return problems
    labels = [rules.dropped if row.label is None else row.label for row in rows]
    return replace(problems, labels=torch.tensor(labels))
