"""Documents out of text files, JSON lines, folders and Hugging Face data sets, as a stream in constant memory."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from maskless.data import hub, remote
from maskless.data.cuts import Cut, at_line_ends, between_words, evenly
from maskless.data.detokenize import detokenize
from maskless.data.unpack import LIMITS, InputLimits, in_words, kind, unpacked

PIECE = 1 << 16  # characters: the longest piece of a plain text file; of another document it has up to four times this
SHORTEST_PIECE = 1 << 10
PIECES = 64  # a file is cut into about this many pieces at least, so that even a small one can be split
TINY = 1 << 12  # bytes: a file below this that is all the input has smaller pieces, so that one can be held out
TINY_PIECE, TINY_PIECES = 1 << 5, 16  # characters at least, about so many
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md")

# Copies without loading scripts, which `datasets` no longer runs: repository and revision.
LM1B = ("dvruette/lm1b", None)
OPENWEBTEXT = ("Skylion007/openwebtext", "79d93d786212f7344586290adb811d4ae6a1762c")
OPENWEBTEXT_VALID = 100_000  # the last documents, held out as in the released code of the paper
OPENWEBTEXT_SHARDS = 64
REMOTE_UNITS = 1 << 40  # more than any one source has


class Chunk(NamedTuple):
    """A document or a part of one, short enough to be encoded: a tokenizer takes 200 bytes for each character.

    last: it ends its document.  unit: the number of what stays together in the train/valid split.
    ends: it ends its unit.  consumed: bytes of input read so far.  split: the side its data set puts it on, None if
    that is left open.
    """

    text: str
    last: bool
    unit: int
    ends: bool
    consumed: int = 0
    split: str | None = None


Part = tuple[str, bool, int]  # a chunk before its source has a place among others: text, last, consumed


@dataclass(frozen=True)
class TextSource:
    """One file, or one shard of a data set: `parts` starts reading it from the beginning.

    remote: it is read from afar, so as seldom as possible; its units have numbers of their own, since nobody counts
    those of the sources before it.  identity: changes where what is read does.
    """

    size: int
    parts: Callable[[], Iterator[Part]]
    split: str | None = None
    remote: bool = False
    identity: str = ""

    def chunks(self, unit: int = 0) -> Iterator[Chunk]:
        """All of it, its units numbered from `unit` on."""
        for text, last, consumed in self.parts():
            for start, end in between_words(text, PIECE):
                ends = end == len(text)
                yield Chunk(text[start:end], last and ends, unit, ends, consumed, self.split)
            unit += 1


@dataclass(frozen=True)
class Corpus:
    """Sources one after another.  names: what the user gave, without folders.  total: bytes, as they lie on disk."""

    names: tuple[str, ...]
    sources: tuple[TextSource, ...]

    @property
    def total(self) -> int:
        return sum(source.size for source in self.sources)

    def __iter__(self) -> Iterator[Chunk]:
        unit = before = 0
        for number, source in enumerate(self.sources):
            for chunk in source.chunks(self.first(number, unit)):
                unit = unit if source.remote else chunk.unit + chunk.ends
                yield chunk._replace(consumed=before + chunk.consumed)
            before += source.size

    def first(self, number: int, unit: int) -> int:
        """The number of a source's first unit; unit: how many the sources on disk before it have."""
        return number * REMOTE_UNITS if self.sources[number].remote else unit


def read(inputs: Sequence[str | Path], *, field: str = "text", limits: InputLimits = LIMITS) -> Corpus:
    """The documents of files, folders and data sets, which can be gone through any number of times.

    A text file is one document, in pieces cut at line ends; a JSON lines file has a document in `field` of each line;
    both may be packed (.gz, .xz, .zst); line ends are \\n.  A folder gives its files, sorted, hidden ones left out.
    Files and folders may be addresses that fsspec knows, such as https://..., s3://... and hf://...
    lm1b and openwebtext are the paper's data (lm1b:PLACE and openwebtext:PLACE take them from a local folder or another
    repository; a folder of that name is ./lm1b); hf:NAME[@CONFIG][:SPLIT] is any other data set, its validation or test
    split for validation if it has one and no SPLIT is named.  Data sets but for openwebtext are streamed.
    """
    if isinstance(inputs, str | Path):
        raise ValueError(f"inputs is {str(inputs)!r}: expected a list of files, folders or data sets")
    if not inputs:
        raise ValueError("no input: expected files, folders or data sets")
    names, sources = [], []
    for given in inputs:
        name, found = _resolve(given, field, limits, alone=len(inputs) == 1)
        names.append(name)
        sources += found
    return Corpus(tuple(names), tuple(sources))


def _resolve(given: str | Path, field: str, limits: InputLimits, alone: bool) -> tuple[str, list[TextSource]]:
    name, _, place = given.partition(":") if isinstance(given, str) else ("", "", "")
    if name in _NAMED:
        return name, list(_NAMED[name](place, field))
    if name == "hf" and place and not place.startswith("//"):
        return str(given), list(_any_dataset(place, field))
    path = remote.place(str(given)) if remote.is_address(given) else Path(given)
    with remote.reached(given):
        if path.is_dir():
            files = _under(path)
            return path.resolve().name, [_file(p, field, limits, alone and len(files) == 1) for p in files]
        if path.exists():
            return remote.name_of(path), [_file(path, field, limits, alone)]
    raise ValueError(f"{given}: no such file or folder, nor a data set ({', '.join(_NAMED)}, hf:NAME)")


# Files


def _under(folder: Any) -> list[Any]:
    wanted = JSON_SUFFIXES + TEXT_SUFFIXES
    below = ((p, p.as_posix().removeprefix(folder.as_posix())) for p in folder.rglob("*"))
    visible = (p for p, name in below if not any(part.startswith(".") for part in name.split("/")))
    files = sorted(p for p in visible if kind(p)[0] in wanted and p.is_file() and p.stat().st_size > 0)
    if not files:
        raise ValueError(f"{folder}: no text in this folder; expected files that end in {', '.join(wanted)}")
    return files


def _file(path: Any, field: str, limits: InputLimits, alone: bool) -> TextSource:
    """A source; path: a `Path`, or what has its methods."""
    if not path.is_file():
        raise ValueError(f"{path}: not a file")
    if kind(path)[0] in (".csv", ".tsv", ".parquet"):
        raise ValueError(f"{path}: a table; expected text, JSON lines with a document in a field, or hf:FOLDER")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path}: the file is empty")
    if kind(path)[0] in JSON_SUFFIXES:
        parts = partial(_documents, path, field, limits)
    elif alone and size < TINY and not kind(path)[1]:
        parts = partial(_pieces, path, limits, max(TINY_PIECE, size // TINY_PIECES), evenly)
    else:
        parts = partial(_pieces, path, limits, min(PIECE, max(SHORTEST_PIECE, size // PIECES)), at_line_ends)
    return TextSource(size, parts, remote=remote.is_address(path), identity=f"{path}, {size:,} bytes")


def _blocks(path: Any, limits: InputLimits) -> Iterator[tuple[bytes, int]]:
    """Stretches of what is in a file, and how far the reading of the file itself has come."""
    found = False
    with remote.opened(path) as raw:
        for block in unpacked(path, raw, limits):
            if b"\0" in block:
                raise ValueError(f"{path}: not text, it holds NUL bytes")
            found = found or bool(block)
            yield block, raw.tell()
    if not found:
        raise ValueError(f"{path}: the file is empty")


def _decoded(path: Any, limits: InputLimits) -> Iterator[tuple[str, int]]:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    try:
        consumed = 0
        for block, consumed in _blocks(path, limits):
            yield decoder.decode(block), consumed
        yield decoder.decode(b"", final=True), consumed
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason})") from error


def _pieces(path: Any, limits: InputLimits, piece: int, cut: Cut) -> Iterator[Part]:
    """The one document of a plain text file, in pieces; the newest waits until it is known not to be the last."""
    rest, ready, consumed = "", "", 0
    for text, consumed in _decoded(path, limits):
        rest += text
        start = 0
        while len(rest) - start >= piece and (end := cut(rest, start, piece)):
            if ready:
                yield (ready, False, consumed)
            ready, start = rest[start:end], end
        rest = rest[start:]
    if rest and ready:
        yield (ready, False, consumed)
    yield (rest or ready, True, consumed)


def _lines(path: Any, limits: InputLimits) -> Iterator[tuple[bytes, int]]:
    begun, length, number, consumed = list[bytes](), 0, 1, 0
    for block, consumed in _blocks(path, limits):
        first, *others = block.split(b"\n")
        begun.append(first)
        length += len(first)
        if length > limits.line:
            raise ValueError(
                f"{path}, line {number}: longer than {in_words(limits.line)}, and a JSON line is read as a whole; "
                f"allow more with `maskless prepare --max-line`"
            )
        if others:
            line, begun, length = b"".join(begun), [others[-1]], len(others[-1])
            yield line, consumed
            yield from ((line, consumed) for line in others[:-1])
            number += len(others)
    yield b"".join(begun), consumed


def _documents(path: Any, field: str, limits: InputLimits) -> Iterator[Part]:
    """The documents of a JSON lines file; empty ones are left out."""
    found = False
    for number, (line, consumed) in enumerate(_lines(path, limits), start=1):
        if line.strip() and (text := _document(line, field, f"{path}, line {number}")):
            found = True
            yield (text, True, consumed)
    if not found:
        raise ValueError(f"{path}: no documents in this file")


def _document(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON, expected one object per line ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}, expected one JSON object per line")
    if field not in record:
        raise ValueError(f"{where}: no field {field!r}, it has {', '.join(map(repr, record)) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}, expected a string")
    text = _well_formed(text) if b"\\u" in line or b"\xed" in line else text
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _well_formed(text: str) -> str:
    """JSON can spell half of a surrogate pair, which no encoding can hold: it becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# Data sets


def _texts(batches: Iterable[dict[str, Any]], field: str, mend: Callable[[str], str] | None) -> Iterator[str]:
    for text in (text for batch in batches for text in batch[field]):
        if not isinstance(text, str | None):
            raise ValueError(f"the field {field!r} is a {type(text).__name__}, expected a string")
        if text:
            yield mend(text) if mend else text


def _rows(place: str, data: Any, size: int, field: str, mend: Callable[[str], str] | None) -> Iterator[Part]:
    """The documents of a shard of about that size; the newest waits until it is known not to be the last."""
    read, waiting = 0, None
    for text in _texts(hub.batches(place, data), field, mend):
        if waiting is not None:
            yield (waiting, True, min(read, size))
        waiting, read = text, read + len(text)
    if waiting is not None:
        yield (waiting, True, size)


def _shards(
    given: hub.Streamed, field: str, side: str | None, mend: Callable[[str], str] | None = None
) -> Iterator[TextSource]:
    """The shards of a split of a data set, each a source that is streamed."""
    hub.check_field(given.place, given.data, field)
    for number, shard in enumerate(given.shards()):
        parts, identity = partial(_rows, given.place, shard, given.size, field, mend), f"{given.identity} {number}"
        yield TextSource(given.size, parts, side, remote=True, identity=identity)


def _lm1b(given: str, field: str) -> Iterator[TextSource]:
    """One Billion Words, detokenised; its test split is for validation, as in the released code."""
    place, revision = (given, None) if given else LM1B
    for name, split in (("train", "train"), ("test", "valid")):
        yield from _shards(hub.stream(place, name, revision=revision), field, split, detokenize)


def _openwebtext(given: str, field: str) -> Iterator[TextSource]:
    """OpenWebText; its last 100,000 documents are for validation, as in the released code: so it has to be on disk."""
    place, revision = (given, None) if given else OPENWEBTEXT
    data = hub.load(place, "train", revision=revision)
    hub.check_field(place, data, field)
    first = len(data) - OPENWEBTEXT_VALID
    if first <= 0:
        raise ValueError(f"{place!r} has {len(data):,} documents: expected more than {OPENWEBTEXT_VALID:,}")
    bounds = [*sorted({first * i // OPENWEBTEXT_SHARDS for i in range(OPENWEBTEXT_SHARDS + 1)}), len(data)]
    for begin, end in pairwise(bounds):
        size = max(1, data.data.nbytes * (end - begin) // len(data))
        parts = partial(_rows, place, data.select(range(begin, end)), size, field, None)
        yield TextSource(
            size, parts, "train" if end <= first else "valid", identity=f"{place} {revision} {begin}-{end}"
        )


def _any_dataset(given: str, field: str) -> Iterator[TextSource]:
    for side, found in hub.streams(given):
        yield from _shards(found, field, side)


_NAMED = {"lm1b": _lm1b, "openwebtext": _openwebtext}
