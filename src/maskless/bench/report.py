"""Results as a table for the terminal and as JSON for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.table import Table as Grid

from maskless.bench.case import Case, Drawing, Sampling
from maskless.bench.figures import MEMORY, PAPER, RELEASED, SPEEDS, Figure, figure, speed
from maskless.bench.machine import Machine
from maskless.bench.result import SAMPLE, Result
from maskless.bench.tables import Row, Table, find

AXES = {"steps": "K", "length": "L", "batch": "batch"}
HARDWARE = {RELEASED: "released\n(H200)", PAPER: "paper\n(A100)"}
NONE = "-"


def as_json(machine: Machine, results: list[Result], table: Table | None = None) -> dict[str, Any]:
    """Everything that was measured so far, beside what others reached."""
    found: dict[str, Any] = {"machine": dataclasses.asdict(machine), "results": [_with_figures(r) for r in results]}
    if table is not None:
        rows = [_row(row, results) for row in table.rows if find(row, results) is not None]
        found["table"] = {"name": table.name, "about": table.about, "rows": rows}
    return found


def grid(machine: Machine, results: list[Result]) -> Grid:
    """One line for each result; what is the same in all stands in the title."""
    samples = results[0].part == SAMPLE
    varying = [axis for axis in AXES if len({getattr(r.case, axis, None) for r in results}) > 1]
    fixed = [f"{AXES[a]} {v}" for a in AXES if a not in varying and (v := getattr(results[0].case, a, None))]
    rivals = list(dict.fromkeys(r.case.model for r in results if r.case.model != results[0].case.model))
    others = {by: [speed(by, r.case, r.part) for r in results] for by in (RELEASED, PAPER)}
    others = {by: column for by, column in others.items() if any(column)}
    unit = "tokens/s" if samples else "sequences/s"
    shown = _empty(", ".join(["sampling" if samples else "training", *fixed]), machine, results)
    for column in ("model", *(() if samples else ("part",))):
        shown.add_column(column)
    for column in (
        *(AXES[axis] for axis in varying),
        "seconds",
        "min to max",
        unit,
        *(() if samples else ("tokens/s",)),
        *(f"x {rival}" for rival in rivals),
        *(HARDWARE[by] for by in others),
        "limit\n(reached)",
        "TFLOP/s\n(of ceiling)",
        "memory\nGiB",
        "start-up\nseconds",
    ):
        shown.add_column(column, justify="right")
    for number, r in enumerate(results):
        each = r.tokens_per_second if samples else r.sequences_per_second
        shown.add_row(
            r.case.name,
            *(() if samples else (r.part,)),
            *(str(getattr(r.case, axis, NONE)) for axis in varying),
            brief(r.seconds),
            f"{brief(min(r.times))} to {brief(max(r.times))}",
            f"[bold]{brief(each)}[/]",
            *(() if samples else (brief(r.tokens_per_second),)),
            *(_times(r, rival, results) for rival in rivals),
            *(_other(column[number], samples) for column in others.values()),
            f"{brief(each * r.seconds / r.limit)} ({percent(r.of_limit)})",
            f"{brief(r.achieved / 1e12)} ({percent(r.achieved / machine.product)})",
            brief(r.memory / 2**30),
            NONE if r.start_up is None else brief(r.start_up),
        )
    return shown


def grid_of(table: Table, machine: Machine, results: list[Result]) -> Grid:
    """One line for each row of a named table: others, what we want, and ours."""
    rows = [_row(row, results) for row in table.rows]
    shown = _empty(f"{table.name}: {table.about}", machine, results)
    for column in ("model", "case", "measure"):
        shown.add_column(column)
    columns = {
        "paper": HARDWARE[PAPER],
        "released": HARDWARE[RELEASED],
        "released_rival": "its\nrival",
        "at_least": "at\nleast",
        "aim": "aim",
        "ours": "ours",
        "spread": "min to max",
        "times_paper": "x\npaper",
        "times_released": "x\nreleased",
        "times_our_rival": "x our\nrival",
        "share_of_limit": "of\nlimit",
        "reached": "reached",
    }
    used = {key: name for key, name in columns.items() if any(row[key] is not None for row in rows)}
    for name in used.values():
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(row["model"], row["at"], row["unit"], *(_cell(key, row[key]) for key in used))
    return shown


def _empty(title: str, machine: Machine, results: list[Result]) -> Grid:
    """A table without columns, with notes below."""
    notes = "\n".join([about(machine), *_notes(machine, results)])
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1), "collapse_padding": True, "pad_edge": False}
    return Grid(title=title, caption=notes, title_justify="left", caption_justify="left", **look)


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
    steps = [f"K={case.steps}"] if isinstance(case, Sampling) else []
    guidance = [f"guidance {case.guidance:g}"] if isinstance(case, Drawing) else []
    return ", ".join([*steps, f"L={case.length}", f"batch {case.batch}", *guidance])


def _notes(machine: Machine, results: list[Result]) -> list[str]:
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


def _times(result: Result, rival: str, results: list[Result]) -> str:
    """How many times as fast as a rival that does the same."""
    other = _doing_the_same(result, rival, results)
    return NONE if other is None else f"{other.seconds / result.seconds:.2f}"


def _other(figure: Figure | None, samples: bool) -> str:
    return NONE if figure is None else brief(figure.tokens_per_second if samples else figure.value)


def _doing_the_same(result: Result, model: str, results: list[Result]) -> Result | None:
    """The one result of another model in the same setting. A causal network has its own number of steps."""

    def at(r: Result) -> tuple[object, ...]:
        steps = getattr(r.case, "steps", None) if "ar" not in (result.case.model, model) else None
        return r.part, r.case.length, r.case.batch, r.case.vocab, steps, getattr(r.case, "guidance", None)

    same = [r for r in results if r.case.model == model and at(r) == at(result)]
    return same[0] if len(same) == 1 else None


def _with_figures(result: Result) -> dict[str, Any]:
    found = {}
    for by in (PAPER, RELEASED):
        figures = (figure(by, result.case, result.part, m) for m in (*SPEEDS, MEMORY))
        found[by] = [{"value": one.value, "unit": one.measure.unit, "source": one.source} for one in figures if one]
    return result.as_dict() | found


def _row(row: Row, results: list[Result]) -> dict[str, Any]:
    """What a row of a named table shows."""
    result, better = find(row, results), row.measure.times_better
    assert result is not None, f"not measured: {row}"
    ours, paper, released, rival = row.measure(result), row.others(PAPER), row.others(RELEASED), row.released_rival
    timed, own = row.measure in SPEEDS, result.case.rival
    our_rival = _doing_the_same(result, own, results) if result.case.model != own else None
    reached = None
    if row.at_least is not None and row.aim is not None:
        reached = "aim" if better(ours, row.aim) >= 1 else "at least" if better(ours, row.at_least) >= 1 else "no"
    spread = sorted(row.measure(dataclasses.replace(result, times=(t,))) for t in result.times) if timed else None
    return {
        "model": row.case.name,
        "at": ", ".join([*([] if row.part == SAMPLE else [row.part]), setting(row.case)]),
        "unit": row.measure.unit,
        "paper": paper and paper.value,
        "released": released and released.value,
        "released_rival": rival and rival.value,
        "at_least": row.at_least,
        "aim": row.aim,
        "ours": ours,
        "spread": spread and [spread[0], spread[-1]],
        "times_paper": paper and better(ours, paper.value),
        "times_released": released and better(ours, released.value),
        "times_our_rival": better(ours, row.measure(our_rival)) if our_rival and timed else None,
        "share_of_limit": result.of_limit if timed else None,
        "reached": reached,
        "sources": {one.by: one.source for one in (paper, released) if one is not None},
    }


def _cell(key: str, value: Any) -> str:
    if value is None:
        return NONE
    if key == "reached":
        return {"aim": "[green]aim[/]", "at least": "[yellow]at least[/]", "no": "[red]no[/]"}[value]
    if key == "spread":
        return f"{brief(value[0])} to {brief(value[1])}"
    if key == "share_of_limit":
        return percent(value)
    return f"{value:.2f}" if key.startswith("times") else f"[bold]{brief(value)}[/]" if key == "ours" else brief(value)
