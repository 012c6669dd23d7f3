"""Text to a folder of token rows, ready to train on: encoded once, split, laid out and written in constant memory."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol

import numpy as np

from maskless.codec.text import TextCodec, train_bpe
from maskless.data.sources import Chunk, Corpus, read
from maskless.data.tokens import DTYPES, SPLITS, Prepared, SplitIndex, bin_path, open_tokens, write_index

BPE_CHARACTERS = 100_000_000  # as much text as a vocabulary is learnt from
BATCH_CHARACTERS = 1 << 21  # encoded at once
FLUSH_TOKENS = 1 << 20  # held back before they go to disk

Progress = Callable[[int, int, int], None]  # bytes read, bytes to read, tokens so far


def in_valid(unit: int, valid: Fraction) -> bool:
    """Whether a unit is held out: one of every 1/valid consecutive ones, which one by a hash; early if they are few."""
    stratum = unit * valid.numerator // valid.denominator
    first, end = (-(-s * valid.denominator // valid.numerator) for s in (stratum, stratum + 1))
    if stratum == 0:
        return unit == min(1, end - 1)
    digest = hashlib.blake2b(str(stratum).encode(), digest_size=8).digest()
    return unit == first + int.from_bytes(digest, "big") % (end - first)


def _side(chunk: Chunk, valid: Fraction) -> str:
    return chunk.split or ("valid" if in_valid(chunk.unit, valid) else "train")


# Layouts: documents in, rows out


class Rows(Protocol):
    """Rows of one split on their way to disk."""

    whole: ClassVar[bool]  # a document stays on one side of the split
    rows: int
    tokens: int
    bytes: int

    def __init__(self, codec: TextCodec, length: int) -> None: ...
    def add(self, ids: Sequence[int], text: str) -> None: ...
    def end(self) -> None: ...
    def take(self, *, final: bool) -> np.ndarray: ...


def _need(codec: TextCodec, layout: str, *names: str) -> list[int]:
    ids = [getattr(codec, name) for name in names]
    if None in ids:
        missing = names[ids.index(None)]
        raise ValueError(f"the {layout} layout needs a {missing} token, and the tokenizer has none")
    return ids


class Packed:
    """Documents, each followed by eos, end to end; what is left at the end is dropped."""

    whole: ClassVar[bool] = False

    def __init__(self, codec: TextCodec, length: int) -> None:
        self.codec, self.width = codec, length
        (self.eos,) = _need(codec, "packed", "eos")
        self.waiting: list[int] = []
        self.rows = self.tokens = self.bytes = 0

    def add(self, ids: Sequence[int], text: str) -> None:
        self.waiting += ids
        self.bytes += len(text.encode())

    def end(self) -> None:
        self.waiting.append(self.eos)

    def frame(self, body: np.ndarray) -> np.ndarray:
        return body

    def take(self, *, final: bool) -> np.ndarray:
        """All whole rows there are.  (n, L)"""
        count = len(self.waiting) // self.width
        used = count * self.width
        rows = self.frame(np.array(self.waiting[:used], dtype=np.int64).reshape(count, self.width))
        self.waiting = self.waiting[used:]
        self.rows += count
        self.tokens += rows.size
        if final:
            self.bytes -= min(self.bytes, len(self.codec.decode(self.waiting).encode()))
        return rows


class Wrapped(Packed):
    """Packed rows between bos and eos, as the paper's OpenWebText."""

    def __init__(self, codec: TextCodec, length: int) -> None:
        super().__init__(codec, length - 2)
        self.bos, self.eos = _need(codec, "wrapped", "bos", "eos")

    def frame(self, body: np.ndarray) -> np.ndarray:
        return np.pad(body, ((0, 0), (1, 1)), constant_values=((0, 0), (self.bos, self.eos)))


class Padded:
    """A document a row, bos and eos around it, cut or filled up with pad, as the paper's LM1B."""

    whole: ClassVar[bool] = True

    def __init__(self, codec: TextCodec, length: int) -> None:
        self.codec, self.length = codec, length
        self.bos, self.eos, self.pad = _need(codec, "padded", "bos", "eos", "pad")
        self.document: list[int] = []
        self.written = 0
        self.waiting: list[list[int]] = []
        self.rows = self.tokens = self.bytes = 0

    def add(self, ids: Sequence[int], text: str) -> None:
        self.document += ids
        self.written += len(text.encode())

    def end(self) -> None:
        kept = self.document[: self.length - 2]
        cut = len(kept) < len(self.document)
        self.bytes += len(self.codec.decode(kept).encode()) if cut else self.written
        self.tokens += len(kept) + 2
        self.waiting.append([self.bos, *kept, self.eos] + [self.pad] * (self.length - 2 - len(kept)))
        self.document, self.written = [], 0

    def take(self, *, final: bool) -> np.ndarray:
        """All rows there are.  (n, L)"""
        rows = np.array(self.waiting, dtype=np.int64).reshape(-1, self.length)
        self.waiting = []
        self.rows += len(rows)
        return rows


LAYOUTS: dict[str, type[Rows]] = {"packed": Packed, "wrapped": Wrapped, "padded": Padded}
