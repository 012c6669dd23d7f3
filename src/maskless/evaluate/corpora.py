"""Text to measure on: a prepared folder, or plain text that a model's own tokenizer lays out on the fly."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maskless.checkpoint import Model
from maskless.codec.text import TextCodec
from maskless.data.image_tokens import holds_images
from maskless.data.layouts import LAYOUTS, Padded
from maskless.data.sources import JSON_SUFFIXES, read
from maskless.data.tokens import DTYPES, Prepared, SplitIndex, TokenRows, open_tokens
from maskless.data.unpack import kind
from maskless.evaluate.genppl import Sample, sample_of
from maskless.evaluate.likelihood import spread

ENOUGH = 1 << 24  # characters of plain text that are read at most: a measurement takes some thousand rows of it


@dataclass(frozen=True)
class TextSet:
    """Rows of tokens with their name; pad: what does not count; bytes_per_token: of text, for a token that counts."""

    name: str
    rows: TokenRows
    pad: int | None
    bytes_per_token: float
    codec: TextCodec | None
    layout: str = "packed"

    def characters_per_byte(self) -> float:
        """Of the text of some rows: 1 for plain English, less for other scripts."""
        texts = [sample.text.replace("\ufffd", "") for sample in self.samples(256)]
        return sum(map(len, texts)) / max(1, sum(len(text.encode()) for text in texts))

    def samples(self, sequences: int) -> list[Sample]:
        """Evenly spread rows, to be measured as if a model had drawn them."""
        if self.codec is None:
            raise ValueError(f"{self.name}: the text of its tokens needs a tokenizer")
        rows = self.rows.rows(spread(len(self.rows), sequences)).tolist()
        return [sample_of(row, self.codec, self.layout) for row in rows]


@contextmanager
def corpus(name: str, model: Model, where: str, split: str = "valid") -> Iterator[TextSet]:
    """What --data names: a prepared folder's split, or a text file, all of it, as the model would be trained on it.

    For a model of padded rows, a document of JSON lines is a row, and so is each stretch of plain text that fits one.
    where: the model by the name that a message gives it.
    """
    path = Path(name)
    if path.is_file():
        yield from _plain(name, model)
        return
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if holds_images(path):
        raise ValueError(f"{path} holds pictures, {where} is a text model")
    prepared = open_tokens(path)
    check_vocabulary(where, model, prepared)
    rows, pad = prepared.split(split), prepared.pad
    size = _bytes_per_token(prepared.splits[split], prepared.length, pad)
    yield TextSet(name, rows, pad, size, prepared.codec(), prepared.layout)


def check_vocabulary(name: str, model: Model, data: Prepared) -> None:
    """Raise a ValueError about data that the model cannot read."""
    if isinstance(model.codec, TextCodec):
        fits = data.codec().tokenizer.get_vocab() == model.codec.tokenizer.get_vocab()
    else:
        fits = data.vocab <= model.config.vocab
    if not fits:
        raise ValueError(f"the data in {data.folder} has another vocabulary: prepare it with the tokenizer of {name}")
    if model.config.length < data.length:
        raise ValueError(
            f"{name} has a context of {model.config.length} tokens, the data in {data.folder} {data.length}"
        )


class _Pieces(Padded):
    """Padded rows of a text that has no documents: each takes the next piece of it that fits."""

    def add(self, ids: Sequence[int] | np.ndarray, size: int) -> None:
        self.document_bytes += size
        rest, room = [*self.document, *ids], self.length - 2
        while len(rest) > room:
            self.document, rest = rest[:room], rest[room:]
            self.end()
        self.document = rest


def _plain(name: str, model: Model) -> Iterator[TextSet]:
    codec = model.codec
    if not isinstance(codec, TextCodec):
        raise ValueError(f"{name} is plain text, and this model brings no tokenizer: name a prepared folder")
    documents = kind(Path(name))[0] in JSON_SUFFIXES
    layout = LAYOUTS[model.layout] if documents or model.layout != "padded" else _Pieces
    rows = layout(codec, model.config.length)
    parts, characters = [], 0
    for chunk in read([name]):
        rows.add(codec.encode(chunk.text), len(chunk.text.encode()))
        characters += len(chunk.text)
        if chunk.last or characters >= ENOUGH:
            rows.end()
        parts.append(rows.take())
        if characters >= ENOUGH:
            break
    try:
        size = rows.index()
    except ValueError as error:
        raise ValueError(f"{name} has too little text: {error}") from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.bin"
        path.write_bytes(np.concatenate(parts).astype(DTYPES["uint32"]).tobytes())
        held = TokenRows(path, "uint32", size.rows, model.config.length)
        pad = codec.pad if model.layout == "padded" else None
        yield TextSet(name, held, pad, _bytes_per_token(size, held.length, pad), codec, model.layout)


def _bytes_per_token(size: SplitIndex, length: int, pad: int | None) -> float:
    """Bytes of text for each token that counts: without a pad all of a row do, those that fill it up too."""
    return size.bytes / (size.rows * length if pad is None else size.tokens)
