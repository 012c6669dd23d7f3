"""Results as a table for the terminal and as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rich import box
from rich.table import Table as Grid

from maskless.bench.case import Case, DrawCase, SampleCase
from maskless.bench.machine import Machine, Timing
from maskless.bench.tables import PAPER, RELEASED, SPEEDS, better, case_of, figure, find, part_of, rival_of, speed
from maskless.paper import MEMORY, SAMPLE, Line, Table

AXES = {"steps": "K", "length": "L", "batch": "batch"}
HARDWARE = {RELEASED: "released\n(H200)", PAPER: "paper\n(A100)"}
NONE = "-"


def as_json(machine: Machine, results: list[Timing], table: Table | None = None) -> dict[str, Any]:
    """Everything that was measured so far, beside what others reached."""
    found: dict[str, Any] = {"machine": dataclasses.asdict(machine), "results": [_with_figures(r) for r in results]}
    if table is not None:
        rows = [_row(line, results) for line in table.lines if find(line, results) is not None]
        found["table"] = {"name": table.name, "about": table.about, "rows": rows}
    return found


def grid(machine: Machine, results: list[Timing]) -> Grid:
    """One line for each result; what is the same in all stands in the title."""
    samples = results[0].part == SAMPLE
    varying = [axis for axis in AXES if len({getattr(r.case, axis, None) for r in results}) > 1]
    fixed = [f"{AXES[a]} {v}" for a in AXES if a not in varying and (v := getattr(results[0].case, a, None))]
    rivals = list(dict.fromkeys(r.case.model for r in results if r.case.model != results[0].case.model))
    others = [by for by in (RELEASED, PAPER) if any(speed(by, r.case, r.part) for r in results)]

    def rate(r: Timing) -> float:
        return r.tokens_per_second if samples else r.sequences_per_second

    def at(axis: str, r: Timing) -> str:
        return str(getattr(r.case, axis, NONE))

    def times(rival: str, r: Timing) -> str:
        same = _doing_the_same(r, rival, results)
        return NONE if same is None else f"{same.seconds / r.seconds:.2f}"

    def other(by: str, r: Timing) -> str:
        found = speed(by, r.case, r.part)
        return NONE if found is None else brief(found.tokens_per_second if samples else found.value)

    columns: dict[str, Callable[[Timing], str]] = {
        **{AXES[axis]: partial(at, axis) for axis in varying},
        "seconds": lambda r: brief(r.seconds),
        "min to max": lambda r: _span([min(r.times), max(r.times)]),
        "tokens/s" if samples else "sequences/s": lambda r: f"[bold]{brief(rate(r))}[/]",
        **({} if samples else {"tokens/s": lambda r: brief(r.tokens_per_second)}),
        **{f"x {rival}": partial(times, rival) for rival in rivals},
        **{HARDWARE[by]: partial(other, by) for by in others},
        "limit\n(reached)": lambda r: f"{brief(rate(r) * r.seconds / r.limit)} ({percent(r.of_limit)})",
        "TFLOP/s\n(of ceiling)": lambda r: f"{brief(r.achieved / 1e12)} ({percent(r.achieved / machine.product)})",
        "memory\nGiB": lambda r: brief(r.memory / 2**30),
        "start-up\nseconds": lambda r: NONE if r.start_up is None else brief(r.start_up),
    }
    named = ("model",) if samples else ("model", "part")
    shown = _empty(", ".join(["sampling" if samples else "training", *fixed]), machine, results, named, columns)
    for r in results:
        shown.add_row(*(r.case.name, r.part)[: len(named)], *(cell(r) for cell in columns.values()))
    return shown


def grid_of(table: Table, machine: Machine, results: list[Timing]) -> Grid:
    """One line for each row of a named table: others, what we want, and ours."""
    rows = [_row(line, results) for line in table.lines]
    used = {key: column for key, column in COLUMNS.items() if any(row[key] is not None for row in rows)}
    titles = [title for title, _ in used.values()]
    shown = _empty(f"{table.name}: {table.about}", machine, results, ("model", "case", "measure"), titles)
    for row in rows:
        cells = (NONE if row[key] is None else show(row[key]) for key, (_, show) in used.items())
        shown.add_row(row["model"], row["at"], row["unit"], *cells)
    return shown


def _empty(title: str, machine: Machine, results: list[Timing], named: Iterable[str], numbers: Iterable[str]) -> Grid:
    """A table without rows, with notes below."""
    notes = "\n".join([about(machine), *_notes(machine, results)])
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1), "collapse_padding": True, "pad_edge": False}
    shown = Grid(title=title, caption=notes, title_justify="left", caption_justify="left", **look)
    for column in named:
        shown.add_column(column)
    for column in numbers:
        shown.add_column(column, justify="right")
    return shown


def about(machine: Machine) -> str:
    """The machine and its ceilings in a line."""
    threads = f", {machine.threads} thread{'s' * (machine.threads > 1)}" if machine.device == "cpu" else ""
    return (
        f"{machine.name}{threads}, torch {machine.torch}, {machine.precision}; ceilings measured in this run: "
        f"{brief(machine.product / 1e12)} TFLOP/s (matrix product), {brief(machine.copy / 1e9)} GB/s (copy)"
    )


def brief(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Two digits, or all of those before the point."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def setting(case: Case) -> str:
    """K=128, L=1024, batch 32, guidance 2"""
    steps = [f"K={case.steps}"] if isinstance(case, SampleCase) else []
    guidance = [f"guidance {case.guidance:g}"] if isinstance(case, DrawCase) else []
    return ", ".join([*steps, f"L={case.length}", f"batch {case.batch}", *guidance])


def _notes(machine: Machine, results: list[Timing]) -> list[str]:
    notes = ["limit: counted operations at the first ceiling or counted bytes at the second, whichever takes longer"]
    memory = dict.fromkeys(r.case.name for r in results if r.bound == "memory")
    if memory:
        notes.append(f"bound by bytes: {', '.join(memory)}")
    shares = [r.flops / r.flops_everywhere for r in results if r.flops_everywhere is not None]
    if shares:
        share = " to ".join(dict.fromkeys([percent(min(shares)), percent(max(shares))]))
        notes.append(
            f"MDLM's limit has the head at the decided positions; at all, as released, it would be {share} of it"
        )
    if machine.device == "cpu":
        notes.append("memory: the most that the whole process held")
    return notes


def _doing_the_same(result: Timing, model: str, results: list[Timing]) -> Timing | None:
    """The one result of another model in the same setting. A causal network has its own number of steps."""

    def at(r: Timing) -> tuple[object, ...]:
        steps = getattr(r.case, "steps", None) if "ar" not in (result.case.model, model) else None
        return r.part, r.case.length, r.case.batch, r.case.vocab, steps, getattr(r.case, "guidance", None)

    same = [r for r in results if r.case.model == model and at(r) == at(result)]
    return same[0] if len(same) == 1 else None


def _with_figures(result: Timing) -> dict[str, Any]:
    found = {}
    for by in (PAPER, RELEASED):
        figures = (figure(by, result.case, result.part, measure) for measure in (*SPEEDS, MEMORY))
        found[by] = [{"value": one.value, "unit": one.measure, "source": one.source} for one in figures if one]
    return result.as_dict() | found


def _row(line: Line, results: list[Timing]) -> dict[str, Any]:
    """What a line of a named table shows."""
    result, measure, case, part = find(line, results), line.measure, case_of(line.work, line.at), part_of(line)
    assert result is not None, f"not measured: {line}"
    paper, released = (figure(by, case, part, measure) for by in (PAPER, RELEASED))
    ours, rival, timed = result.read(measure), rival_of(line), measure in SPEEDS
    our_rival = _doing_the_same(result, case.rival, results) if case.model != case.rival else None
    reached = None
    if line.at_least is not None and line.aim is not None:
        passed = [better(measure, ours, wanted) >= 1 for wanted in (line.at_least, line.aim)]
        reached = "aim" if passed[1] else "at least" if passed[0] else "no"
    spread = sorted(dataclasses.replace(result, times=(t,)).read(measure) for t in result.times) if timed else None
    return {
        "model": case.name,
        "at": ", ".join([*([] if part == SAMPLE else [part]), setting(case)]),
        "unit": measure,
        "paper": paper and paper.value,
        "released": released and released.value,
        "released_rival": rival and rival.value,
        "at_least": line.at_least,
        "aim": line.aim,
        "ours": ours,
        "spread": spread and [spread[0], spread[-1]],
        "times_paper": paper and better(measure, ours, paper.value),
        "times_released": released and better(measure, ours, released.value),
        "times_our_rival": better(measure, ours, our_rival.read(measure)) if our_rival and timed else None,
        "share_of_limit": result.of_limit if timed else None,
        "reached": reached,
        "sources": {by: one.source for by, one in ((PAPER, paper), (RELEASED, released)) if one is not None},
    }


def _span(ends: list[float]) -> str:
    return f"{brief(ends[0])} to {brief(ends[1])}"


REACHED = {"aim": "[green]aim[/]", "at least": "[yellow]at least[/]", "no": "[red]no[/]"}
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # of a named table: title, and how a value is shown
    "paper": (HARDWARE[PAPER], brief),
    "released": (HARDWARE[RELEASED], brief),
    "released_rival": ("its\nrival", brief),
    "at_least": ("at\nleast", brief),
    "aim": ("aim", brief),
    "ours": ("ours", lambda value: f"[bold]{brief(value)}[/]"),
    "spread": ("min to max", _span),
    "times_paper": ("x\npaper", "{:.2f}".format),
    "times_released": ("x\nreleased", "{:.2f}".format),
    "times_our_rival": ("x our\nrival", "{:.2f}".format),
    "share_of_limit": ("of\nlimit", percent),
    "reached": ("reached", REACHED.__getitem__),
}
