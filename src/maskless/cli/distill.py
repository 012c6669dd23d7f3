"""The command `distill`: a model that needs fewer steps, taught by one that takes more."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from maskless.cli import show
from maskless.cli.options import DEVICE, JSON, TOKENIZER, Given, Option, Options, with_tables
from maskless.cli.train import RESUME, TRAINING, goes_on
from maskless.files import json_text
from maskless.terminal import say
from maskless.train.report import or_unknown

HOW: Options = {  # fields of `DistillConfig`
    "rounds": Option(int, "Each halves the sampling steps. Default: 3."),
    "teacher_steps": Option(int, "Sampling steps of the first teacher. Default: one for each token."),
    "ratio": Option(int, "Teacher's steps for one of the student. Default: 2."),
    "loss": Option(str, "Distillation loss: kl-backward (default), kl-forward or tv."),
    "groups": Option(str, "one (the paper's), or two: both groups teach. Default: two for pgm."),
}
OF_THE_MODEL = ("model", "objective", "orders", "weights", "initial", "label_dropout")  # settled by the teacher
ROUND: Options = {name: option for name, option in TRAINING.items() if name not in OF_THE_MODEL} | {
    "steps": Option(int, "Training steps. Default: 10,000.", "--steps-per-round"),
    "minutes": Option(float, "Time budget: wall time of a round.", "--minutes-per-round"),
    "batch": Option(int, "Global batch size. Default: 128."),
    "learning_rate": Option(float, "Learning rate. Default: 3e-4.", "--lr"),
    "warmup": Option(int, "Warm-up steps, in each round."),
    "decay": Option(str, "Learning-rate schedule in each round: constant (default) or cosine."),
    "ema": Option(float, "EMA decay; the averaged weights teach the next round."),
    "fsdp": Option(bool, "Shard the student's weights over processes.", "--fsdp"),
    "keep": Option(int, "Checkpoints kept on disk, of each round."),
}


@with_tables
def distill(
    *,
    to: Annotated[Path, typer.Option("--out", help="The folder to make; each student is in OUT/round-1, ...")],
    model: Annotated[
        str | None, typer.Argument(help="A model folder, a run folder, a hub id, or a released checkpoint file.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A prepared folder with the model's vocabulary.")] = None,
    resume: RESUME = False,
    how: Annotated[Given, HOW],
    training: Annotated[Given, ROUND],
    tokenizer: TOKENIZER = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Teach a model to do in one step what it does in two, round after round.

    maskless distill runs/my --data runs/my/data --out runs/my-fast --teacher-steps 64 --rounds 3

    maskless distill --out runs/my-fast --resume
    """
    with show.waiting("starting"):
        from maskless.data.image_tokens import holds_images
        from maskless.train import distill_run
        from maskless.train.processes import processes
        from maskless.train.setup import run_folder

    again = resume and goes_on(to, distill_run.CONFIG, model or data, "MODEL and --data")
    asked = distill_run.DistillRequest(source=model, data=data, tokenizer=tokenizer, how=how, train=training)
    done = distill_run.finished(to, distill_run.resumed(to, asked)) if again else None
    if done is None:
        with run_folder(to):
            with show.waiting("setting up"):
                config = (distill_run.resumed if again else distill_run.begin)(to, asked)
            done = distill_run.distill(to, config, show.err)
    elif not as_json and processes().is_main_process:
        more = shlex.join(["maskless", "distill", "--out", str(to), "--resume", "--rounds", str(len(done) + 1)])
        say(f"{to} is finished, after {len(done)} rounds; go on with more of them: {more}")
        return
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
    say(f"{students}   try: {tried}")
