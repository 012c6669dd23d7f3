"""The shipped models at work, behind `make run`: a story in any order, gaps filled, a row of pictures, and a race."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from maskless.codec.text import TextCodec, parse_gaps
from maskless.drafts import OnStep, Step
from maskless.images import pixels_of
from maskless.revision import steps_of

COLOURS = ("red", "yellow", "green", "cyan", "blue", "magenta")
UNKNOWN = "·"
MILESTONES = 4  # how often a text is shown on its way where there is no terminal
STORY_STEPS, FILL_STEPS, RACE_STEPS, PICTURE_STEPS = 64, 32, 32, 32
ROUNDS = 16  # in which a text is looked over again
HOW: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "revise": ROUNDS}
RACE_TEXTS, PICTURES, GUIDANCE = 4, 10, 8.0
SECONDS = 6.0  # how long a text takes to appear on a terminal at least, so that eyes can follow


def show(
    console: Console,
    *,
    model: str,
    rival: str,
    drawing: str,
    prompt: str,
    text: str,
    picture: Path,
    seed: int,
    device: str | None = None,
) -> None:
    """Show what each model does; one that is not there is passed over with a line that says so."""
    console.rule("[bold]maskless[/]: generation in any order, without a mask token")
    writer, twin, painter = (_found(name, device, console) for name in (model, rival, drawing))
    if writer is None and painter is None:
        raise ValueError(f"nothing to show: neither {model!r} nor {drawing!r} is there; name a model of yours")
    if writer is not None:
        console.print(f"\n[bold]{escape(model)}[/] writes, in any order, and looks it over again:", highlight=False)
        _write(console, writer, prompt, seed)
        console.print("\nand fills in what you leave open:", highlight=False)
        _fill(console, writer, text, seed)
    if painter is not None:
        _draw(console, painter, picture, seed)
    if writer is not None and twin is not None:
        with console.status("racing ..."):
            raced = _race({model: writer, rival: twin}, seed)
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


class Page:
    """A text on its way: what is known so far, the newest tokens in the colour of their step.

    came: the step of each position, -1 where it was given, -2 where nothing is known yet.
    """

    def __init__(self, codec: TextCodec, tokens: list[int], known: list[bool]):
        self.codec, self.tokens = codec, list(tokens)
        self.came = [-1 if given else -2 for given in known]
        self.step = -1

    def take(self, step: Step) -> None:
        """Put down what a step decided in the only row."""
        self.step = step.number
        for position, token in zip(step.positions.tolist(), step.tokens.tolist(), strict=True):
            self.tokens[position], self.came[position] = token, step.number

    def line(self) -> Line:
        """The text as it stands; nothing is shown of the token that ends it, and of what was not decided a dot."""
        line = Line()
        for token, came in zip(self.tokens, self.came, strict=True):
            if came == -2:
                line.append(UNKNOWN, style="dim")
            elif token not in (self.codec.bos, self.codec.eos, self.codec.pad):
                style = f"bold {COLOURS[came % len(COLOURS)]}" if came >= 0 and came == self.step else ""
                line.append(self.codec.token_text(token), style=style or ("" if came >= 0 else "underline"))
        return line


def _write(console: Console, model: Model, prompt: str, seed: int) -> None:
    codec, length = model.text_codec, model.config.length
    given = (model.lead + codec.encode(prompt))[: length - 1]
    page = Page(codec, given + [0] * (length - len(given)), [i < len(given) for i in range(length)])
    steps = min(STORY_STEPS, length - len(given))
    with _watched(console, page, steps + sum(steps_of(steps, ROUNDS))) as watch:
        api.generate(model, 1, prompt=prompt, steps=steps, seed=seed, on_step=watch, **HOW)


def _fill(console: Console, model: Model, text: str, seed: int) -> None:
    codec, lead = model.text_codec, model.lead
    template = parse_gaps(codec, text)
    page = Page(codec, lead + template.tokens, [True] * len(lead) + template.known)
    steps = min(FILL_STEPS, template.known.count(False))
    with _watched(console, page, steps + sum(steps_of(steps, ROUNDS))) as watch:
        api.fill(model, text, steps=steps, seed=seed, on_step=watch, **HOW)


@contextmanager
def _watched(console: Console, page: Page, steps: int) -> Iterator[OnStep]:
    """Shows a page as it fills and is looked over: in its place on a terminal, a few times otherwise."""

    def shown() -> Padding:
        return Padding(page.line(), (0, 0, 0, 2))

    def printed() -> None:
        console.print(f"  after {page.step + 1} of {steps} steps", style="dim", highlight=False)
        console.print(shown())

    def now_and_then(step: Step) -> None:
        page.take(step)
        if (step.number + 1) * MILESTONES // steps > step.number * MILESTONES // steps:
            printed()

    if not console.is_terminal:
        printed()
        yield now_and_then
        return
    with Live(console=console, refresh_per_second=12) as live:

        def each(step: Step) -> None:
            page.take(step)
            live.update(shown())
            time.sleep(SECONDS / steps)

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
    """How fast each model writes the same number of texts in the same number of steps, one after the other."""
    table = Table("model", "kind", "steps", title=f"\n{RACE_TEXTS} texts at once", title_justify="left")
    table.add_column("tokens/s", justify="right")
    speeds = []
    for name, model in models.items():
        steps = None if model.kind == "causal" else min(RACE_STEPS, model.config.length - 1)
        first = steps if model.device.type == "cuda" or steps is None else 1
        api.generate(model, RACE_TEXTS, steps=first, seed=seed)  # folds the weights; on CUDA captures every step
        begin = time.monotonic()
        texts = api.generate(model, RACE_TEXTS, steps=steps, seed=seed)
        seconds = time.monotonic() - begin
        kind = {"partition": "PGM", "masked": "MDLM"}.get(model.kind, model.kind)
        speeds.append(sum(text.written for text in texts) / seconds)
        table.add_row(name, kind, str(1 + max(texts[0].steps)), f"{speeds[-1]:,.0f}")
    table.caption, table.caption_justify = f"{speeds[0] / speeds[1]:.1f} times the speed", "left"
    return table
