"""Files at addresses such as https://... and s3://..., with the extra `data`: fsspec reads them, a block at a time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from maskless.data.unpack import extra
from maskless.terminal import first_line

T = TypeVar("T")


def is_address(given: object) -> bool:
    return "://" in str(given) and not isinstance(given, Path)


def place(address: str) -> Any:
    """What is at an address, with the methods of a `Path`."""
    upath = extra("upath", address)
    with reached(address):
        return upath.UPath(address)


@contextmanager
def reached(given: object) -> Iterator[None]:
    """What is wrong with an address, in one line: whichever library opens its kind has errors of its own."""
    try:
        yield
    except Exception as error:
        if not is_address(given) or str(error).startswith(str(given)):
            raise
        raise ValueError(f"{given}: {first_line(error)}") from error


def name_of(path: Any) -> str:
    """The name of a file, without what an address asks for behind it: .../a.jsonl?download=true -> a.jsonl"""
    return PurePosixPath(str(path).partition("?")[0]).name if is_address(path) else str(path.name)


class Afar:
    """A file that is read from afar: whatever goes wrong is an OSError that names it."""

    def __init__(self, path: Any) -> None:
        self.path, self.file = path, asked(path, path.open, "rb")

    def read(self, size: int) -> bytes:
        return asked(self.path, self.file.read, size)

    def tell(self) -> int:
        return int(self.file.tell())

    def close(self) -> None:
        self.file.close()


@contextmanager
def opened(path: Any) -> Iterator[Any]:
    """A file, here or afar, to be read from its beginning."""
    with closing(Afar(path)) if is_address(path) else path.open("rb") as file:
        yield file


def asked(where: object, ask: Callable[..., T], *words: Any) -> T:
    """What somebody afar answers."""
    try:
        return ask(*words)
    except Exception as error:
        raise OSError(errno.EIO, first_line(error), str(where)) from error
