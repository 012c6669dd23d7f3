"""Where a text is cut into pieces: at line ends, evenly where every row counts, or between words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Cut = Callable[[str, int, int], int]  # text, where the piece starts, its length -> where it ends, 0 if not to be seen
PLACE = re.compile(r"(?<=\n)| ")

# Where tokenizers cut anyway: before the space between two words, or else behind a word and before a space or a mark.
# An apostrophe may belong to the word before it, and so may marks that are not listed.
WORDS = re.compile(r"(?<=[^\W_])(?= [^\W_])")
MARKS = re.compile(
    r"(?<=[^\W_])(?=[ \t\n!-&(-/:-@\[-^`{-~\u2014\u2026\u3001\u3002\u300a-\u300f"
    r"\uff01\uff08\uff09\uff0c\uff0e\uff1a\uff1b\uff1f])"
)


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


def between_words(text: str, piece: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a text start and end; one of at most four pieces stays whole.

    The tokens of the pieces are those of the whole text for tokenizers that look at one word at a time: byte-level
    BPE, WordPiece, bytes. Where three pieces on end have no place for that, a piece is cut at its full length.
    """
    start = 0
    while len(text) - start > 4 * piece:
        window = start + piece, start + 4 * piece
        found = WORDS.search(text, *window) or MARKS.search(text, *window)
        end = found.start() if found else window[1]
        yield start, end
        start = end
    yield start, len(text)
