"""The command `plan`: what a training run will need, before it starts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from maskless.cli.bench import CASE
from maskless.cli.options import JSON, Given, Option, Options, with_tables
from maskless.files import json_text
from maskless.terminal import say

if TYPE_CHECKING:
    from maskless.budget import Budget

SIZES: Options = {  # the fields of `TrainCase`, less the precision, and how long
    "model": Option(str, "pgm (default), mdlm, mdlm-complementary, ar; pictures: maskgit."),
    "objective": Option(str, "pgm of text: chain (default without a recipe) or partition."),
    "context": Option(str, "pgm with two groups: full (default) or ordered."),
    **{name: CASE[name] for name in ("layers", "encoder", "width", "vocab")},
    "length": Option(int, "Tokens in a sequence. Default: 1024."),
    "batch": Option(int, "Global batch size. Default: 32."),
    "steps": Option(int, "Training steps."),
    "tokens": Option(float, "Instead of --steps: tokens of the whole run, such as 20e9."),
    "classes": Option(int, "Pictures: so many classes; --length is without the BOS."),
}
DAY, HOUR, MINUTE = 86_400, 3_600, 60


@with_tables
def plan(
    *,
    recipe: Annotated[str | None, typer.Argument(help="A row of the paper's tables, by name; or give sizes.")] = None,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, l40s or rtx4090; cpu: this machine's.")] = "h200",
    gpus: Annotated[int, typer.Option(help="How many.")] = 1,
    sizes: Annotated[Given, SIZES],
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Also where memory does not need it.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Estimate what training will need: memory, speed, time and disk. Nothing is trained, and no GPU is needed.

    maskless plan owt-pgm-8-8 --gpus 8 --gpu h100

    maskless plan --width 2048 --layers 16 --length 2048 --batch 512 --tokens 20e9 --gpus 8 --gpu h100
    """
    from maskless import budget as budgets
    from maskless.gpus import gpu as find

    kind, wanted = find(gpu), budgets.planned(recipe, **sizes)
    found = budgets.budget(wanted, kind, gpus, checkpointing=activation_checkpointing)
    if as_json:
        told = dataclasses.asdict(found) | {"memory": found.memory, "fits": found.fits, "seconds": found.seconds}
        print(json_text(told, indent=1))
        return
    batch = f"{wanted.settings.batch} x {wanted.tokens} tokens"
    on = kind.name if gpu.lower() == "cpu" else f"{gpus} x {kind.name}"
    say(f"{wanted.case.name}, {_many(found.parameters)} parameters, on {on}")
    say(f"  {found.steps:,} steps of {batch}, {_many(found.tokens)} in all")
    for name, said in _told(found, gpus, "" if gpu.lower() == "cpu" else " a GPU").items():
        say(f"  {name:<10} {said}")


def _told(found: Budget, gpus: int, each: str) -> dict[str, str]:
    flags = [f"--accumulate {found.accumulate}"] * (found.accumulate > 1) + ["--fsdp"] * found.fsdp
    flags += ["--activation-checkpointing"] * found.checkpointing
    held = f"{_gib(found.memory)} of {_gib(found.usable)}{each}: state {_gib(found.state)}"
    held += f", activations {_gib(found.activations)}" + (f"; with {' '.join(flags)}" if flags else "")
    if not found.fits:
        held += "; DOES NOT FIT: take more GPUs, or shorter sequences"
    speed = f"{found.tokens_per_second:,.0f} tokens/s" + f", {found.tokens_per_second / gpus:,.0f}{each}" * (gpus > 1)
    apart = found.communication > 0.9 * found.step
    return {
        "memory": held,
        "speed": f"{speed}, {found.mfu:.0%} of the peak" + "; bound by communication" * apart,
        "time": f"{_long(found.seconds)}, without evaluating and saving",
        "disk": f"{_gib(found.checkpoint)} a training state (two are kept), {_gib(found.model)} the model",
    }


def _many(count: float) -> str:
    """1.2 B"""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,.0f}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _long(seconds: float) -> str:
    for unit, size in (("days", DAY), ("hours", HOUR), ("minutes", MINUTE)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
