"""The command `reproduce`: a table or a figure of the paper, made again and set beside the paper's."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskless.cli import show
from maskless.cli.checks import flag
from maskless.cli.evaluate import FEATURES
from maskless.cli.options import DEVICE, Given, with_tables
from maskless.terminal import say

if TYPE_CHECKING:
    from maskless.reproduce.jobs import TableJob, TablePlan


@with_tables
def reproduce(
    *,
    table: Annotated[str | None, typer.Argument(help="table-1, figure-6, ...; without it all are listed.")] = None,
    size: Annotated[
        str,
        typer.Option("--scale", help="small: minutes on one GPU. paper: all of it. toy: a CPU, to see that it works."),
    ] = "small",
    data: Annotated[
        list[str] | None, typer.Option(help="A text or prepared text; pictures for those of ImageNet; may be repeated.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="The folder for runs and tables. Default: reproduced/SCALE.")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="Gen-PPL: a causal LM, as in `evaluate`.")] = None,
    features: Annotated[Given, FEATURES],
    codec: Annotated[str | None, typer.Option(help="Pictures: a codec; without it a small one is trained.")] = None,
    processes: Annotated[int, typer.Option(help="GPUs that train and evaluate together.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="At the paper's scale: start, whatever it costs.")] = False,
    device: DEVICE = None,
) -> None:
    """Make a table or a figure of the paper again: train what is missing, evaluate, and set ours beside the paper's.

    maskless reproduce table-5 --data reviews.txt --dry-run

    maskless reproduce figure-1 --data reviews.txt --data photos --judge judge/ --features inception.pt

    maskless reproduce table-6 --scale paper --processes 8 --yes
    """
    from maskless.how import check_positive
    from maskless.paper import table as find
    from maskless.reproduce.jobs import Options, scale
    from maskless.reproduce.plan import plan, sort_out

    if table is None:
        _list()
        return
    check_positive(processes=processes)
    if device is not None:
        os.environ["MASKLESS_DEVICE"] = device  # of the commands that it is made of
    named, at = find(table), scale(size)
    folder = Path("reproduced", at.name) if to is None else to
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    given = sort_out(data or [])
    if at.is_paper and "text" in given:
        raise ValueError(f"--data {given['text']}: the paper's scale has its own text, prepared in {folder / 'data'}")
    seen = tuple(word for name, value in features.items() for word in (flag(name), value))
    how = {"judge": judge, "codec": codec}
    this = plan(named, Options(scale=at, out=folder, processes=processes, features=seen, **given, **how))
    if dry_run:
        _show(this)
    else:
        _make(this, yes)


def _list() -> None:
    """All tables and figures of the paper, by name."""
    from maskless.paper import DRAWN_BY_HAND, TABLES

    listed = {each.name: f"{each.about} ({len(each.lines)} numbers)" for each in TABLES.values()}
    listed |= {name: f"{about}: a drawing, nothing to measure" for name, about in DRAWN_BY_HAND.items()}
    for name, about in listed.items():
        show.out.print(f"{name:10} {about}", highlight=False, soft_wrap=True)


def _make(plan: TablePlan, yes: bool) -> None:
    """Take all steps of a plan, and show ours beside the paper's."""
    from maskless.bench import machine
    from maskless.reproduce import report, run

    if plan.options.scale.is_paper and plan.jobs and machine.find_device(None).type == "cpu":
        raise ValueError("--scale paper: torch sees no GPU here; expected one, or --dry-run")
    count = itertools.count(1)

    def on_step(step: TableJob, stands: str) -> None:
        if stands != "done":
            show.note(f"{next(count)}. {step.name}: {shlex.join(step.command)}")

    hours = run.estimate(plan, run.child, on_step)
    for name, cost in hours.items():
        show.out.print(f"{name}: about {cost:,.0f} GPU hours", highlight=False, soft_wrap=True)
    if hours and not yes:
        total = f"training and distilling take about {sum(hours.values()):,.0f} GPU hours of this kind"
        again = shlex.join(["maskless", *sys.argv[1:], "--yes"])
        raise ValueError(f"{total}, and evaluating comes on top; start it with --yes: {again}")
    outcomes = run.run(plan, run.child, on_step)
    reasons = [outcome.why_not for outcome in outcomes.values() if outcome.why_not]
    if reasons and len(reasons) == len(outcomes):  # nothing to show: the data cannot be read, say
        raise ValueError(reasons[0])
    found = list(run.numbers(plan, outcomes))
    machines = [outcome.machine for outcome in outcomes.values()]
    print(report.markdown(plan, found, machines), end="")
    show.note("written: " + "   ".join(map(str, report.write(plan, found, machines))))
    if reasons:
        raise typer.Exit(1)


def _show(plan: TablePlan) -> None:
    """The plan, in commands that could be given by hand."""
    from maskless.reproduce.run import standing

    show.out.print(f"{plan.table.name}: {plan.table.about}, scale {plan.options.scale.name}", soft_wrap=True)
    words = {"done": "done", "begun": "resumes", "": "to do"}
    for step in plan.jobs.values():
        say(f"{words[standing(plan, step)]:8} {shlex.join(step.command)}")
    missing = Counter(entry.why_not for entry in plan.entries if entry.why_not)
    show.out.print(f"{len(plan.entries) - missing.total()} numbers", highlight=False)
    for reason, number in missing.items():
        say(f"{number} numbers not: {reason}")
