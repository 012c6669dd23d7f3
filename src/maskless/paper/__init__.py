"""The paper as data: its tables and figures by name, line by line, and the tables of what we want to reach ourselves.

The paper is "Partition Generative Modeling" (PGM). Its tables are listed in tables.toml, their numbers are in CSV
files: a row has the paper's name of a model, what makes the numbers (the fields of a `Work`), the measure, and a number
for each place: steps, a weight of the guidance, a task, or a part of a training step.

A latency of text is batch x length / throughput in the paper (but for two rows of Tab. 7 that are exchanged), so only
the throughput stands there. Tab. 1 does not say in how many steps its speeds are; 128, by what the rows on OpenWebText
take. Tab. 10 does not state the batch; 32 as in the script that made it. Fig. 6 has no numbers: how far the losses and
the gradients leap.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from maskless.how import check_name

PERPLEXITY, GEN_PPL, ENTROPY, ACCURACY = "perplexity", "Gen-PPL", "entropy", "accuracy"
FID, SCORE = "FID", "Inception Score"
SPIKE, GRADIENT = "largest loss / median", "largest gradient norm"
TOKENS, SEQUENCES, IMAGES = "tokens/s", "sequences/s", "images/s"
SECONDS, START_UP, MEMORY = "seconds", "seconds to start", "GiB"
SAMPLE, FORWARD, BACKWARD, STEP = "sample", "forward", "forward + backward", "optimiser step"  # parts that are timed


class Dataset(NamedTuple):
    """A set that the paper trains on, and the tokens of a sequence of it."""

    name: str
    vocab: int
    length: int


DATASETS = {
    "lm1b": Dataset("LM1B", 30_522, 128),  # BERT's vocabulary
    "owt": Dataset("OpenWebText", 50_257, 1024),
    "imagenet": Dataset("ImageNet", 16_384, 1024),
}


def read(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a CSV beside this file, by column: numbers as such, None where nothing stands."""
    with (Path(__file__).parent / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {column: value(text) for column, text in row.items()}


def value(text: str) -> Any:
    """128, 0.9, true or a word; None for nothing."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


# How each is trained, and its sizes. A recipe of the paper is called by its set, its network, and -200k if cut short.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    row.pop("name"): (row.pop("model"), {size: n for size, n in row.items() if n is not None})
    for row in read("networks")
}


def set_and_network(recipe: str) -> tuple[str, str]:
    """The set and the network: owt-pgm-8-8-200k -> owt, pgm-8-8"""
    data, _, network = recipe.removesuffix("-200k").partition("-")
    return data, network


@dataclass(frozen=True)
class Bound:
    """The validation bound of a recipe's network."""

    recipe: str


@dataclass(frozen=True)
class Texts:
    """What a recipe's network writes, in several numbers of steps."""

    recipe: str
    counts: str = "uniform"
    top_p: float | None = None
    distilled: bool = False


@dataclass(frozen=True)
class Pictures:
    """What a recipe's network draws, with several weights of the guidance."""

    recipe: str
    order: str
    steps: int


@dataclass(frozen=True, kw_only=True)
class NetworkSpeed:
    """How fast a recipe's network is with random weights; None: as the paper has it."""

    recipe: str
    trains: bool = False  # else it samples
    context: str | None = None
    length: int | None = None
    batch: int | None = None
    guidance: float | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Downstream:
    """What a recipe's network answers to lm-eval's tasks."""

    recipe: str
    distilled: bool = False


@dataclass(frozen=True)
class Curve:
    """The training losses of a recipe, with these weights."""

    recipe: str
    weights: str = ""


Work = Bound | Texts | Pictures | NetworkSpeed | Downstream | Curve


@dataclass(frozen=True, kw_only=True)
class Line:
    """One number: the paper's row, what makes it, where along that it is read, what others reached, what we want."""

    model: str
    work: Work
    measure: str
    at: int | str | None = None  # steps, weight of the guidance, task, or part of a training step
    paper: float | None = None
    released: float | None = None
    at_least: float | None = None
    aim: float | None = None
    why_not: str = ""  # a row that does not exist here


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines under a name, and how they are drawn."""

    name: str
    about: str
    lines: tuple[Line, ...] = ()
    draw: str = "lines"  # or losses, quality, orders
    note: str = ""


ABOUT = ("model", "measure", "why_not")  # columns that are no places
KINDS = {kind.__name__: kind for kind in (Bound, Texts, Pictures, NetworkSpeed, Downstream, Curve)}
DRAWN_BY_HAND = {"figure-2": "masked against partition models", "figure-3": "the Partition Transformer"}


def table(name: str) -> Table:
    if name in DRAWN_BY_HAND:
        raise ValueError(f"{name} is a drawing ({DRAWN_BY_HAND[name]}): there is nothing to measure")
    check_name("table", name, TABLES)
    return TABLES[name]


def _rows(name: str, kind: type[Any]) -> Iterator[tuple[Work, dict[str, Any]]]:
    """The work of each row of a CSV, and its other columns."""
    for row in read(name):
        given = {field.name: row.pop(field.name, None) for field in fields(kind)}
        yield kind(**{name: one for name, one in given.items() if one is not None}), row


def _lines(name: str, kind: type[Any]) -> tuple[Line, ...]:
    """The lines of a table, place after place of each model."""
    found = []
    for (work, model), group in groupby(_rows(name, kind), key=lambda row: (row[0], row[1]["model"])):
        rows = [row for _, row in group]
        for at in [column for column in rows[0] if column not in ABOUT]:
            for row in rows:
                about = {"measure": row["measure"], "why_not": row.get("why_not") or ""}
                found.append(Line(model=model, work=work, at=value(at), paper=row[at], **about))
    return tuple(found)


def _tables() -> Iterator[Table]:
    known = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
    own = {name: _lines(name, KINDS[about.pop("kind")]) if "kind" in about else () for name, about in known.items()}
    for name, about in known.items():
        others = [(line, words) for other, words in about.pop("of", {}).items() for line in own[other]]
        taken = [line for line, words in others if not any(word in f"{line.model}, {line.measure}" for word in words)]
        yield Table(name=name, lines=(*taken, *own[name]), **about)


TABLES = {found.name: found for found in _tables()}


def _wanted(table: str) -> tuple[Line, ...]:
    """The lines of a table of targets: on one H200, the released code as its timing scripts run it, and our aims.

    The first case of a process has what is compiled for it serve the others, so its start is the slowest.
    """
    rows = [(work, row) for work, row in _rows("targets", NetworkSpeed) if row.pop("table") == table]
    return tuple(Line(work=work, **row) for work, row in rows)


TARGETS, IMAGE_TARGETS = _wanted("targets"), _wanted("images")
BESIDE = _wanted("beside")  # what others reached, and we have no target for; in seconds, where Tab. 9 says milliseconds
