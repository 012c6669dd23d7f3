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
from maskless.files import write_aside
from maskless.reproduce.plan import Plan
from maskless.reproduce.run import Number, metrics
from maskless.reproduce.tables import ENTROPY, FID, GEN_PPL, IMAGES, TOKENS, Bound, Curve, Pictures
from maskless.train.report import plot_losses

COLUMNS = ("model", "at", "measure", "paper", "ours", "error", "ours at", "what differs", "note")
PAIRS = {FID: IMAGES, GEN_PPL: TOKENS}  # quality, and the speed that it is drawn against
GRID, CELLS, STEPS = (32, 32), 1024, 32  # of the orders


def write(plan: Plan, found: list[Number], machines: Iterable[str]) -> list[Path]:
    """NAME.csv, NAME.md and, where there is something to draw, NAME.png."""
    plan.request.out.mkdir(parents=True, exist_ok=True)
    paths = [plan.request.out / f"{plan.table.name}.{kind}" for kind in ("csv", "md", "png")]
    write_aside(paths[0], lambda aside: aside.write_text(_csv(found)))
    write_aside(paths[1], lambda aside: aside.write_text(markdown(plan, found, machines)))
    return paths if DRAWINGS[plan.table.draw](plan, found, paths[2]) else paths[:2]


def markdown(plan: Plan, found: list[Number], machines: Iterable[str]) -> str:
    """The table, with numbered notes on what differs and on what is missing."""
    table, notes = plan.table, dict[str, int]()
    lines = [f"# {table.name.replace('-', ' ').capitalize()} of the paper: {table.about}", ""]
    titles = ("model", "at", "measure", "paper", "ours", "ours at", "notes")
    lines += [] if not found else [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for number in found:
        row = _row(number)
        said = [note for note in (row["what differs"], row["note"]) if note]
        marks = " ".join(str(notes.setdefault(note, len(notes) + 1)) for note in said)
        ours = _brief(number.value) + ("" if number.error is None else f" ± {number.error:.2g}")
        cells = (row["model"], row["at"], row["measure"], _brief(number.planned.line.paper), ours, row["ours at"])
        lines.append("| " + " | ".join([*(str(cell) for cell in cells), marks]) + " |")
    where = ", ".join(dict.fromkeys(machine for machine in machines if machine))
    lines += ["", f"Scale {plan.request.scale.name}{f', on {where}' if where else ''}. {table.note}".rstrip(), ""]
    lines += [f"{i}. {note}" for note, i in notes.items()]
    return "\n".join(lines).rstrip() + "\n"


def _row(number: Number) -> dict[str, Any]:
    planned = number.planned
    line = planned.line
    at = "" if line.at is None else line.at
    where = "" if planned.at in (None, line.at) else planned.at
    values = (line.model, at, line.measure, line.paper, number.value, number.error, where, planned.differs)
    return dict(zip(COLUMNS, (*values, number.why_not), strict=True))


def _csv(found: list[Number]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(number) for number in found)
    return text.getvalue()


def _brief(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _losses(plan: Plan, found: list[Number], path: Path) -> bool:
    """Losses and perplexities of the runs, against steps and against seconds."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in found:
        planned = number.planned
        if number.value is not None and planned.step is not None and isinstance(planned.line.work, Bound | Curve):
            step = next((need for need in plan.steps[planned.step].needs if need.startswith("train-")), planned.step)
            runs.setdefault(planned.line.model, metrics(plan, step))
    if runs:
        plot_losses(runs, path)
    return bool(runs)


def _lines(plan: Plan, found: list[Number], path: Path) -> bool:
    """A panel for each measure: ours (solid) and the paper's (dashed) at the same places, a colour for each model."""

    def draw(panel: Any, measure: str) -> None:
        own = [number for number in found if number.planned.line.measure == measure]
        for i, (model, group) in enumerate(groupby(own, key=lambda number: number.planned.line.model)):
            points = list(group)
            at = [number.planned.line.at for number in points]
            ours = [float("nan") if number.value is None else number.value for number in points]
            theirs = [float("nan") if (paper := n.planned.line.paper) is None else paper for n in points]
            panel.plot(at, ours, "o-", color=f"C{i % 10}", ms=4, label=model)
            panel.plot(at, theirs, "x--", color=f"C{i % 10}", ms=4, lw=0.8)
        first = own[0].planned.line
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

    measures = list(dict.fromkeys(number.planned.line.measure for number in found))
    return _panels(path, measures, draw, any(number.value is not None for number in found))


def _quality(plan: Plan, found: list[Number], path: Path) -> bool:
    """Quality against throughput, ours (solid) and the paper's (dashed); FID at its best guidance."""
    points: dict[tuple[Any, ...], dict[str, Number]] = {}
    for number in found:
        line = number.planned.line
        points.setdefault((line.model, line.work, line.at), {})[line.measure] = number

    def values(measure: str, pick: Callable[[Number], float | None]) -> dict[str, list[tuple[float, float, Any]]]:
        series: dict[str, list[tuple[float, float, Any]]] = {}
        best: dict[Any, tuple[float, float, Any]] = {}
        for (model, work, at), pair in points.items():
            x, y = (pick(pair[name]) if name in pair else None for name in (PAIRS[measure], measure))
            if x is None or y is None:
                continue
            if isinstance(work, Pictures):
                best[model, work] = min(
                    best.get((model, work), (x, y, work.steps)), (x, y, work.steps), key=lambda p: p[1]
                )
            else:
                series.setdefault(model, []).append((x, y, at))
        for (model, _), point in best.items():
            series.setdefault(model.split(",")[0], []).append(point)
        return series

    def draw(panel: Any, measure: str) -> None:
        kinds: tuple[tuple[str, Callable[[Number], float | None]], ...]
        kinds = (("o-", lambda number: number.value), ("x--", lambda number: number.planned.line.paper))
        colours: dict[str, str] = {}
        for look, pick in kinds:
            for model, series in values(measure, pick).items():
                colour = colours.setdefault(model, f"C{len(colours)}")
                label = model if look == "o-" else f"{model}, paper"
                panel.plot([x for x, _, _ in series], [y for _, y, _ in series], look, color=colour, ms=4, label=label)
                for x, y, at in series:
                    panel.annotate(f"{at}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        panel.set_xscale("log")
        panel.set_xlabel(f"{PAIRS[measure]} (numbers: the paper's steps)")
        panel.set_ylabel(measure)

    measures = [measure for measure in PAIRS if any(n.planned.line.measure == measure for n in found)]
    return _panels(path, measures, draw, any(number.value is not None for number in found))


def _orders(plan: Plan, found: list[Number], path: Path) -> bool:
    """When each cell of a grid is decided in the Halton order, and in a random one."""
    stage, u = torch.ones(1, CELLS, dtype=torch.long), torch.rand(1, CELLS, generator=torch.Generator().manual_seed(0))
    orders = {"Halton": order.halton(GRID), "random": order.random}
    came = torch.cat([one(stage, u).argsort(1) // (CELLS // STEPS) for one in orders.values()])
    pictures.order_heatmap(came, path, shape=GRID, labels=list(orders))
    return True


def _panels(path: Path, measures: list[str], draw: Callable[[Any, str], None], wanted: bool) -> bool:
    if not wanted:
        return False
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (panels,) = pyplot.subplots(1, len(measures), figsize=(6.4 * len(measures), 5.6), squeeze=False)
    for panel, measure in zip(panels, measures, strict=True):
        draw(panel, measure)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    write_aside(path, lambda aside: figure.savefig(aside, dpi=120, format="png"))
    pyplot.close(figure)
    return True


DRAWINGS = {"lines": _lines, "losses": _losses, "quality": _quality, "orders": _orders}
