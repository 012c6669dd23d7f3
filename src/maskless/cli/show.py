"""What the commands show while they work and when they are done. Results go to stdout, progress to stderr."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maskless import terminal
from maskless.cli import entry
from maskless.terminal import Screen, say
from maskless.train.report import or_unknown

if TYPE_CHECKING:
    from maskless.checkpoint import Model
    from maskless.data.tokens import Prepared
    from maskless.drafts import Step
    from maskless.evaluate.images import ImageQuality
    from maskless.train.run import RunConfig

P = TypeVar("P")
out, err = Screen(), Screen(stderr=True)


def note(line: str) -> None:
    """A line on stderr, as it is."""
    err.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A line on a terminal that says what takes its time, gone afterwards; nothing inside shows a bar of its own."""
    with err.status(Text(f"{what} ...")) if err.is_terminal else nullcontext():
        yield


def loading(source: str | Path, **how: Any) -> Model:
    """A model, as `api.load` gives it."""
    with waiting(f"loading {source}"):
        from maskless import api

        return api.load(source, **how)


def preparing(inputs: list[str], to: Path, **how: Any) -> Prepared:
    """Prepare with a progress bar."""
    from maskless.data.prepare import prepare
    from maskless.data.tokens import open_tokens

    with bar("preparing") as move:

        def show(done: int, total: int, tokens: int) -> None:
            what = f"tokenising, {tokens / 1e6:,.1f} M tokens" if tokens else "preparing"
            move(completed=done, total=total, description=what)

        prepare(inputs, to, on_progress=show, **how)
    return open_tokens(to)


def training(folder: Path, config: RunConfig) -> None:
    """Run, then show how it ended."""
    from accelerate import PartialState

    from maskless.train.run import run

    summary = run(folder, config, err, begun=entry.begun)
    if not PartialState().is_main_process:
        return
    measured = summary.likelihood
    table = Table("model", "steps", "seconds", "tokens/s", "validation perplexity (bound)")
    table.add_row(
        config.train.model,
        f"{summary.steps:,}",
        f"{summary.seconds:,.0f}",
        f"{summary.tokens_per_second:,.0f}",
        f"{measured.perplexity:.2f} ± {or_unknown(measured.perplexity_error, '.2f')}",
    )
    out.print(table)
    for text in summary.samples:
        out.print(Panel(Text(text[:600]), title="sample", title_align="left", border_style="dim"))
    drawn = folder / "samples.png"
    tried = f"try: maskless generate {shlex.quote(str(folder))}"
    if drawn.exists():
        tried = f"samples: {drawn}   {tried} --out new.png"
    say(f"curve: {folder / 'loss.png'}   {tried}")


def qualities(found: ImageQuality) -> None:
    """A table of what two sets of pictures have in common."""
    from maskless.evaluate.sweep import described

    table = Table("FID", "precision", "recall", "Inception Score")
    score = "" if found.inception_score is None else f"{found.inception_score:.2f} ± {found.inception_score_error:.2f}"
    shares = ["" if share is None else f"{share:.3f}" for share in (found.precision, found.recall)]
    table.add_row(f"{found.fid:.3f}", *shares, score)
    out.print(table)
    say(described(found))


def bar(what: str, total: int | None = None) -> AbstractContextManager[Callable[..., None]]:
    """A bar on stderr, and what moves it."""
    return terminal.bar(err, what, total)


def sweeping(sweep: Callable[..., Iterable[P]], points: int, samples: int, named: Callable[[P], str]) -> list[P]:
    """All points of a sweep, with a bar: each takes so many samples, of which every process draws its share."""
    from accelerate import PartialState

    found: list[P] = []
    share, drawn = -(-samples // PartialState().num_processes), 0
    with bar("drawing", share * points) as move:

        def on_batch(amount: int) -> None:
            nonlocal drawn
            drawn += amount
            move(amount)
            if drawn >= share * (len(found) + 1):
                move(description="measuring what was drawn")

        for point in sweep(on_batch=on_batch):
            found.append(point)
            drawn = share * len(found)
            move(completed=drawn, description=f"drawing; {named(point)} done")
    return found


@contextmanager
def watching(what: str, marks: frozenset[int] = frozenset()) -> Iterator[Callable[[Step], None]]:
    """A bar that counts tokens as steps decide them, but for those that are no text."""
    with bar(what) as move:
        count = 0

        def on_step(step: Step) -> None:
            nonlocal count
            count += sum(token not in marks for token in step.tokens.tolist())
            move(description=f"{what}: step {step.number + 1}, {count:,} tokens")

        yield on_step
