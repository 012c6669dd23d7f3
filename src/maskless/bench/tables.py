"""Named sets of cases, and what others reached in them: the paper's tables of speed, and the targets that we set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from maskless import paper
from maskless.bench.case import Case, DrawCase, SampleCase, TrainCase
from maskless.bench.machine import Timing
from maskless.how import check_name

PAPER, RELEASED = "paper", "released"
TESTED = "released code (github.com/jdeschena/pgm) as its timing scripts run it, one H200, torch 2.11, our measurement"
A100, PIXELS = "one A100-SXM4-80GB", "pixels included"
SPEEDS = (paper.TOKENS, paper.SECONDS, paper.SEQUENCES, paper.IMAGES)
HIGHER_IS_BETTER = (paper.TOKENS, paper.SEQUENCES, paper.IMAGES)


@dataclass(frozen=True)
class Figure:
    """What somebody reached in a case."""

    case: Case
    measure: str
    value: float
    source: str

    @property
    def tokens_per_second(self) -> float:
        tokens = self.case.batch * self.case.length
        if self.measure == paper.SECONDS:
            return tokens / self.value
        return self.value if self.measure == paper.TOKENS else self.value * self.case.length


def case_of(work: paper.Work, at: int | str | None) -> Case:
    """The network and the batch whose speed a line of the paper gives."""
    assert isinstance(work, paper.Texts | paper.Pictures | paper.NetworkSpeed), f"{work} has no speed"
    data, network = paper.set_and_network(work.recipe)
    (model, sizes), (_, vocab, length) = paper.NETWORKS[network], paper.DATASETS[data]
    whole: dict[str, Any] = {"model": model, **sizes, "vocab": vocab, "length": length, "steps": at}
    if isinstance(work, paper.Texts):
        return SampleCase(**whole, counts=work.counts)
    if isinstance(work, paper.Pictures):
        return DrawCase(**whole | {"steps": work.steps, "guidance": at})
    own = ("context", "length", "batch", "guidance", "precision")
    whole |= {name: value for name in own if (value := getattr(work, name)) is not None}
    if work.trains:
        del whole["steps"]
        return TrainCase(**whole)
    if data == "imagenet":
        return DrawCase(**whole)
    return SampleCase(**whole, counts="mdlm" if model == "mdlm" else "uniform")


def part_of(line: paper.Line) -> str:
    """What of a case is timed."""
    return line.at if isinstance(line.at, str) else paper.SAMPLE


def rival_of(line: paper.Line) -> Figure | None:
    """What the released masked model reached beside a target of PGM; the paper's tables have lines of both."""
    if line.paper is not None or not isinstance(line.work, paper.NetworkSpeed) or "pgm" not in line.work.recipe:
        return None
    draws = line.work.recipe.startswith("imagenet")
    if line.work.context == "ordered" and not draws:
        return None
    rival = replace(line.work, recipe="imagenet-maskgit" if draws else "owt-mdlm", context=None)
    return figure(RELEASED, case_of(rival, line.at), part_of(line), line.measure)


def better(measure: str, ours: float, theirs: float) -> float:
    """How many times as good as theirs ours is."""
    return ours / theirs if measure in HIGHER_IS_BETTER else theirs / ours


def figure(by: str, case: Case, part: str, *measures: str) -> Figure | None:
    """What somebody reached in this case, in the first of these measures that there is a figure for.

    Figures are in bf16, and of MDLM with its own counts, which do not change what it costs.
    """
    case = replace(case, precision="bf16")
    if isinstance(case, SampleCase) and case.model == "mdlm":
        case = replace(case, counts="mdlm")
    found = (FIGURES.get((by, case, part, measure)) for measure in measures)
    return next((one for one in found if one is not None), None)


def speed(by: str, case: Case, part: str) -> Figure | None:
    """How fast somebody was in this case."""
    return figure(by, case, part, *SPEEDS)


def _known() -> Iterator[tuple[str, paper.Line, float | None, str]]:
    """Who reached what, and where it stands."""
    for number, note in (("3", A100), ("6", A100), ("9", PIXELS), ("10", A100)):
        for line in paper.TABLES[f"table-{number}"].lines:
            if line.measure in SPEEDS:
                yield PAPER, line, line.paper, f"PGM, Tab. {number}, {note}"
    for line in (*paper.TARGETS, *paper.IMAGE_TARGETS, *paper.BESIDE):
        yield PAPER, line, line.paper, f"PGM, Tab. 9, {PIXELS}"
        draws = "imagenet" in line.work.recipe
        yield RELEASED, line, line.released, f"{TESTED}, without the pixels" if draws else TESTED


FIGURES = {
    (by, case, part_of(line), line.measure): Figure(case, line.measure, value, source)
    for by, line, value, source in _known()
    for case in [case_of(line.work, line.at)]
    if value is not None
}


def cases_of(table: paper.Table) -> list[Case]:
    return list(dict.fromkeys(case_of(line.work, line.at) for line in table.lines))


def only(table: paper.Table, kind: type[Case], steps: list[int] | None = None) -> paper.Table:
    """The lines that sample, or those that train; of sampling those with these numbers of steps."""
    lines = [line for line in table.lines if (part_of(line) == paper.SAMPLE) == (kind is SampleCase)]
    kept = tuple(line for line in lines if steps is None or line.at in steps)
    if lines and not kept:
        known = sorted({line.at for line in lines if isinstance(line.at, int)})
        given, has = (", ".join(map(str, numbers)) for numbers in (steps or (), known))
        raise ValueError(f"steps {given} are not in the table {table.name!r}: it has {has}")
    return replace(table, lines=kept)


def table(name: str, kind: type[Case], steps: list[int] | None = None) -> paper.Table:
    """The lines of a named table that sample, or those that train."""
    check_name("table", name, TABLES)
    found = only(TABLES[name], kind, steps)
    if not found.lines:
        fitting = ", ".join(each.name for each in TABLES.values() if only(each, kind).lines)
        work = "sample" if kind is SampleCase else "train"
        raise ValueError(f"table {name!r} has nothing to {work}: expected one of {fitting}")
    return found


def find(line: paper.Line, timings: list[Timing]) -> Timing | None:
    """The timing that a line reads; precision apart, which follows from the machine."""
    case, part = case_of(line.work, line.at), part_of(line)
    same = (t for t in timings if t.part == part and replace(t.case, precision=case.precision) == case)
    return next(same, None)


def _tables() -> Iterator[paper.Table]:
    for name, about, number in (
        ("paper-sampling", "throughput of sampling, length 1024, batch 32", "6"),
        ("paper-context-4096", "throughput of sampling, length 4096, batch 32", "10"),
        ("paper-training", "a forward pass, and a forward and backward pass", "3"),
    ):
        lines = tuple(line for line in paper.TABLES[f"table-{number}"].lines if line.measure in SPEEDS)
        yield paper.Table(name=name, about=f"PGM, Tab. {number}: {about}", lines=lines)
    rival = FIGURES[RELEASED, DrawCase(model="maskgit", precision="fp32"), paper.SAMPLE, paper.IMAGES]  # of PGM in bf16
    slow = f"released MaskGIT in fp32, the paper's rival: {rival.value} images/s"
    yield paper.Table(name="images", about=f"what we want to reach in drawing ({slow})", lines=paper.IMAGE_TARGETS)
    yield paper.Table(name="targets", about="what we want to reach on one H200", lines=paper.TARGETS)


TABLES = {each.name: each for each in _tables()}
