"""Named sets of cases: the paper's tables of speed, and the targets that we set ourselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from maskless.bench.case import Case, Drawing, Sampling, one_of
from maskless.bench.figures import (
    FIGURES,
    IMAGES,
    MASKGIT,
    MASKGIT_FP32,
    MDLM,
    MEMORY,
    PAPER,
    PGM_6_6_1024,
    PGM_8_8,
    PGM_12_12,
    RELEASED,
    SECONDS,
    SEQUENCES,
    START_UP,
    TOKENS,
    TRAIN_MDLM,
    TRAIN_PGM_6_6,
    TRAIN_PGM_6_6_1024,
    TRAIN_PGM_8_8,
    Figure,
    Measure,
    figure,
)
from maskless.bench.result import BACKWARD, SAMPLE, Result


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number to measure, with what others reached and what we want."""

    case: Case
    part: str
    measure: Measure
    rival: Case | None = None  # whose released figure stands beside
    at_least: float | None = None
    aim: float | None = None

    def others(self, by: str) -> Figure | None:
        return figure(by, self.case, self.part, self.measure)

    @property
    def released_rival(self) -> Figure | None:
        return None if self.rival is None else figure(RELEASED, self.rival, self.part, self.measure)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a name."""

    name: str
    about: str
    rows: tuple[Row, ...]

    @property
    def cases(self) -> list[Case]:
        return list(dict.fromkeys(row.case for row in self.rows))

    def of(self, kind: type[Case]) -> Table:
        """The rows that sample, or those that train."""
        return replace(self, rows=tuple(row for row in self.rows if isinstance(row.case, kind)))

    def only(self, steps: list[int]) -> Table:
        """The rows with these numbers of steps."""
        rows = tuple(row for row in self.rows if isinstance(row.case, Sampling) and row.case.steps in steps)
        known = sorted({row.case.steps for row in self.rows if isinstance(row.case, Sampling)})
        if not rows:
            given = ", ".join(map(str, steps))
            raise ValueError(f"steps {given} are not in the table {self.name!r}: it has {', '.join(map(str, known))}")
        return replace(self, rows=rows)


def table(name: str, kind: type[Case]) -> Table:
    """The rows of a named table that sample, or those that train."""
    one_of("table", name, TABLES)
    found = TABLES[name].of(kind)
    if not found.rows:
        fitting = ", ".join(each.name for each in TABLES.values() if each.of(kind).rows)
        work = "sample" if kind is Sampling else "train"
        raise ValueError(f"table {name!r} has nothing to {work}: expected one of {fitting}")
    return found


def find(row: Row, results: list[Result]) -> Result | None:
    """The result that a row reads; precision apart, which follows from the machine."""
    same = (r for r in results if r.part == row.part and replace(r.case, precision=row.case.precision) == row.case)
    return next(same, None)


def _paper(name: str, about: str, number: str) -> Table:
    figures = [one for one in FIGURES if one.by == PAPER and one.source.startswith(f"PGM, Tab. {number},")]
    rows = (Row(case=one.case, part=one.part, measure=one.measure) for one in figures)
    return Table(name=name, about=f"PGM, Tab. {number}: {about}", rows=tuple(rows))


def _sampling(case: Sampling, measure: Measure, at_least: float, aim: float) -> Row:
    rival = replace(MDLM, steps=case.steps, batch=case.batch) if case.context == "full" else None
    return Row(case=case, part=SAMPLE, measure=measure, rival=rival, at_least=at_least, aim=aim)


def _training(case: Case, measure: Measure, at_least: float, aim: float) -> Row:
    return Row(case=case, part=BACKWARD, measure=measure, rival=TRAIN_MDLM, at_least=at_least, aim=aim)


def _drawing(case: Drawing, measure: Measure, at_least: float | None = None, aim: float | None = None) -> Row:
    rival = replace(MASKGIT, steps=case.steps, batch=case.batch) if case.model == "pgm" else None
    return Row(case=case, part=SAMPLE, measure=measure, rival=rival, at_least=at_least, aim=aim)


def _images() -> Table:
    slow = next(one.value for one in FIGURES if one.case == MASKGIT_FP32)
    ordered = replace(PGM_12_12, context="ordered")
    return Table(
        name="images",
        about=f"what we want to reach in drawing (released MaskGIT in fp32, the paper's rival: {slow} images/s)",
        rows=(
            _drawing(PGM_12_12, IMAGES, 40, 60),
            _drawing(ordered, IMAGES, 120, 250),
            _drawing(MASKGIT, IMAGES),
            _drawing(replace(PGM_12_12, batch=1), SECONDS, 0.15, 0.08),
            _drawing(replace(ordered, batch=1), SECONDS),
            _drawing(replace(MASKGIT, batch=1), SECONDS),
        ),
    )


_ORDERED = replace(PGM_8_8, context="ordered")
_TARGETS = (
    # The first case of a process: what is compiled for it serves the others, so its start is the slowest.
    _sampling(PGM_8_8, START_UP, 10, 3),
    _sampling(PGM_8_8, TOKENS, 40_000, 56_000),
    _sampling(replace(PGM_8_8, steps=32), TOKENS, 140_000, 200_000),
    _sampling(PGM_6_6_1024, TOKENS, 30_000, 42_000),
    _sampling(_ORDERED, TOKENS, 250_000, 600_000),
    _sampling(replace(_ORDERED, steps=32), TOKENS, 500_000, 1_200_000),
    _sampling(replace(_ORDERED, batch=1), SECONDS, 0.10, 0.04),
    _sampling(replace(PGM_8_8, batch=1), SECONDS, 0.25, 0.12),
)
_TRAINING_TARGETS = (
    _training(TRAIN_PGM_6_6, SEQUENCES, 480, 600),
    _training(TRAIN_PGM_6_6, MEMORY, 16, 10),
    _training(TRAIN_PGM_8_8, SEQUENCES, 400, 500),
    _training(TRAIN_PGM_6_6_1024, SEQUENCES, 350, 430),
)
TABLES = {
    table.name: table
    for table in (
        _paper("paper-sampling", "throughput of sampling, length 1024, batch 32", "6"),
        _paper("paper-context-4096", "throughput of sampling, length 4096, batch 32", "10"),
        _paper("paper-training", "a forward pass, and a forward and backward pass", "3"),
        _images(),
        Table(name="targets", about="what we want to reach on one H200", rows=_TARGETS + _TRAINING_TARGETS),
    )
}
