"""Pictures in folders and archives, which are read where they lie: what is there, its classes and its splits."""

from __future__ import annotations

import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np

from maskless.data.image_pixels import decode
from maskless.data.unpack import AT_ONCE, LIMITS, InputLimits, bounded, in_words, too_much
from maskless.terminal import first_line

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
UNLABELLED = -1
# A folder's name, and the side it is for. Of those for validation the first that is there counts.
TRAIN, HELD_OUT = "train", ("val", "valid", "validation", "test")


class Entry(NamedTuple):
    """A picture not yet decoded.

    where: its file, or its place in one.  label: the number of its class, UNLABELLED if there are none.
    split: train or valid, None if that is left open.  load: its pixels, or a ValueError with the reason.
    """

    where: str
    label: int
    split: str | None
    load: Callable[[], np.ndarray]


@dataclass(frozen=True)
class ImageSource:
    """One input: `entries` starts reading it from the beginning.  counts: pictures of each split."""

    classes: tuple[str, ...]
    counts: Mapping[str | None, int]
    entries: Callable[[], Iterator[Entry]]


# Stores: files by name


class Store(ABC):
    """A tree of files."""

    def __init__(self, path: Path, limits: InputLimits = LIMITS) -> None:
        self.path, self.limits = path, limits

    def most(self, name: str = "") -> int:
        """Bytes that a packed file in it, or itself, may hold."""
        return self.limits.of(self.path)

    @abstractmethod
    def walk(self) -> Iterator[str]: ...  # the names of visible files, folders joined by /
    @abstractmethod
    def open(self, name: str) -> IO[bytes]: ...

    def each(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """The names of files and what reads them, now or later."""
        return ((name, partial(self.read, name)) for name in self.walk())

    def read(self, name: str) -> bytes:
        """All that is in a picture file; a ValueError about one that cannot be read."""
        try:
            with self.open(name) as stream:
                return _checked(stream.read(AT_ONCE + 1))
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise ValueError(getattr(error, "strerror", None) or str(error)) from error


def _visible(name: str) -> bool:
    return not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)


class Folder(Store):
    """The files under a folder, sorted."""

    def most(self, name: str = "") -> int:
        return self.limits.of(self.path / name)

    def walk(self) -> Iterator[str]:
        """Links are followed, but not in a circle, and a folder that has several names is read under the first.

        A side of the split may consist of links to folders beside it, so each side has its own names.
        """
        read, around = set[tuple[str | None, tuple[int, int]]](), dict[str, frozenset[tuple[int, int]]]()
        for folder, below, files in os.walk(self.path, followlinks=True):
            below[:] = sorted(filter(_visible, below))
            at, name = os.stat(folder), Path(folder).relative_to(self.path)
            here, above = (at.st_dev, at.st_ino), around.get(os.path.dirname(folder), frozenset())
            side = next((part for part in name.parts if part in (TRAIN, *HELD_OUT)), None)
            if here in above or (side, here) in read:
                below.clear()
                continue
            read.add((side, here))
            around[folder] = above | {here}
            yield from ((name / file).as_posix() for file in sorted(files) if _visible(file))

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")


def _checked(data: bytes) -> bytes:
    """What was read of a picture file; a ValueError if no picture can be as long."""
    if len(data) > AT_ONCE:
        raise ValueError(f"longer than {in_words(AT_ONCE)}, which no picture is")
    return data


@contextmanager
def whole(where: object) -> Iterator[None]:
    """Turns what a broken or cut-off file raises while it is read into one line that names it."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, struct.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        raise ValueError(f"{where}: the file is broken or cut off ({first_line(error).rstrip(':')})") from error


class Tar(Store):
    """The files of a tar archive, packed or not, in the order in which they lie there."""

    def _tar(self, raw: IO[bytes]) -> tarfile.TarFile:
        stream: Any = bounded(raw, self.most(), self.path)
        return tarfile.open(fileobj=stream, mode="r:")

    def _members(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
        with whole(self.path), self.path.open("rb") as raw, self._tar(raw) as tar:
            while member := tar.next():
                tar.members = []  # type: ignore[attr-defined]  # or it would remember all of them
                name = PurePosixPath(member.name).as_posix()
                if member.isfile() and _visible(name):
                    yield tar, member, name

    def walk(self) -> Iterator[str]:
        return (name for _, _, name in self._members())

    def open(self, name: str) -> IO[bytes]:
        with whole(self.path):
            tar = self._tar(self.path.open("rb"))  # open as long as the stream that is handed out
            while member := tar.next():
                if PurePosixPath(member.name).as_posix() == name and (stream := tar.extractfile(member)):
                    return stream
        raise ValueError(f"{self.path}: no file {name!r} in this archive")

    def each(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        for tar, member, name in self._members():
            if not is_picture(name):  # which may be large
                continue
            with whole(self.path):
                stream = tar.extractfile(member)
                data = stream.read(AT_ONCE + 1) if stream else b""
            yield name, partial(_checked, data)


class Zip(Store):
    """The files of a zip archive, sorted."""

    @cached_property
    def archive(self) -> zipfile.ZipFile:
        archive = zipfile.ZipFile(self.path)  # open as long as someone may read from it
        if sum(each.file_size for each in archive.infolist()) > self.most():
            raise too_much(self.path, self.most())
        return archive

    def walk(self) -> Iterator[str]:
        with whole(self.path):
            names = (each.filename for each in self.archive.infolist() if not each.is_dir())
        yield from sorted(filter(_visible, names))

    def open(self, name: str) -> IO[bytes]:
        return self.archive.open(name)


def store(path: Path, limits: InputLimits = LIMITS) -> Store | None:
    """What holds the files at a path, None if that is neither a folder nor an archive."""
    if path.is_dir():
        return Folder(path, limits)
    if path.name.lower().endswith(TARS):
        return Tar(path, limits)
    return Zip(path, limits) if path.suffix.lower() == ".zip" else None


# Trees of pictures


def is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURES)


@dataclass(frozen=True)
class Layout:
    """How a tree is laid out."""

    above: int  # folders around those of splits and classes
    sides: Mapping[str, str]  # the folders of splits, and which they are; empty without them
    labels: Mapping[str, int]  # of classes; empty without them

    def place(self, name: str) -> tuple[str | None, int] | None:
        """The split and the label of a file; None if it does not belong to the data."""
        if not is_picture(name):
            return None
        parts = name.split("/")[self.above :]
        split = None
        if self.sides:
            if parts[0] not in self.sides:
                return None
            split, parts = self.sides[parts[0]], parts[1:]
        return split, self.labels[parts[0]] if self.labels else UNLABELLED


Folders = Counter[tuple[str, ...]]  # how many pictures are in each


def layout(folders: Folders, path: Path) -> tuple[Layout, Counter[str | None]]:
    """The layout of a tree, and how many pictures each split has.

    train/CLASS/... with val, valid, validation or test beside it, CLASS/..., or pictures without classes; classes are
    numbered in the order of their sorted names. One folder around all of it makes no difference.
    """
    if not folders:
        raise ValueError(f"{path}: no pictures; expected files that end in {', '.join(PICTURES)}")
    above = 0
    while len(tops := {at[:1] for at in folders}) == 1 and min(map(len, folders)) > 1:
        if tops & {(side,) for side in (TRAIN, *HELD_OUT)}:
            break
        folders, above = Counter({at[1:]: count for at, count in folders.items()}), above + 1
    sides = _sides({at[0] if at else "" for at in folders})
    counts: Counter[str | None] = Counter()
    classes: dict[str | None, set[str]] = {}
    for at, count in folders.items():
        if sides and (not at or at[0] not in sides):
            continue
        split = sides[at[0]] if sides else None
        counts[split] += count
        classes.setdefault(split, set()).add("/".join(at[bool(sides) :][:1]))
    _check_classes(classes, path)
    known = sorted(classes.get("train") or next(iter(classes.values())))
    return Layout(above, sides, {} if known == [""] else {name: i for i, name in enumerate(known)}), counts


def _sides(tops: set[str]) -> dict[str, str]:
    """Which of the topmost folders are splits: none unless one is called train or all are, as a class may be "test"."""
    held_out = next((side for side in HELD_OUT if side in tops), None)
    if TRAIN not in tops and not tops <= set(HELD_OUT):
        return {}
    return ({TRAIN: "train"} if TRAIN in tops else {}) | ({held_out: "valid"} if held_out else {})


def _check_classes(classes: Mapping[str | None, set[str]], path: Path) -> None:
    for names in classes.values():
        if "" in names and len(names) > 1:
            one = min(names - {""})
            raise ValueError(f"{path}: pictures both beside and in the folders of classes (such as {one!r}): move them")
    if unknown := sorted(classes.get("valid", set()) - classes.get("train", set())) if "train" in classes else []:
        what = f"the class {unknown[0]!r}" if unknown[0] else "pictures outside the folders of classes"
        raise ValueError(f"{path}: its validation split has {what}, which its train split does not have")


def tree(files: Store, folders: Folders) -> ImageSource:
    """The pictures of a folder or an archive."""
    found, counts = layout(folders, files.path)
    return ImageSource(tuple(found.labels), counts, partial(_entries, files, found))


def _entries(files: Store, found: Layout) -> Iterator[Entry]:
    for name, read in files.each():
        if (place := found.place(name)) is not None:
            yield Entry(f"{files.path}/{name}", place[1], place[0], partial(_decoded, read))


def _decoded(read: Callable[[], bytes]) -> np.ndarray:
    return decode(read())


def single(path: Path) -> ImageSource:
    """One picture file."""
    entry = Entry(str(path), UNLABELLED, None, lambda: decode(Folder(path.parent).read(path.name)))
    return ImageSource((), {None: 1}, lambda: iter([entry]))
