"""Exact sampling of a trained model, timed beside one token a step, plain strands and other models.

What a draft is worth depends on the weights, so here a trained model is measured, not a random one.

Shapes: B rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich import box
from rich.table import Table as Grid

from maskless.bench.machine import now
from maskless.checkpoint import Model
from maskless.decide import DRAFT, decide
from maskless.how import How, check_positive
from maskless.nn.partition import chains
from maskless.texts import new_drafts

STRANDS = 8
WARM_UP = 3  # runs: on a GPU the second and third are captured


@dataclass(frozen=True)
class Way:
    """A way to write texts with a model."""

    name: str
    model: Model
    how: How


@dataclass(frozen=True, kw_only=True)
class WaySpeed:
    """How fast texts were written in a way, B at a time."""

    way: str
    batch: int
    times: tuple[float, ...]  # seconds of each run
    tokens: int  # of a text
    rounds: float  # of a text, on average

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        found = {"seconds": self.seconds, "tokens_per_second": self.tokens_per_second}
        return asdict(self) | found | {"tokens_per_round": self.tokens / self.rounds}


def ways_of(model: Model, rivals: Sequence[tuple[str, Model]]) -> list[Way]:
    """One token a step first, then what is compared with it, then the rivals as they are used."""
    if model.frame.grid is not None or not chains(model.network):
        raise ValueError("--exact needs a text model trained on chains (`maskless train --objective chain`)")
    tokens = model.config.length - len(model.lead)
    strands: dict[str, Any] = {"order": "strands", "strands": STRANDS}
    return [
        Way("one token a step", model, How(order="random", steps=tokens)),
        Way(f"exact, random order, drafts of {DRAFT}", model, How(order="random", exact=True, draft=DRAFT)),
        Way(f"exact, {STRANDS} strands", model, How(exact=True, **strands)),
        Way(f"plain, {STRANDS} strands", model, How(**strands)),
        *(Way(name, rival, How()) for name, rival in rivals),
    ]


def measure(
    ways: Sequence[Way], batches: Sequence[int], *, repeat: int, on_run: Callable[[str], None]
) -> Iterator[WaySpeed]:
    """Time every way at every batch; what is planned on the way is on the clock."""
    check_positive(repeat=repeat)
    for batch in batches:
        check_positive(batch=batch)
        for way in ways:
            times, rounds = [], []
            for run in range(WARM_UP + repeat):
                seconds, taken = _run(way, batch, run)
                times.append(seconds)
                rounds.append(taken)
                on_run(f"{way.name}, batch {batch}")
            tokens = way.model.config.length - len(way.model.lead)
            counted, taken = tuple(times[WARM_UP:]), statistics.mean(rounds[WARM_UP:])
            yield WaySpeed(way=way.name, batch=batch, times=counted, tokens=tokens, rounds=taken)


def _run(way: Way, batch: int, seed: int) -> tuple[float, float]:
    """Seconds, and the mean number of steps or rounds of a text."""
    model, how = way.model, replace(way.how, seed=seed)
    begin = now(model.device)
    done = decide(model, new_drafts(model, model.lead, model.config.length, torch.arange(batch), how))
    seconds = now(model.device) - begin
    return seconds, float((done.steps.amax(1) + 1).double().mean())


def grid(paces: Sequence[WaySpeed], where: str) -> Grid:
    """One line for each way and batch, beside one token a step."""
    shown = Grid(title=f"exact sampling, {paces[0].tokens} tokens a text; {where}", box=box.SIMPLE_HEAD)
    for title in ("way", "batch", "seconds", "tokens/s", "x one token\na step", "tokens\na round"):
        shown.add_column(title, justify="left" if title == "way" else "right")
    first = {pace.batch: pace for pace in reversed(paces)}  # of each batch, which is one token a step
    for pace in paces:
        times = first[pace.batch].seconds / pace.seconds
        cells = f"{pace.seconds:.4f}", f"{pace.tokens_per_second:,.0f}", f"{times:.1f}"
        shown.add_row(pace.way, str(pace.batch), *cells, f"{pace.tokens / pace.rounds:.1f}")
    return shown
