"""Where a plain text is cut into pieces: at line ends, or evenly where it is so short that every row counts."""

from __future__ import annotations

import re
from collections.abc import Callable

Cut = Callable[[str, int, int], int]  # text, where the piece starts, its length -> where it ends, 0 if not to be seen
PLACE = re.compile(r"(?<=\n)| ")


def at_line_ends(text: str, start: int, piece: int) -> int:
    """Where the piece from `start` ends: behind a line end, in a very long line before a space, 0 if not to be seen."""
    end = text.rfind("\n", start, start + piece) + 1 or text.find("\n", start + piece, start + 4 * piece) + 1
    if end or len(text) - start < 4 * piece:
        return end
    return max(text.rfind(" ", start + 1, start + 4 * piece), 0) or start + 4 * piece


def evenly(text: str, start: int, piece: int) -> int:
    """As `at_line_ends`, but no piece is shorter than asked for, the last one neither: behind a line or a word."""
    if len(text) - start < 3 * piece:
        return 0
    found = PLACE.search(text, start + piece, start + 2 * piece)
    return found.start() if found else start + piece
