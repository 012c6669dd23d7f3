"""What a table takes at a scale: commands to run, one after another, and entries that are read off what they find.

The scales are the paper's, one GPU for minutes, or a toy for a CPU (scales.toml).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from maskless.bench.case import Case, SampleCase, TrainCase
from maskless.how import check_name
from maskless.paper import Line, Table
from maskless.recipes import Recipe

OPTIONS = {"learning_rate": "lr"}  # of commands, where they are not called as the settings


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """What a recipe's sizes are divided by, and what else replaces its settings."""

    width: int
    layers: int
    steps: int
    more: Mapping[str, Any]

    def __call__(self, recipe: Recipe) -> dict[str, Any]:
        """The settings that are not the recipe's."""
        old = recipe.network | recipe.train
        new = {"width": max(32, old["width"] // self.width), "layers": max(2, old["layers"] // self.layers)}
        if "encoder" in old:
            new["encoder"] = max(1, old["encoder"] // self.layers)
        new |= {"steps": max(1, old["steps"] // self.steps), **self.more}
        return {name: value for name, value in new.items() if old.get(name) != value}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of everything that a table takes; what is empty is as in the paper."""

    name: str
    text: Shrink | None = None
    pictures: Shrink | None = None
    prepare: tuple[str, ...] = ()  # of text
    length: int = 1024
    codec: str | None = None  # of pictures, where none is given; "": one is trained
    pixels: int | None = None  # a side; None: by the codec's recipe
    bound: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    distill: tuple[str, ...] = ("--rounds", "5", "--steps-per-round", "10000", "--batch", "128")
    sizes: Mapping[str, int] = field(default_factory=dict)  # of networks whose speed is measured
    most_steps: int | None = None  # of sampling, where only speed is measured
    repeat: int = 5

    @property
    def is_paper(self) -> bool:
        return self.text is None

    def settings(self, recipe: Recipe) -> dict[str, Any]:
        """What replaces a recipe's settings."""
        shrink = self.pictures if recipe.measure else self.text
        return {} if shrink is None else shrink(recipe)

    def made(self, recipe: Recipe) -> dict[str, Any]:
        """All settings of a recipe at this scale."""
        return recipe.network | recipe.train | self.settings(recipe)

    def case(self, case: Case) -> Case:
        """The sizes of a network whose speed is measured."""
        if not self.sizes:
            return case
        sizes: dict[str, Any] = {"encoder": None, **self.sizes}
        small = replace(case, **sizes)
        return replace(small, steps=1) if isinstance(small, SampleCase) else small

    def steps(self, K: int, length: int, most: int) -> int:
        """As many tokens in a step as in the paper: of 1,024 steps for 1,024 tokens, 256 for 256."""
        return max(1, min(most, K * length // 1024))


def _scales() -> Iterator[Scale]:
    for name, given in tomllib.loads(Path(__file__).with_name("scales.toml").read_text(encoding="utf-8")).items():
        fields: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
        fields |= {data: Shrink(**given[data]) for data in ("text", "pictures") if data in given}
        yield Scale(name=name, **fields)


SCALES = {scale.name: scale for scale in _scales()}


def scale(name: str) -> Scale:
    check_name("scale", name, SCALES)
    return SCALES[name]


class MissingError(ValueError):
    """What stands in the way of a row."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asked for."""

    scale: Scale
    out: Path
    text: str | None = None
    pictures: str | None = None
    judge: str | None = None
    features: tuple[str, ...] = ()  # options that name a feature network
    codec: str | None = None
    processes: int = 1


@dataclass(frozen=True)
class Cost:
    """What a training or a distillation works through: a case to measure, and how often."""

    case: TrainCase
    sequences: int
    passes: int = 0  # forward passes of a teacher for each step


@dataclass(frozen=True)
class TableJob:
    """A command, and what must be done before it."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    makes: Path | None = None  # a file that appears last, so that nothing is to do where it stands
    program: tuple[str, ...] = ("maskless",)
    cost: Cost | None = None  # of a full-size training or distillation

    @property
    def resumes(self) -> Path | None:
        """The folder that it resumes, where it can."""
        return Path(self.words[self.words.index("--out") + 1]) if "--resume" in self.words else None

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.program, *self.words)


@dataclass(frozen=True)
class TableEntry:
    """A line of a table with the job that answers it and, once that is done, our value; or why there is none."""

    line: Line
    job: str | None = None
    at: int | str | None = None  # of ours
    differs: str = ""
    why_not: str = ""
    value: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class TablePlan:
    """What a table takes."""

    table: Table
    options: Options
    jobs: dict[str, TableJob]
    entries: list[TableEntry]

    @property
    def costs(self) -> dict[str, Cost]:
        return {name: job.cost for name, job in self.jobs.items() if job.cost is not None}
