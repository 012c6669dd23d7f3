"""The command `reproduce`: a table or a figure of the paper, made again and set beside the paper's."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskless.cli import show
from maskless.cli.checks import flag
from maskless.cli.evaluate import FEATURES
from maskless.cli.options import Given, with_tables
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
) -> None:
    """Make a table or a figure of the paper again: train what is missing, evaluate, and set ours beside the paper's.

    maskless reproduce table-5 --data reviews.txt --dry-run

    maskless reproduce figure-1 --data reviews.txt --data photos --judge judge/ --features inception.pt

    maskless reproduce table-6 --scale paper --processes 8 --yes
    """
    from maskless.bench import machine
    from maskless.bench.case import at_least_1
    from maskless.paper.tables import DRAWN_BY_HAND, TABLES
    from maskless.paper.tables import table as find
    from maskless.reproduce import report, run
    from maskless.reproduce.jobs import Options
    from maskless.reproduce.plan import plan, sort_out
    from maskless.reproduce.scale import scale

    if table is None:
        listed = {each.name: f"{each.about} ({len(each.lines)} numbers)" for each in TABLES.values()}
        listed |= {name: f"{about}: a drawing, nothing to measure" for name, about in DRAWN_BY_HAND.items()}
        for name, about in listed.items():
            show.out.print(f"{name:10} {about}", highlight=False, soft_wrap=True)
        return
    at_least_1("processes", processes)
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
        return
    if at.is_paper and this.jobs and machine.find_device(None).type == "cpu":
        raise ValueError("--scale paper: torch sees no GPU here; expected one, or --dry-run")
    count = iter(range(1, len(this.jobs) + len(this.costs) + 1))

    def on_step(step: TableJob, stands: str) -> None:
        if stands != "done":
            shown = f"{next(count)}. {step.name}: {shlex.join(step.command)}"
            show.note(shown)

    hours = run.estimate(this, run.child, on_step)
    for name, cost in hours.items():
        show.out.print(f"{name}: about {cost:,.0f} GPU hours", highlight=False, soft_wrap=True)
    if hours and not yes:
        total = f"training and distilling take about {sum(hours.values()):,.0f} GPU hours of this kind"
        raise ValueError(f"{total}, and evaluating comes on top: start it with --yes")
    outcomes = run.run(this, run.child, on_step)
    reasons = [outcome.why_not for outcome in outcomes.values() if outcome.why_not]
    if reasons and len(reasons) == len(outcomes):  # nothing to show: the data cannot be read, say
        raise ValueError(reasons[0])
    found = list(run.numbers(this, outcomes))
    machines = [outcome.machine for outcome in outcomes.values()]
    print(report.markdown(this, found, machines), end="")
    made = report.write(this, found, machines)
    show.note("written: " + "   ".join(map(str, made)))
    if reasons:
        raise typer.Exit(1)


def _show(plan: TablePlan) -> None:
    """The plan, in commands that could be given by hand."""
    from maskless.reproduce.run import standing

    show.out.print(f"{plan.table.name}: {plan.table.about}, scale {plan.options.scale.name}", soft_wrap=True)
    words = {"done": "done", "begun": "resumes", "": "to do"}
    for step in plan.jobs.values():
        shown = f"{words[standing(plan, step)]:8} {shlex.join(step.command)}"
        say(shown)
    missing = Counter(entry.why_not for entry in plan.entries if entry.why_not)
    show.out.print(f"{len(plan.entries) - missing.total()} numbers", highlight=False)
    for reason, number in missing.items():
        say(f"{number} numbers not: {reason}")
