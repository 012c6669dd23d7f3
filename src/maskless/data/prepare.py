"""Text to a folder of token rows, ready to train on: encoded, split and laid out, in constant memory.

The sources are encoded in parts, by any number of processes; then one of them lays out the rows. A preparation that was
stopped resumes where the same command is given again, and its result is that of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from maskless.codec.text import TextCodec, train_bpe
from maskless.data import parts
from maskless.data.layouts import LAYOUTS, Rows
from maskless.data.sources import Corpus, read
from maskless.data.split import VALID, share_of, side_of
from maskless.data.tokens import DTYPES, SPLITS, Prepared, SplitIndex, bin_path, check_target, dtype_for, read_index
from maskless.data.unpack import LIMITS, InputLimits
from maskless.files import LOCK, locked, whole_folder, write_json

BPE_CHARACTERS = 100_000_000  # as much text as a vocabulary is learnt from
AT_ONCE = 1 << 20  # tokens laid out at once
ABOUT, TOKENIZER = "about.json", "tokenizer.json"  # beside the parts: what they were made from, what was learnt

Progress = Callable[[int, int, int], None]  # bytes read, bytes to read, tokens so far


class Together(Protocol):
    """The processes that prepare together, as `accelerate.PartialState` has them."""

    process_index: int
    num_processes: int

    def wait_for_everyone(self) -> None: ...


class Alone:
    """One process."""

    process_index, num_processes = 0, 1

    def wait_for_everyone(self) -> None: ...


def _training_text(corpus: Corpus, valid: Fraction, report: Callable[[int], None]) -> Iterator[str]:
    """Text of the train split, at most about BPE_CHARACTERS, taken evenly from all of the input.

    Of what is read from afar it is the beginning of each file: to read it twice would take as long as the work itself.
    """
    taken, due, units, before = 0, 0.0, 0, 0
    for number, source in enumerate(corpus.sources):
        unit, wanted = -1, False
        for batch in parts.batches(source.chunks(corpus.first(number, units))):
            for chunk in batch:
                if chunk.unit != unit:  # a document is taken as a whole
                    due = BPE_CHARACTERS * (before + (source.size if source.remote else chunk.consumed)) / corpus.total
                    unit, wanted = chunk.unit, taken <= due and _side(chunk.split, chunk.unit, valid) == "train"
                if wanted:
                    taken += len(chunk.text)
                    yield chunk.text
            report(before + batch[-1].consumed)
            if source.remote and taken > due:
                break
        units = units if source.remote else unit + 1
        before += source.size


def _side(split: str | None, unit: int, valid: Fraction) -> str:
    return split or side_of(unit, valid)


def _lay_out(corpus: Corpus, made: Path, splits: Mapping[str, Rows], folder: Path, dtype: Any, valid: Fraction) -> None:
    """Rows from the parts of all sources into the token files of a folder."""
    units = waiting = 0
    unfinished: str | None = None  # the side that holds the beginning of a document
    with ExitStack() as stack:
        files = {name: stack.enter_context(bin_path(folder, name).open("wb")) for name in splits}

        def write() -> None:
            for name, rows in splits.items():
                files[name].write(rows.take().astype(dtype).tobytes())

        for number, source in enumerate(corpus.sources):
            unit = corpus.first(number, units)
            for ids, size, marks in parts.chunks_of(made, number):
                side = _side(source.split, unit, valid)
                if unfinished and splits[side].whole:
                    side = unfinished
                elif unfinished and unfinished != side:
                    splits[unfinished].end()  # its text goes on elsewhere, so here it ends
                splits[side].add(ids, size)
                if marks & parts.ENDS_DOCUMENT:
                    splits[side].end()
                unfinished = None if marks & parts.ENDS_DOCUMENT else side
                unit += bool(marks & parts.ENDS_UNIT)
                waiting += len(ids)
                if waiting >= AT_ONCE:
                    write()
                    waiting = 0
            units = units if source.remote else unit
        write()


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


# The work


def parts_folder(target: Path) -> Path:
    """Where the parts are until all is done."""
    return target.with_name(f".{target.name}.parts")


@contextmanager
def _kept(folder: Path, about: Mapping[str, Any]) -> Iterator[None]:
    """A folder of parts: those that are there stay if they are of the same text and tokenizer.

    After an error the parts that are complete stay; where there are none, nothing does.
    """
    with locked(folder):
        try:
            if json.loads((folder / ABOUT).read_text()) != about:
                raise ValueError
        except (OSError, ValueError):
            _clear(folder)
            write_json(folder / ABOUT, about)
        try:
            yield
        finally:
            if not any(folder.glob("*.npz")):
                _clear(folder)
    with suppress(OSError):  # not empty
        folder.rmdir()


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


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
    together: Together | None = None,
) -> Path:
    """The folder `out`, with train.bin, valid.bin, index.json and tokenizer.json.

    inputs: see `maskless.data.sources.read`.  codec: or None to learn a byte-level BPE of `vocab` tokens from the text.
    valid: the share of documents (of pieces, in plain text files) held out, unless the data set has its own split.
    limits: how large the input may turn out to be.
    on_progress: called with bytes read, bytes to read and tokens so far.  `out` appears when all is done or never.
    together: the processes that share the work, each of which calls this; the folder of `out` must be one for all.
    """
    _check_options(codec, vocab, length, layout)
    share, at = share_of(valid), together or Alone()
    target, first = Path(out).resolve(), at.process_index == 0
    check_target(target, overwrite, read_index)
    corpus, made = read(inputs, field=field, limits=limits), parts_folder(target)
    own = range(at.process_index, len(corpus.sources), at.num_processes)
    learning = 0 if codec else corpus.total
    most = learning + sum(corpus.sources[number].size for number in own)

    def report(consumed: int, tokens: int = 0) -> None:
        if on_progress:
            on_progress(consumed, most, tokens)

    with _kept(made, _about(corpus, field, codec, vocab, share)) if first else nullcontext():
        if first and codec is None and not (made / TOKENIZER).exists():
            assert vocab is not None
            train_bpe(_training_text(corpus, share, report), vocab).save(made)
        at.wait_for_everyone()
        if not (made / ABOUT).exists():
            raise ValueError(f"{target.parent} is not the folder of the first process: expected one that all share")
        codec = codec or TextCodec.load(made)
        LAYOUTS[layout](codec, length)  # a token that it needs and has not shows before the work
        _encode(corpus, own, codec, made, lambda consumed, tokens: report(learning + consumed, tokens))
        at.wait_for_everyone()
        if first:
            _finish(corpus, made, target, codec, length, layout, valid)
        at.wait_for_everyone()
    return Path(out)


def _about(corpus: Corpus, field: str, codec: TextCodec | None, vocab: int | None, valid: Fraction) -> dict[str, Any]:
    """What parts follow from."""
    if codec is None:
        tokenizer = f"{vocab} tokens, learnt without {valid} of the text"
    else:
        tokenizer = hashlib.sha256(codec.tokenizer.to_str().encode()).hexdigest()
    return {"sources": [source.identity for source in corpus.sources], "field": field, "tokenizer": tokenizer}


def _encode(
    corpus: Corpus, numbers: Iterable[int], codec: TextCodec, made: Path, report: Callable[[int, int], None]
) -> None:
    """The parts of some sources."""
    before = tokens = 0
    for number in numbers:
        source = corpus.sources[number]
        for consumed, new in parts.encode(source, number, codec, made, DTYPES[dtype_for(codec.vocab)]):
            tokens += new
            report(before + consumed, tokens)
        before += source.size


def _finish(corpus: Corpus, made: Path, target: Path, codec: TextCodec, length: int, layout: str, valid: float) -> None:
    """The prepared folder, in place of its parts; too little text leaves neither."""
    dtype = dtype_for(codec.vocab)
    splits = {name: LAYOUTS[layout](codec, length) for name in SPLITS}
    try:
        with whole_folder(target) as folder:
            _lay_out(corpus, made, splits, folder, DTYPES[dtype], share_of(valid))
            codec.save(folder)
            Prepared(
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
            ).write()
    except ValueError:
        _clear(made)
        raise
    _clear(made)
