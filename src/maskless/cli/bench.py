"""The commands `bench sample` and `bench train`: speed beside the computed limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.measure import Measurement

from maskless.cli import show
from maskless.cli.checks import check_places, numbers
from maskless.cli.options import DEVICE, JSON, Given, NeedsTorch, Option, Options, with_tables
from maskless.files import json_text, write_json
from maskless.terminal import Screen

if TYPE_CHECKING:
    import torch

    from maskless.bench.case import Case
    from maskless.bench.machine import Machine, Timing
    from maskless.paper import Table

bench = typer.Typer()

CASE: Options = {  # the fields of `Case`; of some of them several numbers
    "model": Option(str, "pgm (default), mdlm or ar."),
    "context": Option(str, "pgm: full (default) or ordered."),
    "layers": Option(int, "Layers in all. Default: 16."),
    "encoder": Option(int, "pgm: encoder layers. Default: half."),
    "width": Option(int, "Hidden size. Default: 768."),
    "vocab": Option(int, "Vocabulary size. Default: 50257."),
    "length": Option(str, "Tokens, or a list: 256,1024. Default: 1024."),
    "batch": Option(str, "Batch size, or a list: 1,8,32. Default: 32."),
}
SAMPLING: Options = CASE | {  # and of `SampleCase`
    "steps": Option(str, "Steps, or a list: 32,128. Default: 128."),
    "counts": Option(str, "Tokens per step: uniform (default) or mdlm."),
    "refresh": Option(int, "pgm: encode all again every so many steps. Default: 1."),
}
TRAINING: Options = CASE | {  # and of `TrainCase`
    "model": Option(str, "pgm (default), mdlm, mdlm-complementary or ar."),
    "objective": Option(str, "pgm: partition (default) or chain."),
}
LISTS = ("length", "batch", "steps")
RUN: Options = {
    "against": Option(list[str], "A rival of the same width and layers; may be repeated."),
    "table": Option(str, "A named set of cases; --steps then selects rows."),
    "precision": Option(str, "bf16 (default on CUDA) or fp32 (on CPU)."),
    "repeat": Option(int, "Timed runs of each case, after the first and up to two more. Default: 5."),
    "plot": Option(Path, "A PNG: throughput against each list that was given."),
    "quality": Option(Path, "JSON with the quality of samples, to plot against throughput."),
    "out": Option(Path, "A JSON file with everything."),
}
SAMPLING_RUN: Options = RUN | {
    "exact": Option(
        Path, "A trained chain model: time exact sampling, one token per step, and the models in --against."
    ),
}
TRAINING_RUN: Options = {name: option for name, option in RUN.items() if name != "quality"} | {
    "table": Option(str, "A named set of cases."),
    "repeat": Option(int, "Timed runs of each part, after the first and up to two more. Default: 10."),
}


@bench.callback(invoke_without_command=True)
def _alone(context: typer.Context) -> None:
    """Measure speed: medians with their spread, memory, start-up, and the share of the computed limit."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@bench.command(cls=NeedsTorch)
@with_tables
def sample(
    *,
    case: Annotated[Given, SAMPLING],
    run: Annotated[Given, SAMPLING_RUN],
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Measure how fast random networks sample.

    maskless bench sample --model pgm --encoder 8 --layers 16 --steps 32,128 --against mdlm --plot speed.png

    maskless bench sample --table paper-sampling --steps 32,128

    maskless bench sample --table images

    maskless bench sample --exact runs/my --batch 1,32,256 --against runs/ar
    """
    from maskless.bench.case import SampleCase

    run.setdefault("repeat", 5)
    if "exact" in run:
        _exact(as_json, device=device, **case | run)
    else:
        _bench(SampleCase, case, as_json, device=device, **run)


@bench.command(cls=NeedsTorch)
@with_tables
def train(
    *,
    case: Annotated[Given, TRAINING],
    run: Annotated[Given, TRAINING_RUN],
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Measure how fast random networks train: forward, forward and backward, whole optimiser steps.

    maskless bench train --model pgm --encoder 6 --layers 12 --batch 32 --against mdlm

    maskless bench train --table paper-training
    """
    from maskless.bench.case import TrainCase

    run.setdefault("repeat", 10)
    _bench(TrainCase, case, as_json, device=device, **run)


def _bench(
    kind: type[Case],
    given: Given,
    as_json: bool,
    *,
    repeat: int,
    against: list[str] | None = None,
    table: str | None = None,
    precision: str | None = None,
    device: str | None = None,
    plot: Path | None = None,
    quality: Path | None = None,
    out: Path | None = None,
) -> None:
    """From options to cases, through the measurements, to what is shown and written."""
    from maskless.bench import machine, plots, report, run, tables
    from maskless.bench.case import sweep

    if quality is not None and plot is None:
        raise ValueError("--quality goes with --plot FILE.png, where it is drawn")
    check_places(plot, out)
    found = machine.find_device(device)  # of several GPUs, DEVICE has chosen one
    precision = precision or ("bf16" if found.type == "cuda" else "fp32")
    lists = {n: list(dict.fromkeys(numbers(n, given[n], int, "32,128"))) for n in LISTS if n in given}
    sizes = {name: value for name, value in given.items() if name not in LISTS}
    named = None if table is None else tables.table(table, kind, lists.get("steps"))
    if named is None:
        lengths, batches = lists.get("length", [kind.length]), lists.get("batch", [kind.batch])
        cases = sweep(kind, sizes, against=against or [], lengths=lengths, batches=batches, steps=lists.get("steps"))
    else:
        for option in (*sizes, *["against"] * bool(against), *(lists.keys() - {"steps"})):
            raise ValueError(f"--{option} goes without --table: the cases of {table!r} have their own")
        cases = tables.cases_of(named)
    cases = [replace(case, precision=precision) for case in cases]
    run.check(cases, found, repeat)
    qualities = [] if quality is None else plots.read_quality(quality)
    if plot is not None:
        plots.check(cases, qualities)
    here, results = _measured(cases, found, precision, repeat, named, out)
    if plot is not None:
        plots.plot(results, plot, qualities)
    if as_json:
        print(json_text(report.as_json(here, results, named), indent=1))
        return
    grid = report.grid(here, results) if named is None else report.grid_of(named, here, results)
    wanted = Measurement.get(show.out, show.out.options.update(max_width=1_000), grid).maximum
    Screen(width=max(wanted, show.out.width)).print(grid)  # a narrow terminal breaks lines, but loses nothing


def _exact(
    as_json: bool,
    *,
    exact: Path,
    repeat: int,
    batch: str = "1,32",
    against: list[str] | None = None,
    device: str | None = None,
    out: Path | None = None,
    **other: object,
) -> None:
    """Of a trained model: its ways to write, timed."""
    from maskless import api
    from maskless.bench import exact as bench
    from maskless.bench import machine

    for name in other:
        raise ValueError(f"--{name} with --exact: expected --batch, --against, --repeat, --device and --out at most")
    check_places(out)
    found, batches = machine.find_device(device), numbers("batch", batch, int, "1,32")
    models = [(str(name), api.load(str(name), device=found)) for name in (exact, *(against or []))]
    ways = bench.ways_of(models[0][1], models[1:])
    name = machine.name_of(found)
    with show.bar("sampling", len(ways) * len(batches) * (bench.WARM_UP + repeat)) as move:
        paces = list(bench.measure(ways, batches, repeat=repeat, on_run=lambda what: move(1, description=what)))
    told = {"device": name, "results": [pace.as_dict() for pace in paces]}
    if out is not None:
        write_json(out, told)
    if as_json:
        print(json_text(told, indent=1))
    else:
        show.out.print(bench.grid(paces, name))


def _measured(
    cases: list[Case], device: torch.device, precision: str, repeat: int, table: Table | None, to: Path | None
) -> tuple[Machine, list[Timing]]:
    """Results of all cases, with a bar on stderr; `to` is written after each, so a stopped run leaves what it has."""
    from maskless.bench import machine, report, run

    results: list[Timing] = []
    with show.bar("measuring the machine", sum(run.runs_of(case, repeat) for case in cases)) as move:

        def on_run(case: Case) -> None:
            move(1, description=f"{case.name}, {report.setting(case)}")

        here = machine.measure(device, precision)
        for result in run.measure(cases, here, repeat=repeat, on_run=on_run):
            results.append(result)
            if to is not None:
                write_json(to, report.as_json(here, results, table))
    return here, results
