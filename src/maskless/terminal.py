"""Texts of others on a terminal: a character that would steer it is shown, not obeyed; of an error, a line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters, but for tabs and line ends


def plain(text: str) -> str:
    """A text with a sign in the place of each character that steers a terminal: ␛ for ESC, which begins a command."""
    return _STEERING.sub(_sign, text)


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


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
