"""The shipped models at work, behind `make run`: stories, gaps filled, a row of pictures, and a race."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as Line

from maskless import api, pictures
from maskless.checkpoint import Model
from maskless.codec.text import parse_gaps
from maskless.drafts import OnStep, Step
from maskless.images import pixels_of
from maskless.shipped import KINDS

COLOURS = ("red", "yellow", "green", "cyan", "blue", "magenta")
UNKNOWN = "·"
GIVEN, OPEN = -1, -2  # positions that no step has decided
MILESTONES = 4  # how often a text is shown on its way where there is no terminal
STRANDS = 8
RACE_TEXTS, PICTURES, PICTURE_STEPS, GUIDANCE = 4, 10, 32, 8.0
SECONDS = 5.0  # how long a text takes to appear on a terminal at least, so that eyes can follow


def show(
    console: Console,
    *,
    model: str,
    rivals: Sequence[str],
    drawing: str,
    prompt: str,
    text: str,
    picture: Path,
    seed: int,
    device: str | None = None,
) -> None:
    """Show what each model does; one that is not there is passed over with a line that says so."""
    console.rule("[bold]maskless[/]: generation in parallel and in any order, without a mask token")
    writer, painter, *found = (_found(name, device, console) for name in (model, drawing, *rivals))
    if writer is None and painter is None:
        raise ValueError(f"nothing to show: neither {model!r} nor {drawing!r} is there; name a model of yours")
    if writer is not None:
        console.print(f"\n[bold]{escape(model)}[/] writes a story:", highlight=False)
        _write(console, writer, prompt, seed)
        if _in_strands(writer):
            console.print(f"\n{STRANDS} parts of a story at once, in fewer steps:", highlight=False)
            _write(console, writer, prompt, seed, strands=STRANDS)
        console.print("\nand fills in what you leave open:", highlight=False)
        fill(console, writer, text, seed)
    if painter is not None:
        _draw(console, painter, picture, seed)
    twins = {name: twin for name, twin in zip(rivals, found, strict=True) if twin is not None}
    if writer is not None and twins:
        with console.status("racing ..."):
            raced = _race({model: writer} | twins, seed)
        console.print(raced)
    if writer is not None:
        line = f"\nnext: maskless fill {model} 'One day, Max saw a [4] and [10].'"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _found(name: str, device: str | None, console: Console) -> Model | None:
    try:
        with console.status(Line(f"loading {name} ...")):
            return api.load(name, device=device)
    except ValueError as error:
        console.print(f"passed over: {error}", style="dim", highlight=False, soft_wrap=True, markup=False)
        return None


def _in_strands(model: Model) -> bool:
    """Whether a model was trained to write so many parts of a text in step."""
    return model.mixture is not None and STRANDS in model.mixture.strands(model.config.length)


class Page:
    """A text on its way: what is known so far, the newest tokens in the colour of their step.

    came: the step of each position, GIVEN or OPEN.
    """

    def __init__(self, model: Model, tokens: list[int], known: list[bool]):
        self.codec, self.tokens = model.text_codec, list(tokens)
        self.came = [GIVEN if given else OPEN for given in known]
        self.step = -1
        behind = max((i + 1 for i, given in enumerate(known) if given), default=0)
        self.ends = behind if model.layout == "padded" else len(known)  # from here on an end mark ends the text

    def take(self, step: Step) -> None:
        """Put down what a step decided in the only row."""
        self.step = step.number
        for position, token in zip(step.positions.tolist(), step.tokens.tolist(), strict=True):
            self.tokens[position], self.came[position] = token, step.number

    def line(self) -> Line:
        """The text as it stands, up to its end where that is decided; of what was not decided a dot."""
        line = Line()
        for position, (token, came) in enumerate(zip(self.tokens, self.came, strict=True)):
            if came == OPEN:
                line.append(UNKNOWN, style="dim")
            elif token == self.codec.eos and position >= self.ends:
                break
            elif token not in (self.codec.bos, self.codec.eos, self.codec.pad):
                style = f"bold {COLOURS[came % len(COLOURS)]}" if came >= 0 and came == self.step else ""
                line.append(self.codec.token_text(token), style=style or ("" if came >= 0 else "underline"))
        return line


def _write(console: Console, model: Model, prompt: str, seed: int, **how: Any) -> None:
    length = model.config.length
    given = (model.lead + model.text_codec.encode(prompt))[: length - 1]
    page = Page(model, given + [0] * (length - len(given)), [i < len(given) for i in range(length)])
    with _watched(console, page) as watch:
        api.generate(model, 1, prompt=prompt, seed=seed, on_step=watch, **how)


def fill(console: Console, model: Model, text: str, seed: int) -> api.Text:
    """A text with its gaps filled, shown as they fill."""
    template = parse_gaps(model.text_codec, text).behind(model.lead)
    with _watched(console, Page(model, template.tokens, template.known)) as watch:
        filled: api.Text = api.fill(model, text, seed=seed, on_step=watch)
    return filled


@contextmanager
def _watched(console: Console, page: Page) -> Iterator[OnStep]:
    """Shows a page as it fills: in its place on a terminal, a few times otherwise."""
    total, last = page.came.count(OPEN), ""

    def shown() -> Padding:
        return Padding(page.line(), (0, 0, 0, 2))

    def printed() -> None:
        nonlocal last
        if page.line().plain == last:  # behind its end a text changes no more
            return
        n, last = page.step + 1, page.line().plain
        console.print(f"  after {n} step{'s' * (n != 1)}", style="dim", highlight=False)
        console.print(shown())

    def part() -> int:
        return (total - page.came.count(OPEN)) * MILESTONES // total

    def now_and_then(step: Step) -> None:
        before = part()
        page.take(step)
        if before < part() < MILESTONES:
            printed()

    if not console.is_terminal:
        printed()
        yield now_and_then
        printed()
        return
    with Live(console=console, refresh_per_second=12) as live:

        def each(step: Step) -> None:
            before = page.line().plain
            page.take(step)
            live.update(shown())
            if page.line().plain != before:
                time.sleep(SECONDS * len(step.positions) / total)

        yield each
        live.update(shown())


def _draw(console: Console, model: Model, to: Path, seed: int) -> None:
    if model.layout != "image":
        raise ValueError("the pictures of the demonstration come from an image model: this is a text model")
    labels = list(model.classes[:PICTURES]) or None
    how = {"steps": min(PICTURE_STEPS, model.config.length - 1), "seed": seed, "guidance": GUIDANCE if labels else 0.0}
    with console.status("drawing ..."):
        drawn = api.generate(model, None if labels else PICTURES, labels=labels, **how)
    pictures.grid(pixels_of(drawn), to, labels=labels, columns=len(drawn))
    console.print(f"\n{to}: {len(drawn)} pictures", highlight=False, soft_wrap=True)


def _race(models: dict[str, Model], seed: int) -> Table:
    """How fast each model writes the same number of texts, with its own settings, and in strands if it can."""
    table = Table("model", "kind", "steps", title=f"\n{RACE_TEXTS} texts at once", title_justify="left")
    table.add_column("tokens/s", justify="right")
    for name, model in models.items():
        ways: list[dict[str, Any]] = [{}, {"strands": STRANDS}] if _in_strands(model) else [{}]
        for how in ways:
            warm = how if model.device.type == "cuda" else {"length": 2}
            api.generate(model, RACE_TEXTS, seed=seed, **warm)  # folds the weights; on CUDA captures every step
            begin = time.monotonic()
            texts = api.generate(model, RACE_TEXTS, seed=seed, **how)
            speed = sum(text.written for text in texts) / (time.monotonic() - begin)
            kind = KINDS[model.kind].upper() + f", {STRANDS} strands" * bool(how)
            table.add_row(name, kind, str(1 + max(texts[0].steps)), f"{speed:,.0f}")
    known = [f"{name}: {model.quality}" for name, model in models.items() if model.quality]
    table.caption, table.caption_justify = "\n".join(known) or None, "left"
    return table
