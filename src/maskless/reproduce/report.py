"""A table as CSV, Markdown and PNG: the paper's value, ours, and what differs, side by side."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from maskless import order, pictures
from maskless.evaluate.sweep import draw_panels, numbered_line
from maskless.files import write_aside
from maskless.paper import ENTROPY, FID, GEN_PPL, IMAGES, TOKENS, Bound, Curve, Pictures
from maskless.reproduce.jobs import TableEntry, TablePlan
from maskless.reproduce.run import metrics
from maskless.train.report import plot_losses

COLUMNS = ("model", "at", "measure", "paper", "ours", "error", "ours at", "what differs", "note")
Place = tuple[float, float, Any]  # throughput, quality and steps
PAIRS = {FID: IMAGES, GEN_PPL: TOKENS}  # quality, and the speed that it is drawn against
GRID, CELLS, STEPS = (32, 32), 1024, 32  # of the orders


def write(plan: TablePlan, found: list[TableEntry], machines: Iterable[str]) -> list[Path]:
    """NAME.csv, NAME.md and, where there is something to draw, NAME.png."""
    plan.options.out.mkdir(parents=True, exist_ok=True)
    paths = [plan.options.out / f"{plan.table.name}.{kind}" for kind in ("csv", "md", "png")]
    write_aside(paths[0], lambda aside: aside.write_text(_csv(found)))
    write_aside(paths[1], lambda aside: aside.write_text(markdown(plan, found, machines)))
    return paths if DRAWINGS[plan.table.draw](plan, found, paths[2]) else paths[:2]


def markdown(plan: TablePlan, found: list[TableEntry], machines: Iterable[str]) -> str:
    """The table, with numbered notes on what differs and on what is missing."""
    table, notes = plan.table, dict[str, int]()
    lines = [f"# {table.name.replace('-', ' ').capitalize()} of the paper: {table.about}", ""]
    titles = ("model", "at", "measure", "paper", "ours", "ours at", "notes")
    lines += [] if not found else [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for entry in found:
        row = _row(entry)
        said = [note for note in (row["what differs"], row["note"]) if note]
        marks = " ".join(str(notes.setdefault(note, len(notes) + 1)) for note in said)
        ours = _brief(entry.value) + ("" if entry.error is None else f" ± {entry.error:.2g}")
        cells = (row["model"], row["at"], row["measure"], _brief(entry.line.paper), ours, row["ours at"])
        lines.append("| " + " | ".join([*(str(cell) for cell in cells), marks]) + " |")
    where = ", ".join(dict.fromkeys(machine for machine in machines if machine))
    lines += ["", f"Scale {plan.options.scale.name}{f', on {where}' if where else ''}. {table.note}".rstrip(), ""]
    lines += [f"{i}. {note}" for note, i in notes.items()]
    return "\n".join(lines).rstrip() + "\n"


def _row(entry: TableEntry) -> dict[str, Any]:
    line = entry.line
    at = "" if line.at is None else line.at
    where = "" if entry.at in (None, line.at) else entry.at
    values = (line.model, at, line.measure, line.paper, entry.value, entry.error, where, entry.differs)
    return dict(zip(COLUMNS, (*values, entry.why_not), strict=True))


def _csv(found: list[TableEntry]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(entry) for entry in found)
    return text.getvalue()


def _brief(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _losses(plan: TablePlan, found: list[TableEntry], path: Path) -> bool:
    """Losses and perplexities of the runs, against steps and against seconds."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for entry in found:
        if entry.value is not None and entry.job is not None and isinstance(entry.line.work, Bound | Curve):
            job = next((need for need in plan.jobs[entry.job].needs if need.startswith("train-")), entry.job)
            runs.setdefault(entry.line.model, metrics(plan, job))
    if runs:
        plot_losses(runs, path)
    return bool(runs)


def _lines(plan: TablePlan, found: list[TableEntry], path: Path) -> bool:
    """A panel for each measure: ours (solid) and the paper's (dashed) at the same places, a colour for each model."""

    def draw(panel: Any, measure: str) -> None:
        own = [entry for entry in found if entry.line.measure == measure]
        for i, (model, group) in enumerate(groupby(own, key=lambda entry: entry.line.model)):
            at, ours, theirs = zip(*((entry.line.at, entry.value, entry.line.paper) for entry in group), strict=True)
            panel.plot(at, _or_nan(ours), "o-", color=f"C{i % 10}", ms=4, label=model)
            panel.plot(at, _or_nan(theirs), "x--", color=f"C{i % 10}", ms=4, lw=0.8)
        first = own[0].line
        if isinstance(first.at, int) and not isinstance(first.work, Pictures):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
        if measure != ENTROPY:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("")
        panel.tick_params(axis="x", labelrotation=30 if isinstance(first.at, str) else 0)
        panel.set_ylabel(measure)
        what = "guidance w" if isinstance(first.work, Pictures) else "steps of the paper" * isinstance(first.at, int)
        panel.set_xlabel(f"{what} (crosses, dashed: the paper)".strip())

    return _panels(path, found, list(dict.fromkeys(entry.line.measure for entry in found)), draw)


def _quality(plan: TablePlan, found: list[TableEntry], path: Path) -> bool:
    """Quality against throughput, ours (solid) and the paper's (dashed); FID at its best guidance."""
    places: dict[tuple[Any, ...], dict[str, TableEntry]] = {}
    for entry in found:
        places.setdefault((entry.line.model, entry.line.work, entry.line.at), {})[entry.line.measure] = entry

    def series(measure: str, pick: Callable[[TableEntry], float | None]) -> dict[str, dict[Any, Place]]:
        """The line of each model."""
        lines: dict[str, dict[Any, Place]] = {}
        for (model, work, at), pair in places.items():
            x, y = (pick(pair[name]) if name in pair else None for name in (PAIRS[measure], measure))
            if x is None or y is None:
                continue
            if isinstance(work, Pictures):
                model, at = model.split(",")[0], work.steps
            line = lines.setdefault(model, {})
            line[at] = min(line.get(at, (x, y, at)), (x, y, at), key=lambda point: point[1])
        return lines

    def draw(panel: Any, measure: str) -> None:
        colours: dict[str, str] = {}
        for look, more, lines in (
            ("o-", "", series(measure, lambda entry: entry.value)),
            ("x--", ", paper", series(measure, lambda entry: entry.line.paper)),
        ):
            for model, points in lines.items():
                colour = colours.setdefault(model, f"C{len(colours)}")
                numbered_line(panel, list(points.values()), look, color=colour, label=model + more)
        panel.set_xscale("log")
        panel.set_xlabel(f"{PAIRS[measure]} (numbers: the paper's steps)")
        panel.set_ylabel(measure)

    return _panels(path, found, [name for name in PAIRS if any(entry.line.measure == name for entry in found)], draw)


def _orders(plan: TablePlan, found: list[TableEntry], path: Path) -> bool:
    """When each cell of a grid is decided in the Halton order, and in a random one."""
    stage, u = torch.ones(1, CELLS, dtype=torch.long), torch.rand(1, CELLS, generator=torch.Generator().manual_seed(0))
    orders = {"Halton": order.halton(GRID), "random": order.random}
    came = torch.cat([one(stage, u).argsort(1) // (CELLS // STEPS) for one in orders.values()])
    pictures.order_heatmap(came, path, shape=GRID, labels=list(orders))
    return True


def _panels(path: Path, found: list[TableEntry], measures: list[str], draw: Callable[[Any, str], None]) -> bool:
    """A panel for each measure, where there is something to draw."""
    if all(entry.value is None for entry in found):
        return False
    draws = [lambda panel, measure=measure: draw(panel, measure) for measure in measures]
    draw_panels(path, draws, height=5.6, legend={"fontsize": 7})
    return True


def _or_nan(values: Iterable[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


DRAWINGS = {"lines": _lines, "losses": _losses, "quality": _quality, "orders": _orders}
