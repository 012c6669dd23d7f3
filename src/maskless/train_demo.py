"""Training shown, behind `make train-demo`: a PGM and an MDLM learn a toy language side by side and fill gaps."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text as Line

from maskless import api
from maskless.checkpoint import Model
from maskless.data import toy
from maskless.data.prepare import prepare
from maskless.data.tokens import Prepared, open_tokens
from maskless.demo import fill
from maskless.nn.partition import PartitionConfig
from maskless.train.config import TrainConfig
from maskless.train.plan import network_config
from maskless.train.run import RunConfig, Summary, run

SENTENCES, VOCAB, LENGTH = 30_000, 512, 40
WIDTH, LAYERS, BATCH, RATE = 64, 4, 32, 4e-3
SAMPLES = 128
GAPS = (
    "[1] has the red ball , anna [2] red ball to ben , [3] red [1] to [1] , "
    "carl gives the [2] to dora , so [1] has the red ball ."
)


@dataclass(frozen=True)
class Result:
    summary: Summary
    score: float
    tokens_per_second: float
    texts: list[api.Text]


def show(console: Console, *, minutes: float, seed: int) -> None:
    """Train both models for half the minutes each, then show what they write, how gaps fill, and a table."""
    console.rule("[bold]maskless[/]: generation in any order, without a mask token")
    console.print(
        "A toy language whose sentences a program can check, simple enough for a PGM to learn in a minute. Two models "
        f"of one size get {60 * minutes / 2:.0f} seconds each:\n"
        "  [bold]PGM[/]  splits a sentence in two groups that predict each other; it computes known tokens only\n"
        "  [bold]MDLM[/] hides tokens behind masks; it computes all positions, always\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        with console.status("preparing ..."):
            text = toy.write(Path(folder) / "toy.jsonl", SENTENCES, seed)
            how: dict[str, Any] = {"vocab": VOCAB, "length": LENGTH, "layout": "padded", "valid": 0.01}
            data = open_tokens(prepare([text], Path(folder) / "data", **how))
        console.print("  " + "\n  ".join(toy.corpus(3, seed + 1)) + "\n", style="dim", highlight=False)
        results = {}
        for model in ("pgm", "mdlm"):
            summary = _train(Path(folder) / model, data, model, minutes / 2, seed, console)
            with console.status("sampling ..."):
                results[model] = _measure(summary, seed)
    for model, result in results.items():
        console.print(Panel(_checked(result.texts[:3]), title=f"{model.upper()} writes", title_align="left"))
    _show_filling(console, results["pgm"].summary.model, seed)
    console.print(_table(results))


def _train(folder: Path, data: Prepared, model: str, minutes: float, seed: int, console: Console) -> Summary:
    network = network_config(model, data.codec(), LENGTH, width=WIDTH, layers=LAYERS, dropout=0.0)
    if isinstance(network, PartitionConfig):
        network = dataclasses.replace(network, swap="residual")  # what this little language needs: docs/results.md
    settings = TrainConfig(
        model=model,
        weights="exact",
        minutes=minutes,
        batch=BATCH,
        learning_rate=RATE,
        warmup=50,
        decay="cosine",
        ema=0.99,
        seed=seed,
        evaluate_every=0,
        save_every=0,
    )
    config = RunConfig(data=str(data.folder), network=dataclasses.asdict(network), train=settings)
    return run(folder, config, console, name=model.upper())


def _measure(summary: Summary, seed: int) -> Result:
    """The share of right sentences among samples, one token a step, and how fast they came."""
    steps = LENGTH - 1
    begin = time.monotonic()
    texts = api.generate(summary.model, SAMPLES, steps=steps, seed=seed)
    seconds = time.monotonic() - begin
    right = sum(toy.check(text) for text in texts)
    return Result(summary, right / SAMPLES, sum(text.written for text in texts) / seconds, texts)


def _checked(texts: list[api.Text]) -> Line:
    lines = Line()
    for text in texts:
        right = toy.check(text)
        lines.append("✓ " if right else "✗ ", style="green" if right else "red")
        lines.append(f"{text}\n")
    return lines[:-1]


def _show_filling(console: Console, model: Model, seed: int) -> None:
    console.print("\n[bold]PGM fills gaps in any order[/], here one token a step:", highlight=False)
    right = toy.check(fill(console, model, GAPS, seed))
    console.print(f"  {'a right sentence' if right else 'not a right sentence'}", style="green" if right else "red")


def _table(results: dict[str, Result]) -> Table:
    table = Table(title="one size, one time", title_justify="left")
    for column in ("", "right sentences", "validation perplexity (bound)", "sampling, tokens/s", "training, tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for model, result in results.items():
        bound = result.summary.likelihood
        table.add_row(
            model.upper(),
            f"{100 * result.score:.0f} %",
            f"{bound.perplexity:.3f} ± {bound.perplexity_error:.3f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.summary.tokens_per_second:,.0f}",
        )
    return table
