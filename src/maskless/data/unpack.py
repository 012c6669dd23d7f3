"""What packed files hold, a stretch at a time, and no more of it than is allowed."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

BLOCK = 1 << 16  # bytes read at once
SLICE = 1 << 12  # bytes of an archive unpacked at once: at worst they become a hundred megabytes
AT_ONCE = 1 << 27  # bytes: no picture, no list of labels and no header is longer
PACKED_SUFFIXES = (".gz", ".xz", ".zst")
# How a packed file begins, and what reads it.
_MAGIC: dict[bytes, Callable[[IO[bytes]], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
RATIO, FLOOR = 100, 10**9  # what a packed file may hold if nothing else is said: text has a ratio of 3 to 10


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """How large an input may turn out to be, in bytes.

    unpacked: what one packed file holds; None: a gigabyte, or a hundred times its size if that is more.
    line: a JSON line, which is read as a whole and takes up to ten times as much memory.
    """

    unpacked: int | None = None
    line: int = 256 * 10**6

    def of(self, path: Path) -> int:
        """What a packed file may hold."""
        return max(FLOOR, RATIO * path.stat().st_size) if self.unpacked is None else self.unpacked


LIMITS = InputLimits()


def too_much(where: object, most: int) -> ValueError:
    return ValueError(
        f"{where}: it unpacks to more than {in_words(most)}; if it is no trap, allow more with `maskless prepare "
        f"--max-unpacked`, or unpack it first"
    )


def in_words(size: int) -> str:
    """A number of bytes as one says it: 256 MB"""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:,.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:,} bytes"


def in_bytes(said: str) -> int:
    """A number of bytes, as one writes it: 500MB, 64GB, 1.5 TB, or a plain number"""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)b?", said.strip().lower())
    size = int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")) if found else 0
    if size < 1:
        raise ValueError(f"{said!r} is no size: expected a number of bytes such as 500MB or 64GB")
    return size


class Bounded(io.RawIOBase):
    """A stream of unpacked bytes that raises a ValueError instead of going further than `most`."""

    def __init__(self, stream: IO[bytes], most: int, where: object) -> None:
        self.stream, self.most, self.where = stream, most, where

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= AT_ONCE:
            raise ValueError(f"{self.where}: a part of it says that it has {size:,} bytes")
        data = self.stream.read(size)
        self._check(self.stream.tell())
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0:
            self._check(offset)
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def close(self) -> None:
        self.stream.close()
        super().close()

    def _check(self, position: int) -> None:
        if position > self.most:
            raise too_much(self.where, self.most)


def bounded(raw: IO[bytes], most: int, where: object) -> Bounded:
    """What is in a file, unpacked by how it begins, if it is packed; only then is there a bound."""
    begins = raw.read(5)
    raw.seek(0)
    unpack = next((unpack for magic, unpack in _MAGIC.items() if begins.startswith(magic)), None)
    return Bounded(unpack(raw), most, where) if unpack else Bounded(raw, sys.maxsize, where)


# Text


def kind(path: Any) -> tuple[str, str]:
    """What is in a file and how it is packed, by its suffixes: ("a.jsonl.gz") -> (".jsonl", ".gz")"""
    if "?" in str(path) and "://" in str(path):  # what an address asks for is no suffix
        path = PurePosixPath(str(path).partition("?")[0])
    packed = path.suffix.lower() if path.suffix.lower() in PACKED_SUFFIXES else ""
    return (path.with_suffix("") if packed else path).suffix.lower(), packed


def extra(module: str, what: str) -> Any:
    """A module that is not among the core dependencies."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f'{what} needs {module}: pip install "maskless[data]"') from error


def _machines(packed: str) -> tuple[Callable[[], Any], type[Exception]]:
    """A maker of decompressors, and what they raise when the archive is broken."""
    if packed == ".gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    if packed == ".xz":
        return lzma.LZMADecompressor, lzma.LZMAError
    zstandard = extra("zstandard", "a .zst file")
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


def _inflate(raw: BinaryIO, fresh: Callable[[], Any]) -> Iterator[bytes]:
    """The contents of a packed file, which may be several archives end to end."""
    machine = None
    while data := raw.read(SLICE):
        while data := data if machine else data.lstrip(b"\0"):  # padding between archives
            machine = machine or fresh()
            yield machine.decompress(data)
            data = machine.unused_data if machine.eof else b""
            machine = None if machine.eof else machine
    if machine is not None:
        raise EOFError("it ends too early")


def unpacked(path: Path, raw: BinaryIO, limits: InputLimits) -> Iterator[bytes]:
    """What is in a file of text, packed or not."""
    packed = kind(path)[1]
    if not packed:
        yield from iter(partial(raw.read, BLOCK), b"")
        return
    fresh, broken = _machines(packed)
    most, total = limits.of(path), 0
    try:
        for block in _inflate(raw, fresh):
            total += len(block)
            if total > most:
                raise too_much(path, most)
            yield block
    except (EOFError, broken) as error:
        raise ValueError(f"{path}: broken {packed} archive ({error})") from error
