"""What a number of the paper is: of which network, made by what, and what it measures."""

from __future__ import annotations

import re
from dataclasses import dataclass
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


def _pgm(encoder: int, decoder: int, width: int = 768, **more: Any) -> tuple[str, dict[str, Any]]:
    return "pgm", {"width": width, "layers": encoder + decoder, "encoder": encoder, **more}


# How each is trained, and its sizes. A recipe of the paper is called by its set, its network, and -200k if cut short.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "mdlm": ("mdlm", {"width": 768, "layers": 12}),
    "mdlm-complementary": ("mdlm-complementary", {"width": 768, "layers": 12}),
    "pgm-8-4": _pgm(8, 4),
    "pgm-10-2": _pgm(10, 2),
    "pgm-4-8": _pgm(4, 8),
    "pgm-6-6": _pgm(6, 6),
    "pgm-6-6-logsumexp": _pgm(6, 6, queries="logsumexp"),
    "pgm-6-6-mean": _pgm(6, 6, queries="mean"),
    "pgm-8-8": _pgm(8, 8),
    "pgm-10-6": _pgm(10, 6),
    "pgm-6-6-1024": _pgm(6, 6, width=1024),
    "maskgit": ("maskgit", {"width": 1024, "layers": 24}),
    "pgm-12-12": _pgm(12, 12, width=1024),
    "pgm-14-10": _pgm(14, 10, width=1024),
}


def set_and_network(recipe: str) -> tuple[str, str]:
    """The set and the network: owt-pgm-8-8-200k -> owt, pgm-8-8"""
    data, _, network = recipe.removesuffix("-200k").partition("-")
    return data, network


def title(recipe: str) -> str:
    """owt-pgm-6-6-1024 -> PGM 6/6 1024"""
    model, *more = re.sub(r"(\d+)-(\d+)", r"\1/\2", set_and_network(recipe)[1], count=1).split("-")
    return " ".join([_shown(model), *more])


def sized(model: str, *, width: int, layers: int, encoder: int | None = None) -> str:
    """PGM 8/8 x768, MDLM 12 x768, ..."""
    depth = f"{layers}" if encoder is None else f"{encoder}/{layers - encoder}"
    return f"{_shown(model)} {depth} x{width}"


def _shown(model: str) -> str:
    return "MaskGIT" if model == "maskgit" else model.upper()


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
    weights: str


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
