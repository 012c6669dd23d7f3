"""Options that the commands `train`, `distill` and `train-codec` share, and which of them were given."""

from __future__ import annotations

from typing import Annotated, Any

import typer

MINUTES = Annotated[float | None, typer.Option(help="A time budget.")]
RESUME = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
ACCUMULATE = Annotated[int | None, typer.Option(help="Pieces of a process's share of a step.")]
EMA = Annotated[float | None, typer.Option(help="Decay of the averaged weights.")]
SEED = Annotated[int | None, typer.Option(help="Default: 0.")]
COMPILE = Annotated[bool | None, typer.Option(help="By default on CUDA.")]
EVERY = Annotated[int | None, typer.Option(help="Steps; 0: at the end only. Default: 1,000, and a tenth of the run.")]
SAMPLE_EVERY = Annotated[int | None, typer.Option(help="Steps between live samples; 0: none.")]
LOG_EVERY = Annotated[int | None, typer.Option(help="Default: 10.")]
KEEP = Annotated[int | None, typer.Option(help="Training states that stay on disk. Default: 2.")]
TRACKER = Annotated[str | None, typer.Option(help="tensorboard (default), wandb, ... or none.")]


def given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
