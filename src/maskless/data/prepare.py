"""Text to a folder of token rows, ready to train on: encoded, split and laid out, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import numpy as np

from maskless.codec.text import TextCodec, train_bpe
from maskless.data.sources import Chunk, Corpus, read
from maskless.data.split import VALID, share_of, side_of
from maskless.data.tokens import DTYPES, SPLITS, Prepared, SplitIndex, bin_path, check_target, dtype_for, read_index
from maskless.data.unpack import LIMITS, InputLimits
from maskless.files import whole_folder

BPE_CHARACTERS = 100_000_000  # as much text as a vocabulary is learnt from
BATCH_CHARACTERS = 1 << 21  # encoded, and then written, at once
BATCH_CHUNKS = 1 << 13

Progress = Callable[[int, int, int], None]  # bytes read, bytes to read, tokens so far


def _side(chunk: Chunk, valid: Fraction) -> str:
    return chunk.split or side_of(chunk.unit, valid)


# Layouts: documents in, rows out


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
        self.eos = _special(codec, "packed", "eos")
        self.waiting: list[int] = []
        self.rows = self.tokens = self.bytes = 0

    def add(self, ids: Sequence[int], text: str) -> None:
        """The next part of a document."""
        self.waiting += ids
        self.bytes += len(text.encode())

    def end(self) -> None:
        """The document ends."""
        self.waiting.append(self.eos)

    def frame(self, body: np.ndarray) -> np.ndarray:
        return body

    def take(self) -> np.ndarray:
        """All rows that are complete.  -> (n, L)"""
        count = len(self.waiting) // self.width
        used = count * self.width
        rows = self.frame(np.array(self.waiting[:used], dtype=np.int64).reshape(count, self.width))
        self.waiting = self.waiting[used:]
        self.rows += count
        self.tokens += rows.size
        return rows

    def index(self) -> SplitIndex:
        """What was taken in all."""
        if not self.rows:
            raise ValueError(f"{len(self.waiting):,} tokens, and a row needs {self.width:,}")
        dropped = len(self.codec.decode(self.waiting).encode())
        return SplitIndex(rows=self.rows, tokens=self.tokens, bytes=max(self.bytes - dropped, 0))


class Wrapped(Packed):
    """Packed tokens between bos and eos in each row, as the paper's OpenWebText."""

    def __init__(self, codec: TextCodec, length: int) -> None:
        super().__init__(codec, length - 2)
        self.bos = _special(codec, "wrapped", "bos")

    def frame(self, body: np.ndarray) -> np.ndarray:
        return np.pad(body, ((0, 0), (1, 1)), constant_values=((0, 0), (self.bos, self.eos)))


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

    def add(self, ids: Sequence[int], text: str) -> None:
        self.document += ids[: max(self.length - len(self.document), 0)]  # more than fits tells that it was cut
        self.document_bytes += len(text.encode())

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


# The work


def _batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
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


def _training_text(corpus: Corpus, valid: Fraction, report: Callable[[int], None]) -> Iterator[str]:
    """Text of the train split, at most about BPE_CHARACTERS, taken evenly from all of the input."""
    taken, unit, wanted = 0, -1, False
    for batch in _batches(corpus):
        for chunk in batch:
            if chunk.unit != unit:  # a document is taken as a whole
                due = BPE_CHARACTERS * chunk.consumed / corpus.total
                unit, wanted = chunk.unit, taken <= due and _side(chunk, valid) == "train"
            if wanted:
                taken += len(chunk.text)
                yield chunk.text
        report(batch[-1].consumed)


def _write(
    corpus: Corpus,
    codec: TextCodec,
    splits: Mapping[str, Rows],
    folder: Path,
    dtype: np.dtype,
    valid: Fraction,
    report: Callable[[int, int], None],
) -> None:
    """Encodes the corpus into the token files of a folder."""
    tokens = 0
    unfinished: str | None = None  # the side that holds the beginning of a document
    with ExitStack() as stack:
        files = {name: stack.enter_context(bin_path(folder, name).open("wb")) for name in splits}
        for batch in _batches(corpus):
            for chunk, ids in zip(batch, codec.encode_batch([chunk.text for chunk in batch]), strict=True):
                side = _side(chunk, valid)
                if unfinished and splits[side].whole:
                    side = unfinished
                elif unfinished and unfinished != side:
                    splits[unfinished].end()  # its text goes on elsewhere, so here it ends
                splits[side].add(ids, chunk.text)
                tokens += len(ids)
                if chunk.last:
                    splits[side].end()
                unfinished = None if chunk.last else side
            for name, rows in splits.items():
                files[name].write(rows.take().astype(dtype).tobytes())
            report(batch[-1].consumed, tokens)


def _indices(splits: Mapping[str, Rows], valid: float) -> dict[str, SplitIndex]:
    found = {}
    for name, rows in splits.items():
        try:
            found[name] = rows.index()
        except ValueError as error:
            raise ValueError(
                f"too little text for the {name} split: {error}; give more text (at least 100 characters in a plain "
                f"file, or two documents), a smaller length, or another share for validation (`maskless prepare "
                f"--valid`, here {valid})"
            ) from error
    return found


def _check_options(codec: TextCodec | None, vocab: int | None, length: int, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: expected {', '.join(LAYOUTS)}")
    if (codec is None) == (vocab is None):
        raise ValueError("give either a codec, or the vocab of one to learn from the text")
    if length < 3:
        raise ValueError(f"length is {length}: expected 3 or more")


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    codec: TextCodec | None = None,
    vocab: int | None = None,
    length: int,
    layout: str = "packed",
    valid: float = VALID,
    field: str = "text",
    overwrite: bool = False,
    limits: InputLimits = LIMITS,
    on_progress: Progress | None = None,
) -> Path:
    """The folder `out`, with train.bin, valid.bin, index.json and tokenizer.json.

    inputs: see `maskless.data.sources.read`.  codec: or None to learn a byte-level BPE of `vocab` tokens from the text.
    valid: the share of documents (of pieces, in plain text files) held out, unless the data set has its own split.
    limits: how large the input may turn out to be.
    on_progress: called with bytes read, bytes to read and tokens so far.  `out` appears when all is done or never.
    """
    _check_options(codec, vocab, length, layout)
    share = share_of(valid)
    target = Path(out).resolve()
    check_target(target, overwrite, read_index)
    corpus = read(inputs, field=field, limits=limits)
    passes = 1 if codec else 2

    def report(consumed: int, tokens: int = 0) -> None:
        if on_progress:
            on_progress(consumed, passes * corpus.total, tokens)

    with whole_folder(target) as folder:
        if codec is None:
            assert vocab is not None
            codec = train_bpe(_training_text(corpus, share, report), vocab)
        before = (passes - 1) * corpus.total
        dtype = dtype_for(codec.vocab)
        splits = {name: LAYOUTS[layout](codec, length) for name in SPLITS}
        _write(corpus, codec, splits, folder, DTYPES[dtype], share, lambda done, n: report(before + done, n))
        index = Prepared(
            folder=folder,
            length=length,
            dtype=dtype,
            layout=layout,
            vocab=codec.vocab,
            bos=codec.bos,
            eos=codec.eos,
            pad=codec.pad,
            sources=corpus.names,
            splits=_indices(splits, valid),
        )
        codec.save(folder)
        index.write()
    return Path(out)
