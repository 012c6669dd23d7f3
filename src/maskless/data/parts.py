"""Encoded text in parts on disk, from which a preparation resumes: a part is a stretch of one source as tokens.

What is in a part follows from the source and the tokenizer alone, so the parts are the same whoever makes them, and
however often the work was stopped. A part appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from maskless.codec.text import TextCodec
from maskless.data.sources import Chunk, TextSource
from maskless.files import write_aside

PART_CHARACTERS = 1 << 25  # of a part: 15 to 70 MB on disk, half a minute of work
BATCH_CHARACTERS = 1 << 21  # encoded at once
BATCH_CHUNKS = 1 << 13
ENDS_UNIT, ENDS_DOCUMENT = 1, 2  # marks of a chunk


EncodedChunk = tuple[np.ndarray, int, int]  # its tokens, the bytes of its text, its marks


@dataclass(frozen=True)
class Encoded:
    """Chunks of a source in turn.  ids: of all of them, end to end.  last: whether the source has no more."""

    ids: np.ndarray  # (T,)
    lengths: np.ndarray  # (n,) tokens of each chunk
    bytes: np.ndarray  # (n,) of its text
    marks: np.ndarray  # (n,)
    last: np.ndarray  # () bool

    def chunks(self) -> Iterator[EncodedChunk]:
        ids = np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []
        return zip(ids, self.bytes.tolist(), self.marks.tolist(), strict=True)


def parts_of(folder: Path, source: int) -> Iterator[Encoded]:
    """What there is of a source, from its beginning on."""
    for number in count():
        path = _path(folder, source, number)
        if not path.exists():
            return
        with np.load(path) as held:
            yield Encoded(**held)


def chunks_of(folder: Path, source: int) -> Iterator[EncodedChunk]:
    """All chunks of a source that was encoded."""
    whole = False
    for part in parts_of(folder, source):
        yield from part.chunks()
        whole = bool(part.last)
    if not whole:
        raise ValueError(f"{folder}: a part of source {source} is missing; it must be one folder for all processes")


def _path(folder: Path, source: int, part: int) -> Path:
    return folder / f"{source:05}-{part:05}.npz"


def encode(
    source: TextSource, number: int, codec: TextCodec, folder: Path, dtype: np.dtype
) -> Iterator[tuple[int, int]]:
    """Make all parts of a source that are not there yet. -> how much of it was read, in bytes, and new tokens"""
    done, chunks = 0, source.chunks()
    for part in parts_of(folder, number):
        if part.last:
            return
        _pass(chunks, part, source)
        done += 1
    waiting, characters = list[Encoded](), 0
    for batch in batches(chunks):
        waiting.append(_encoded(batch, codec, dtype))
        yield batch[-1].consumed, len(waiting[-1].ids)
        characters += sum(len(chunk.text) for chunk in batch)
        if characters >= PART_CHARACTERS:
            _write(_path(folder, number, done), waiting, dtype, last=False)
            waiting, characters, done = [], 0, done + 1
    _write(_path(folder, number, done), waiting, dtype, last=True)


def batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    characters = 0
    for chunk in chunks:
        batch.append(chunk)
        characters += len(chunk.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_CHUNKS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _pass(chunks: Iterator[Chunk], part: Encoded, source: TextSource) -> None:
    """Read on behind a part, without encoding it again."""
    for size in part.bytes.tolist():
        chunk = next(chunks, None)
        if chunk is None or len(chunk.text.encode()) != size:
            raise ValueError(f"{source.identity}: it has changed since a part of it was prepared; name another --out")


def _encoded(batch: list[Chunk], codec: TextCodec, dtype: np.dtype) -> Encoded:
    ids = codec.encode_batch([chunk.text for chunk in batch])
    return Encoded(
        ids=np.concatenate([np.array(each, dtype=dtype) for each in ids]),
        lengths=np.array([len(each) for each in ids]),
        bytes=np.array([len(chunk.text.encode()) for chunk in batch]),
        marks=np.array([ENDS_UNIT * chunk.ends + ENDS_DOCUMENT * chunk.last for chunk in batch]),
        last=np.array(False),
    )


def _write(path: Path, waiting: list[Encoded], dtype: np.dtype, *, last: bool) -> None:
    empty = np.empty(0, dtype=np.int64)
    names = {"ids": empty.astype(dtype), "lengths": empty, "bytes": empty, "marks": empty}
    fields: dict[str, Any] = {
        name: np.concatenate([none, *(getattr(each, name) for each in waiting)]) for name, none in names.items()
    }
    write_aside(path, lambda aside: np.savez(aside, **fields, last=np.array(last)))
