"""The command `distill`: a model that needs fewer steps, taught by one that takes more."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from maskless.cli import run_options, show
from maskless.cli.generate import JSON, TOKENIZER
from maskless.files import json_text
from maskless.train.report import or_unknown


def distill(
    to: Annotated[Path, typer.Option("--out", help="The folder to make; each student is in OUT/round-1, ...")],
    model: Annotated[
        str | None, typer.Argument(help="A model folder, a run folder, a hub id, or a released checkpoint file.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A prepared folder with the model's vocabulary.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Each halves the sampling steps. Default: 3.")] = None,
    teacher_steps: Annotated[
        int | None, typer.Option(help="Sampling steps of the first teacher. Default: one for each token.")
    ] = None,
    ratio: Annotated[int | None, typer.Option(help="Teacher's steps for one of the student. Default: 2.")] = None,
    loss: Annotated[str | None, typer.Option(help="kl-backward (default), kl-forward or tv.")] = None,
    groups: Annotated[
        str | None, typer.Option(help="one (the paper's), or two: both groups teach. Default: two for pgm.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps-per-round", help="Default: 10,000.")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes-per-round", help="A time budget.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, over all processes. Default: 128.")] = None,
    accumulate: run_options.ACCUMULATE = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="Default: 3e-4.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps, in each round.")] = None,
    decay: Annotated[str | None, typer.Option(help="constant (default) or cosine, in each round.")] = None,
    ema: Annotated[
        float | None, typer.Option(help="Decay of the averaged weights, which teach the next round.")
    ] = None,
    seed: run_options.SEED = None,
    compile: run_options.COMPILE = None,
    fsdp: Annotated[bool | None, typer.Option("--fsdp", help="Shard the student's weights over processes.")] = None,
    evaluate_every: run_options.EVERY = None,
    sample_every: run_options.SAMPLE_EVERY = None,
    save_every: run_options.EVERY = None,
    log_every: run_options.LOG_EVERY = None,
    keep: Annotated[int | None, typer.Option(help="Training states that stay on disk, of each round.")] = None,
    tracker: run_options.TRACKER = None,
    tokenizer: TOKENIZER = None,
    as_json: JSON = False,
) -> None:
    """Teach a model to do in one step what it does in two, round after round.

    maskless distill runs/my --data runs/my/data --out runs/my-fast --teacher-steps 64 --rounds 3

    maskless distill --out runs/my-fast --resume
    """
    from maskless.data.image_tokens import holds_images
    from maskless.train import distill_run
    from maskless.train.processes import processes
    from maskless.train.setup import run_folder

    training = {
        "steps": steps,
        "minutes": minutes,
        "batch": batch,
        "accumulate": accumulate,
        "learning_rate": learning_rate,
        "warmup": warmup,
        "decay": decay,
        "ema": ema,
        "seed": seed,
        "compile": compile,
        "fsdp": fsdp,
        "evaluate_every": evaluate_every,
        "sample_every": sample_every,
        "save_every": save_every,
        "log_every": log_every,
        "keep": keep,
        "tracker": tracker,
    }
    how = {"rounds": rounds, "teacher_steps": teacher_steps, "ratio": ratio, "loss": loss, "groups": groups}
    going_on = resume and (to / distill_run.CONFIG).exists()
    if resume and not going_on and model is None and data is None:
        raise ValueError(f"nothing to resume: {to} has no {distill_run.CONFIG}; give MODEL and --data to begin")
    make = distill_run.resumed if going_on else distill_run.begin
    with run_folder(to):
        config = make(to, model, data, tokenizer=tokenizer, train=run_options.given(training), **run_options.given(how))
        done = distill_run.distill(to, config, show.err)
    if not processes().is_main_process:
        return
    if as_json:
        print(json_text([dataclasses.asdict(each) for each in done]))
        return
    table = Table("round", "sampling steps", "steps", "seconds", "validation perplexity (bound)")
    for each in done:
        measured = f"{each.perplexity:.2f} ± {or_unknown(each.perplexity_error, '.2f')}"
        table.add_row(str(each.round), f"{each.sampling_steps:g}", f"{each.steps:,}", f"{each.seconds:,.0f}", measured)
    show.out.print(table)
    last = max(1, round(done[-1].sampling_steps))
    tried = f"maskless generate {shlex.quote(str(to))} --steps {last}" + " --out new.png" * holds_images(config.data)
    students = f"students: {to}/round-1 to round-{len(done)}" if len(done) > 1 else f"student: {to}/round-1"
    show.out.print(f"{students}   try: {tried}", highlight=False, markup=False, soft_wrap=True)
