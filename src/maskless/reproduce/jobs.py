"""What a table takes: commands to run, one after another, and entries that are read off what they find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maskless.bench.case import TrainCase
from maskless.paper.line import Line, Table
from maskless.reproduce.scale import Scale


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
