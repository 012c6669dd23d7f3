"""The commands `bench sample`, `train` and `rounding`: speed beside the limit, and what less precision costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement

from maskless.cli import show
from maskless.cli.generate import MODEL, TOKENIZER
from maskless.files import json_text
from maskless.terminal import Screen

if TYPE_CHECKING:
    import torch

    from maskless.bench.case import Case
    from maskless.bench.machine import Machine
    from maskless.bench.timing import Timing
    from maskless.paper.line import Table

bench = typer.Typer()

AGAINST = Annotated[list[str] | None, typer.Option(help="A rival of the same width and layers; may be repeated.")]
TABLE = Annotated[str | None, typer.Option(help="A named set of cases; --steps then selects rows.")]
CONTEXT = Annotated[str | None, typer.Option(help="pgm: full (default) or ordered.")]
ENCODER = Annotated[int | None, typer.Option(help="pgm: how many of the layers. Default: half.")]
LAYERS = Annotated[int | None, typer.Option(help="In all. Default: 16.")]
WIDTH = Annotated[int | None, typer.Option(help="Default: 768.")]
VOCAB = Annotated[int | None, typer.Option(help="Default: 50257.")]
LENGTH = Annotated[str | None, typer.Option(help="Tokens, or a list: 256,1024. Default: 1024.")]
BATCH = Annotated[str | None, typer.Option(help="Sequences, or a list: 1,8,32. Default: 32.")]
PRECISION = Annotated[str | None, typer.Option(help="bf16 (default on CUDA) or fp32 (on CPU).")]
PRECISION8 = Annotated[
    str | None, typer.Option(help="bf16 (default on CUDA), fp32 (on CPU), or fp8: large products only, on CUDA.")
]
DEVICE = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU where there is one.")]
PLOT = Annotated[Path | None, typer.Option(help="A PNG: throughput against each list that was given.")]
OUT = Annotated[Path | None, typer.Option("--out", help="A JSON file with everything.")]
JSON = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]


@bench.callback(invoke_without_command=True)
def _alone(context: typer.Context) -> None:
    """Measure speed: medians with their spread, memory, start-up, and the share of the computed limit."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@bench.command()
def sample(
    model: Annotated[str | None, typer.Option(help="pgm (default), mdlm or ar.")] = None,
    context: CONTEXT = None,
    encoder: ENCODER = None,
    layers: LAYERS = None,
    width: WIDTH = None,
    vocab: VOCAB = None,
    length: LENGTH = None,
    steps: Annotated[str | None, typer.Option(help="Steps, or a list: 32,128. Default: 128.")] = None,
    batch: BATCH = None,
    counts: Annotated[str | None, typer.Option(help="Tokens per step: uniform (default) or mdlm.")] = None,
    refresh: Annotated[int | None, typer.Option(help="pgm: encode all anew every so many steps. Default: 1.")] = None,
    against: AGAINST = None,
    table: TABLE = None,
    precision: PRECISION8 = None,
    device: DEVICE = None,
    repeat: Annotated[int, typer.Option(help="Timed runs of each case, after the first and up to two more.")] = 5,
    plot: PLOT = None,
    quality: Annotated[
        Path | None, typer.Option(help="JSON with the quality of samples, to plot against throughput.")
    ] = None,
    to: OUT = None,
    as_json: JSON = False,
) -> None:
    """Measure how fast random networks sample.

    maskless bench sample --model pgm --encoder 8 --layers 16 --steps 32,128 --against mdlm --plot speed.png

    maskless bench sample --table paper-sampling --steps 32,128

    maskless bench sample --table images
    """
    from maskless.bench.case import SampleCase

    sizes = {"model": model, "context": context, "encoder": encoder, "layers": layers, "width": width}
    sizes |= {"vocab": vocab, "counts": counts, "refresh": refresh}
    lists = {"length": length, "steps": steps, "batch": batch}
    where: dict[str, Any] = {"precision": precision, "device": device, "repeat": repeat}
    files: dict[str, Any] = {"plot": plot, "quality": quality, "to": to, "as_json": as_json}
    _bench(SampleCase, sizes, lists, against or [], table, **where, **files)


@bench.command()
def train(
    model: Annotated[str | None, typer.Option(help="pgm (default), mdlm, mdlm-complementary or ar.")] = None,
    objective: Annotated[str | None, typer.Option(help="pgm: partition (default) or chain.")] = None,
    context: CONTEXT = None,
    encoder: ENCODER = None,
    layers: LAYERS = None,
    width: WIDTH = None,
    vocab: VOCAB = None,
    length: LENGTH = None,
    batch: BATCH = None,
    against: AGAINST = None,
    table: Annotated[str | None, typer.Option(help="A named set of cases.")] = None,
    precision: PRECISION = None,
    device: DEVICE = None,
    repeat: Annotated[int, typer.Option(help="Timed runs of each part, after the first and up to two more.")] = 10,
    plot: PLOT = None,
    to: OUT = None,
    as_json: JSON = False,
) -> None:
    """Measure how fast random networks train: forward, forward and backward, whole optimiser steps.

    maskless bench train --model pgm --encoder 6 --layers 12 --batch 32 --against mdlm

    maskless bench train --table paper-training
    """
    from maskless.bench.case import TrainCase

    sizes = {"model": model, "context": context, "encoder": encoder, "layers": layers, "width": width, "vocab": vocab}
    sizes["objective"] = objective
    where: dict[str, Any] = {"precision": precision, "device": device, "repeat": repeat}
    files: dict[str, Any] = {"plot": plot, "quality": None, "to": to, "as_json": as_json}
    _bench(TrainCase, sizes, {"length": length, "batch": batch}, against or [], table, **where, **files)


@bench.command()
def rounding(
    model: MODEL,
    data: Annotated[str, typer.Option(help="A prepared folder with the model's vocabulary, or a text file.")],
    split: Annotated[str, typer.Option(help="valid or train.")] = "valid",
    precision: Annotated[str, typer.Option(help="bf16, fp8, or several with commas.")] = "bf16,fp8",
    sequences: Annotated[int, typer.Option(help="At most so many, evenly spread.")] = 64,
    batch: Annotated[int, typer.Option(help="At once.")] = 8,
    device: DEVICE = None,
    tokenizer: TOKENIZER = None,
    as_json: JSON = False,
) -> None:
    """Measure what less precision costs a trained model of text: its answers beside those in float32.

    maskless bench rounding runs/my --data runs/my/data
    """
    from maskless import api
    from maskless.bench import machine
    from maskless.bench.case import at_least_1
    from maskless.bench.rounding import as_dict, grid
    from maskless.bench.rounding import rounding as measure
    from maskless.evaluate.corpora import corpus
    from maskless.evaluate.likelihood import spread

    at_least_1("sequences", sequences)
    loaded = api.load(model, device=machine.find_device(device), tokenizer=tokenizer)
    if loaded.layout == "image":
        raise ValueError(f"{model} is a model of pictures: expected one of text")
    asked = list(dict.fromkeys(precision.split(",")))
    with corpus(data, loaded, model, split) as text:
        rows = text.rows.rows(spread(len(text.rows), sequences))
        with show.bar("comparing", len(rows)) as advance:
            found = measure(loaded.network, rows, asked, pad=text.pad, batch=batch, on_batch=advance)
    print(json_text(as_dict(found))) if as_json else show.out.print(grid(found))


def _bench(
    kind: type[Case],
    sizes: dict[str, Any],
    lists: dict[str, str | None],
    against: list[str],
    name: str | None,
    *,
    precision: str | None,
    device: str | None,
    repeat: int,
    plot: Path | None,
    quality: Path | None,
    to: Path | None,
    as_json: bool,
) -> None:
    """From options to cases, through the measurements, to what is shown and written."""
    from dataclasses import replace

    from maskless.bench import machine, plots, report, run
    from maskless.bench.tables import cases_of

    if quality is not None and plot is None:
        raise ValueError("--quality goes with --plot FILE.png, where it is drawn")
    for path in (plot, to):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: {path.parent} is not a folder")
    found = machine.find_device(device)
    precision = precision or ("bf16" if found.type == "cuda" else "fp32")
    given = {option: value for option, value in sizes.items() if value is not None}
    numbers = {option: _numbers(option, value) for option, value in lists.items() if value is not None}
    table = None if name is None else _table(kind, name, given, numbers, against)
    cases = _cases(kind, given, numbers, against) if table is None else cases_of(table)
    cases = [replace(case, precision=precision) for case in cases]
    run.check(cases, found, repeat)
    qualities = [] if quality is None else plots.read_quality(quality)
    if plot is not None:
        plots.check(cases, qualities)
    here, results = _measured(cases, found, precision, repeat, table, to)
    if plot is not None:
        plots.plot(results, plot, qualities)
    if as_json:
        print(_text(here, results, table))
        return
    grid = report.grid(here, results) if table is None else report.grid_of(table, here, results)
    wanted = Measurement.get(show.out, show.out.options.update(max_width=1_000), grid).maximum
    Screen(width=max(wanted, show.out.width)).print(grid)  # a narrow terminal breaks lines, but loses nothing


def _measured(
    cases: list[Case], device: torch.device, precision: str, repeat: int, table: Table | None, to: Path | None
) -> tuple[Machine, list[Timing]]:
    """Results of all cases, with a bar on stderr; `to` is written after each, so a stopped run leaves what it has."""
    from maskless.bench import machine, report, run
    from maskless.files import write_aside

    results: list[Timing] = []
    with show.progress() as bar:
        task = bar.add_task("measuring the machine", total=sum(run.runs_of(case, repeat) for case in cases))

        def on_run(case: Case) -> None:
            bar.update(task, advance=1, description=f"{case.name}, {report.setting(case)}")

        here = machine.measure(device, precision)
        for result in run.measure(cases, here, repeat=repeat, on_run=on_run):
            results.append(result)
            if to is not None:
                write_aside(to, lambda aside: aside.write_text(_text(here, results, table) + "\n"))
    return here, results


def _text(here: Machine, results: list[Timing], table: Table | None) -> str:
    from maskless.bench import report

    return json_text(report.as_json(here, results, table), indent=1)


def _cases(kind: type[Case], sizes: dict[str, Any], numbers: dict[str, list[int]], against: list[str]) -> list[Case]:
    from maskless.bench.case import Case, sweep

    return sweep(
        kind,
        sizes,
        against=against,
        lengths=numbers.get("length", [Case.length]),
        batches=numbers.get("batch", [Case.batch]),
        steps=numbers.get("steps"),
    )


def _table(
    kind: type[Case], name: str, sizes: dict[str, Any], numbers: dict[str, list[int]], against: list[str]
) -> Table:
    from maskless.bench.tables import table

    found = table(name, kind, numbers.get("steps"))
    for option in (*sizes, *(["against"] if against else []), *(set(numbers) - {"steps"})):
        raise ValueError(f"--{option} goes without --table: the cases of {name!r} have their own")
    return found


def _numbers(option: str, given: str) -> list[int]:
    """A number, or several with commas between."""
    try:
        return list(dict.fromkeys(int(number) for number in given.split(",")))
    except ValueError:
        raise ValueError(f"--{option} {given!r}: expected a whole number, or several: 32,128") from None
