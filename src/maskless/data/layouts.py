"""Layouts of prepared text: documents in, rows of tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from maskless.codec.text import TextCodec
from maskless.data.tokens import SplitIndex


def _special(codec: TextCodec, layout: str, name: str) -> int:
    token: int | None = getattr(codec, name)
    if token is None:
        raise ValueError(f"the {layout} layout needs a {name} token, and this tokenizer has none")
    return token


class Packed:
    """Documents, each followed by eos, end to end; what does not fill a row at the end is dropped."""

    whole: ClassVar[bool] = False  # a document stays on one side of the split

    def __init__(self, codec: TextCodec, length: int) -> None:
        self.codec, self.width = codec, length
        self.eos = np.array([_special(codec, "packed", "eos")])
        self.waiting: list[np.ndarray] = []
        self.rows = self.tokens = self.bytes = 0

    def add(self, ids: Sequence[int] | np.ndarray, size: int) -> None:
        """The next part of a document; size: its text in bytes."""
        self.waiting.append(np.asarray(ids, dtype=np.int64))
        self.bytes += size

    def end(self) -> None:
        """The document ends."""
        self.waiting.append(self.eos)

    def frame(self, body: np.ndarray) -> np.ndarray:
        return body

    def take(self) -> np.ndarray:
        """All rows that are complete.  -> (n, L)"""
        flat = np.concatenate([*self.waiting, np.empty(0, dtype=np.int64)])
        count = len(flat) // self.width
        used = count * self.width
        rows = self.frame(flat[:used].reshape(count, self.width))
        self.waiting = [flat[used:].copy()]
        self.rows += count
        self.tokens += rows.size
        return rows

    def index(self) -> SplitIndex:
        """What was taken in all."""
        rest = np.concatenate([*self.waiting, np.empty(0, dtype=np.int64)])
        if not self.rows:
            raise ValueError(f"{len(rest):,} tokens, and a row needs {self.width:,}")
        dropped = len(self.codec.decode(rest).encode())
        return SplitIndex(rows=self.rows, tokens=self.tokens, bytes=max(self.bytes - dropped, 0))


class Wrapped(Packed):
    """Packed tokens between bos and eos in each row, as the paper's OpenWebText."""

    def __init__(self, codec: TextCodec, length: int) -> None:
        super().__init__(codec, length - 2)
        self.bos = _special(codec, "wrapped", "bos")

    def frame(self, body: np.ndarray) -> np.ndarray:
        return np.pad(body, ((0, 0), (1, 1)), constant_values=((0, 0), (self.bos, self.eos[0])))


class Padded:
    """A document in each row, between bos and eos, cut or filled up with pad, as the paper's LM1B.

    A vocabulary without a pad fills up with eos, which then counts in the loss like any token.
    """

    whole: ClassVar[bool] = True

    def __init__(self, codec: TextCodec, length: int) -> None:
        self.codec, self.length = codec, length
        self.bos, self.eos = (_special(codec, "padded", name) for name in ("bos", "eos"))
        self.pad = self.eos if codec.pad is None else codec.pad
        self.document: list[int] = []
        self.document_bytes = 0
        self.waiting: list[list[int]] = []
        self.rows = self.tokens = self.bytes = 0

    def add(self, ids: Sequence[int] | np.ndarray, size: int) -> None:
        self.document += list(ids[: max(self.length - len(self.document), 0)])  # more than fits tells that it was cut
        self.document_bytes += size

    def end(self) -> None:
        kept = self.document[: self.length - 2]
        cut = len(kept) < len(self.document)
        self.bytes += len(self.codec.decode(kept).encode()) if cut else self.document_bytes
        self.tokens += len(kept) + 2
        self.waiting.append([self.bos, *kept, self.eos] + [self.pad] * (self.length - 2 - len(kept)))
        self.document, self.document_bytes = [], 0

    def take(self) -> np.ndarray:
        rows = np.array(self.waiting, dtype=np.int64).reshape(-1, self.length)
        self.waiting = []
        self.rows += len(rows)
        return rows

    def index(self) -> SplitIndex:
        if not self.rows:
            raise ValueError("no documents, and each row needs one")
        return SplitIndex(rows=self.rows, tokens=self.tokens, bytes=self.bytes)


Rows = Packed | Padded
LAYOUTS: dict[str, Callable[[TextCodec, int], Rows]] = {"packed": Packed, "wrapped": Wrapped, "padded": Padded}
