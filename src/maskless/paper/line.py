"""What a number of the paper is: of which network, made by what, and what it measures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
