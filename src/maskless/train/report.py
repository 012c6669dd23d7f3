"""What a run shows and leaves behind: a progress display, metrics.jsonl, and a loss curve as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from maskless.files import json_text, write_aside


def or_unknown(number: float, spec: str) -> str:
    """A number as `spec` has it, or ? where there is none, such as the standard error of a single value."""
    return f"{number:{spec}}" if math.isfinite(number) else "?"


def progress_bar(console: Console, *, enabled: bool = True) -> Progress:
    """A bar with loss, speed, time spent and time left."""
    return Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not enabled,
    )


class Throughput:
    """How many tokens or images a run takes in a second."""

    def __init__(self, each: int, step: int, seconds: float):
        """each: of a step; step, seconds: where the run begins."""
        self.each, self.begin = each, (step, seconds)
        self.first: tuple[int, float] | None = None

    def look(self, step: int, seconds: float) -> float:
        """So far, without the steps before the first look, which warm up; without steps after it, over all."""
        since = self.first if self.first is not None and self.first[0] < step else self.begin
        self.first = self.first or (step, seconds)
        return self.each * (step - since[0]) / max(1e-9, seconds - since[1])


class MetricsFile:
    """Lines of metrics.jsonl, one per logged step; a resumed run keeps those up to its step."""

    def __init__(self, path: Path, start: int):
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= start]
        write_aside(path, lambda aside: aside.write_text("".join(json_text(line) + "\n" for line in kept)))
        self.lines = kept
        self._file = path.open("a")

    def add(self, **line: Any) -> None:
        """Write a line, but not what the last one says: a run that was done measures its last step again."""
        if self.lines and self.lines[-1] | {"seconds": 0} == line | {"seconds": 0}:
            return
        self.lines.append(line)
        self._file.write(json_text(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a line that a killed process left half-written is dropped."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def plot_losses(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Training loss and validation perplexity of one or more runs, against steps and against seconds, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2))
    left, middle, right = figure.subplots(1, 3)
    for name, lines in runs.items():
        trained = [line for line in lines if "loss" in line]
        tested = [line for line in lines if "perplexity" in line]
        left.plot([line["step"] for line in trained], _smooth([line["loss"] for line in trained]), label=name, lw=1)
        for axes, key in ((middle, "step"), (right, "seconds")):
            axes.plot([line[key] for line in tested], [line["perplexity"] for line in tested], "o-", ms=3, label=name)
    for axes, x, y in (
        (left, "steps", "training loss (nats per token)"),
        (middle, "steps", "validation perplexity (bound)"),
        (right, "seconds of training", "validation perplexity (bound)"),
    ):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (middle, right):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    left.legend(frameon=False)
    figure.tight_layout()
    write_aside(path, lambda aside: figure.savefig(aside, dpi=120, format="png"))


def _smooth(values: list[float], window: int = 20) -> np.ndarray:
    """Running means over the last `window` values."""
    sums = np.cumsum(values, dtype=np.float64)
    sums[window:] -= sums[:-window].copy()
    return sums / np.minimum(np.arange(1, len(sums) + 1), window)
