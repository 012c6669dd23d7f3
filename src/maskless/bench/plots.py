"""Results as pictures: throughput against steps, length and batch, and quality against throughput."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from maskless.bench.case import Case
from maskless.bench.machine import Timing
from maskless.bench.report import AXES, HARDWARE
from maskless.bench.tables import PAPER, RELEASED, speed
from maskless.evaluate.sweep import Draw, draw_panels, numbered_line
from maskless.paper import BACKWARD, SAMPLE

LABELS = {"steps": "steps K", "length": "length L (tokens)", "batch": "batch (sequences)"}
MARKS = {RELEASED: "*", PAPER: "x"}


@dataclass(frozen=True)
class QualityPoint:
    """How good the samples of a model are at some steps."""

    model: str  # pgm, mdlm, ar, or a name as the table shows it
    steps: int
    quality: float
    name: str  # of the measure


def read_quality(path: Path) -> list[QualityPoint]:
    """The entries of a JSON file: a list of {"model", "steps", "quality", "name"}."""
    expected = f'{path}: expected a list of {{"model": "pgm", "steps": 128, "quality": 22.6, "name": "Gen-PPL"}}'
    try:
        entries = [QualityPoint(**entry) for entry in json.loads(path.read_text())]
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise ValueError(f"{expected}; {error}") from None
    for entry in entries:
        if not isinstance(entry.quality, int | float) or not entry.quality > 0:
            raise ValueError(f"{path}: quality {entry.quality!r} of {entry.model}: expected a number above 0")
    if not entries:
        raise ValueError(f"{expected}; it is empty")
    return entries


def check(cases: list[Case], qualities: list[QualityPoint]) -> None:
    """Raise a ValueError, before anything is measured, where there would be nothing to draw."""
    if not qualities and not swept(cases):
        raise ValueError("nothing to plot: expected a list for steps, length or batch (32,64,128), or --quality")
    for entry in qualities:
        names = dict.fromkeys(case.name for case in cases if _fits(entry, case))
        if not names:
            known = dict.fromkeys(f"{case.name} at {case.steps} steps" for case in cases if hasattr(case, "steps"))
            raise ValueError(
                f"quality of {entry.model!r} at {entry.steps} steps: that is not measured, but {', '.join(known)}"
            )
        if len(names) > 1:
            raise ValueError(f"quality of {entry.model!r} fits several models: expected one of {', '.join(names)}")


def swept(cases: list[Case]) -> list[str]:
    """The axes along which some series has at least two points."""
    found = []
    for axis in AXES:
        series = defaultdict(set)
        for case in cases:
            series[_series(case, axis)].add(getattr(case, axis, None))
        if any(len(points) > 1 for points in series.values()):
            found.append(axis)
    return found


def plot(results: list[Timing], path: Path, qualities: list[QualityPoint]) -> None:
    """A PNG with a panel for each swept axis, and one of quality against throughput."""
    results = [r for r in results if r.part in (SAMPLE, BACKWARD)]
    colours: dict[str, str] = {}  # of labels: the same in all panels
    draws: list[Draw] = [
        partial(_throughput, results=results, axis=axis, colours=colours) for axis in swept([r.case for r in results])
    ]
    if qualities:
        draws.append(partial(_pareto, results=results, qualities=qualities, colours=colours))
    below = {"fontsize": 8, "ncol": 2, "loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}
    machine, what = results[0].machine, "sampling" if results[0].part == SAMPLE else "training, forward + backward"
    title = f"{what}, {machine.name}, {machine.precision}"
    draw_panels(path, draws, height=4.8, title=title, legend=below)


def _throughput(panel: Any, results: list[Timing], axis: str, colours: dict[str, str]) -> None:
    """Tokens per second against an axis: the median, its spread, the limit (dashed), and what others reached.

    A series of one point is left out, but for a causal network, which has only one number of steps.
    """
    series: dict[object, list[Timing]] = defaultdict(list)
    for r in results:
        series[_series(r.case, axis)].append(r)
    lines = [points for points in series.values() if len(points) > 1 or points[0].case.model == "ar"]
    results = [r for points in lines for r in points]
    for points, label in zip(lines, _labels([points[0].case for points in lines], axis), strict=True):
        points.sort(key=lambda r: getattr(r.case, axis))
        x, colour = [getattr(r.case, axis) for r in points], _colour(label, colours)
        spans = [(r.seconds, max(r.times), min(r.times), r.limit) for r in points]
        rates = ([r.case.batch * r.case.length / s for s in span] for r, span in zip(points, spans, strict=True))
        median, low, high, limit = zip(*rates, strict=True)
        panel.plot(x, median, "o-", color=colour, ms=4, label=label)
        panel.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        panel.plot(x, limit, "_--" if len(x) == 1 else "--", color=colour, lw=0.8)
        for by, mark in MARKS.items():
            others = [(at, one) for at, r in zip(x, points, strict=True) if (one := speed(by, r.case, r.part))]
            panel.plot([at for at, _ in others], [one.tokens_per_second for _, one in others], mark, color=colour, ms=7)
    panel.plot([], [], "k--", lw=0.8, label="computed limit")
    for by, mark in MARKS.items():
        if any(speed(by, r.case, r.part) for r in results):
            panel.plot([], [], mark, color="k", ms=7, ls="", label=HARDWARE[by].replace("\n", " "))
    ticks = sorted({getattr(r.case, axis) for r in results})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ticks, [str(x) for x in ticks])
    panel.set_title(_same([r.case for r in results], axis), fontsize=9)
    panel.set_xlabel(LABELS[axis])
    panel.set_ylabel("tokens per second")
    _plain_ticks(panel, panel.yaxis)


def _pareto(panel: Any, results: list[Timing], qualities: list[QualityPoint], colours: dict[str, str]) -> None:
    """Quality against tokens per second, a line for each model, with the steps at the points."""
    series: dict[object, list[tuple[Timing, QualityPoint]]] = defaultdict(list)
    for entry in qualities:
        for r in results:
            if _fits(entry, r.case):
                series[_series(r.case, "steps")].append((r, entry))
    drawn = [r.case for points in series.values() for r, _ in points]
    labels = _labels([points[0][0].case for points in series.values()], "steps")
    for points, label in zip(series.values(), labels, strict=True):
        line = sorted(((r.tokens_per_second, entry.quality, entry.steps) for r, entry in points), key=lambda p: p[2])
        numbered_line(panel, line, color=_colour(label, colours), label=label)
    panel.set_xscale("log")
    panel.set_title(_same(drawn, "steps"), fontsize=9)
    panel.set_xlabel("tokens per second (numbers: steps K)")
    panel.set_ylabel(" / ".join(dict.fromkeys(entry.name for entry in qualities)))
    _plain_ticks(panel, panel.xaxis)


def _colour(label: str, colours: dict[str, str]) -> str:
    return colours.setdefault(label, f"C{len(colours)}")


def _plain_ticks(panel: Any, axis: Any) -> None:
    """1, 2, 5, 10, ... written out, thousands apart."""
    from matplotlib.ticker import LogLocator

    panel.minorticks_off()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}")


def _same(cases: list[Case], axis: str) -> str:
    """What all lines of a panel have in common."""
    found = {a: {_value(case, a) for case in cases if case.model != "ar" or a != "steps"} for a in AXES if a != axis}
    return ", ".join(
        f"{AXES[a]} {values.pop()}" for a, values in found.items() if len(values) == 1 and None not in values
    )


def _series(case: Case, axis: str) -> tuple[object, ...]:
    """What the points of one line have in common. A causal network's steps follow from the length."""
    left_out = {axis, "steps"} if case.model == "ar" else {axis}
    fields = dataclasses.asdict(case)
    return type(case), *(value for name, value in fields.items() if name not in left_out)


def _labels(cases: list[Case], axis: str) -> list[str]:
    """The name of each line, with what else tells it from the others."""
    others = [a for a in AXES if a != axis and len({getattr(c, a, None) for c in cases if c.model != "ar"}) > 1]
    return [", ".join([case.name, *(f"{AXES[a]} {_value(case, a)}" for a in others)]) for case in cases]


def _value(case: Case, axis: str) -> object:
    return "= L" if (case.model, axis) == ("ar", "steps") else getattr(case, axis, None)


def _fits(entry: QualityPoint, case: Case) -> bool:
    return entry.model in (case.model, case.name) and entry.steps == getattr(case, "steps", None)
