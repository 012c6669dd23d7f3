"""What reaches a terminal: texts of others, of which no character steers it, an error's first line, and a bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

# A sign for each control character, but for tabs and line ends.
_SIGNS = {i: 0x2400 + i for i in range(0x20) if chr(i) not in "\t\n"} | {0x7F: 0x2421}
_SIGNS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def plain(text: str) -> str:
    """A text with a sign in the place of each character that steers a terminal: ␛ for ESC, which begins a command."""
    return text.translate(_SIGNS)


def first_line(error: BaseException) -> str:
    """What an error says, in its first line; where it says nothing, what it is called."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def say(text: str) -> None:
    """Print a text: plain on a terminal, as it is into a file or a pipe."""
    print(plain(text) if sys.stdout.isatty() else text, flush=True)


class Screen(Console):
    """A console whose own colours and bars reach the terminal, and no command that a text brings along."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            ours = segment.control or not self.is_terminal
            yield segment if ours else segment._replace(text=plain(segment.text))


@contextmanager
def bar(console: Console, what: str, total: int | None = None, *, shown: bool = True) -> Iterator[Callable[..., None]]:
    """A bar on the terminal of the first of several processes, gone afterwards, and what moves it: by an amount.

    Or by what `Progress.update` takes: completed, total, description.
    """
    share, left = TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn()
    hidden = not (shown and console.is_terminal and os.environ.get("RANK", "0") == "0")
    look = (TextColumn("{task.description}"), BarColumn(), share, left)
    with Progress(*look, console=console, transient=True, disable=hidden) as drawn:
        task = drawn.add_task(what, total=total)
        yield lambda amount=None, **more: drawn.update(task, advance=amount, **more)
