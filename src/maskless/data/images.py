"""Pictures with their classes out of folders, archives, arrays and Hugging Face data sets, as a stream or as one array.

Shapes: N pictures, H, W height and width, s the side of a square, C channels: 3, or 1 if asked for grey.
"""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from maskless.data import hub, image_arrays, image_files, sources
from maskless.data.image_files import PICTURES, TARS, Entry, ImageSource, Store, is_picture
from maskless.data.image_pixels import FILTER, check_fit, fit
from maskless.data.split import VALID, share_of, side_of
from maskless.data.unpack import LIMITS, InputLimits

Broken = Callable[[str], None]  # told of each picture that is left out, in one line
Square = tuple[np.ndarray, int, str]  # a square (s, s, C), its label and its side, train or valid

WORKERS = min(8, os.cpu_count() or 1)
_EXPECTED = f"a folder, an archive ({', '.join(TARS)}, .zip), .npy, .npz, idx files, {', '.join(PICTURES)}, or hf:NAME"


@dataclass(frozen=True)
class Images:
    """Sources one after another.  names: what the user gave, without folders.  classes: () if there are none.

    Each picture has a split, train or valid, if the data as a whole has both; otherwise that is left open.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    sources: tuple[ImageSource, ...]

    @property
    def counts(self) -> Counter[str | None]:
        """How many pictures each split has, None: left open."""
        found: Counter[str | None] = Counter()
        for source in self.sources:
            found.update(source.counts)
        return found if {"train", "valid"} <= found.keys() else Counter({None: found.total()})

    @property
    def total(self) -> int:
        return self.counts.total()

    def count(self, split: str | None, valid: float = VALID) -> int:
        """How many pictures are on a side, or in all; those that turn out to be broken included."""
        if split is None:
            return self.total
        share = share_of(valid)
        sides = (side or side_of(unit, share) for side, count in self.counts.items() for unit in range(count))
        return sum(side == split for side in sides)

    def side(self) -> int:
        """Pixels along the shorter side of the first picture that can be read."""
        for _, entry in self.entries():
            with suppress(ValueError):
                return min(entry.load().shape[:2])
        raise ValueError(f"{', '.join(self.names)}: none of {self.total:,} pictures can be read")

    def entries(self, valid: float = VALID) -> Iterator[tuple[str, Entry]]:
        """All pictures, not yet decoded, each with its side: train or valid."""
        share, own = share_of(valid), "valid" in self.counts
        labels = {name: number for number, name in enumerate(self.classes)}
        unit = 0
        for source in self.sources:
            numbers = [labels[name] for name in source.classes]
            for entry in source.entries():
                label = numbers[entry.label] if numbers else image_files.UNLABELLED
                split = entry.split if own else None
                if split is None:
                    split, unit = side_of(unit, share), unit + 1
                yield split, entry._replace(label=label)

    def pictures(
        self,
        size: int,
        *,
        split: str | None = None,
        valid: float = VALID,
        filter: str = FILTER,
        channels: int = 3,
        workers: int = WORKERS,
        on_broken: Broken | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[Square]:
        """Squares with their labels and sides; `split` leaves out the other side.

        A broken picture is left out and told to `on_broken`; if nothing at all can be read, that is a ValueError.
        workers: threads that decode ahead.  share: which of how many processes this is, each has every so many-th.
        """
        check_fit(size, filter, channels)
        if split not in (None, "train", "valid"):
            raise ValueError(f"unknown split {split!r}: expected train or valid")
        entries = ((side, entry) for side, entry in self.entries(valid) if split in (None, side))
        found, broken, first = 0, 0, ""

        def make(entry: Entry) -> np.ndarray:
            return fit(entry.load(), size, filter, channels)

        for side, entry, square_of in _prefetched(islice(entries, share[0], None, share[1]), make, workers):
            try:
                square = square_of()
            except ValueError as error:
                line = f"{entry.where}: {error}"
                first, broken = first or line, broken + 1
                if on_broken:
                    on_broken(line)
                continue
            found += 1
            yield square, entry.label, side
        if broken and not found:
            raise ValueError(f"none of {broken:,} pictures can be read; {first}")


def _prefetched(
    entries: Iterator[tuple[str, Entry]], make: Callable[[Entry], np.ndarray], workers: int
) -> Iterator[tuple[str, Entry, Callable[[], np.ndarray]]]:
    """Entries in their order with what gives their squares, which threads have begun on."""
    if workers <= 1:
        yield from ((side, entry, partial(make, entry)) for side, entry in entries)
        return
    begun: deque[tuple[str, Entry, Callable[[], np.ndarray]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for side, entry in entries:
            begun.append((side, entry, pool.submit(make, entry).result))
            if len(begun) > 4 * workers:
                yield begun.popleft()
        yield from begun


# Inputs


def read_images(inputs: Sequence[str | Path], limits: InputLimits = LIMITS) -> Images:
    """The pictures of folders, archives, arrays and data sets, which can be gone through any number of times.

    A folder, or a .tar, .tar.gz, .tar.xz, .tar.bz2 or .zip of one, holds train/CLASS/... with val, valid, validation or
    test beside it, or CLASS/..., or pictures without classes, or CIFAR-10's binary version,
    or MNIST's kind of idx files, or .npy files. A .npz file has images and labels, x_train and y_train, or arr_0 and
    arr_1. hf:NAME[@CONFIG][:SPLIT] is a data set with a column of images.
    """
    if isinstance(inputs, str | Path):
        raise ValueError(f"inputs is {str(inputs)!r}: expected a list of folders, files or data sets")
    if not inputs:
        raise ValueError("no input: expected folders, archives, arrays or data sets of pictures")
    found = tuple(_resolve(given, limits) for given in inputs)
    bare = [name for name, source in zip(inputs, found, strict=True) if not source.classes]
    if bare and len(bare) < len(found):
        raise ValueError(f"{bare[0]}: pictures without classes, though other inputs have them")
    classes = dict.fromkeys(name for source in found for name in source.classes)  # in the order of their first input
    names = tuple(str(given) if _is_hub(given) else Path(given).resolve().name for given in inputs)
    return Images(names, tuple(classes), found)


def _is_hub(given: str | Path) -> bool:
    return isinstance(given, str) and given.startswith("hf:")


def _resolve(given: str | Path, limits: InputLimits) -> ImageSource:
    if isinstance(given, str) and _is_hub(given):
        return hub.pictures(given.removeprefix("hf:"))
    path = Path(given)
    if not path.exists():
        raise ValueError(f"{given}: no such file or folder; expected {_EXPECTED}")
    files = image_files.store(path, limits)
    read = partial(_recognise, files) if files else _reader(path, limits)
    if read is None:
        raise ValueError(f"{given}: no pictures in this kind of file; expected {_EXPECTED}")
    return read()


def _reader(path: Path, limits: InputLimits) -> Callable[[], ImageSource] | None:
    """What reads the pictures of a file that is no archive, None if it has none."""
    if image_arrays.is_idx(path.name):
        return partial(image_arrays.idx_file, path, limits)
    if path.suffix == ".npz":
        return lambda: image_arrays.arrays(image_files.Zip(path, limits), list(image_files.Zip(path, limits).walk()))
    if path.suffix == ".npy":
        return partial(image_arrays.npy_file, path)
    return partial(image_files.single, path) if is_picture(path.name) else None


def _cifar(name: str, suffix: str) -> bool:
    return re.fullmatch(rf"(?:.*/)?(?:data_batch_\d+|test_batch){suffix}", name) is not None


def _recognise(files: Store) -> ImageSource:
    """What a folder or an archive holds, by the names of its files."""
    folders, special = image_files.Folders(), list[str]()
    for name in files.walk():  # once: for an archive this unpacks all of it
        if is_picture(name):
            folders[tuple(name.split("/")[:-1])] += 1
        else:
            special.append(name)
    if batches := [name for name in special if _cifar(name, r"\.bin")]:
        return image_arrays.cifar_binary(files, batches)
    if any(_cifar(name, "") for name in special):
        raise ValueError(f"{files.path}: CIFAR-10's Python version is pickled; take its binary version (.bin)")
    if any(image_arrays.is_idx(name) for name in special):
        return image_arrays.idx(files, special)
    if image_arrays.npy_pairs(special):
        return image_arrays.arrays(files, special)
    return image_files.tree(files, folders)


def _has_pictures(given: str | Path, limits: InputLimits) -> bool:
    if isinstance(given, str) and _is_hub(given):
        return hub.has_images(given.removeprefix("hf:"))
    path = Path(given)
    if not path.exists():
        return False
    files = image_files.store(path, limits)
    if files is None:
        return _reader(path, limits) is not None
    texts = 0
    for name in files.walk():
        if image_arrays.is_idx(name) or _cifar(name, r"(?:\.bin|)") or name.endswith(".npy"):
            return True
        texts += -1 if is_picture(name) else name.lower().endswith(sources.TEXT_SUFFIXES + sources.JSON_SUFFIXES)
        if texts <= -1000:  # enough to tell
            return True
    return texts < 0


def looks_like_images(inputs: Sequence[str | Path], limits: InputLimits = LIMITS) -> bool:
    """Whether an input is pictures rather than text: more of its files are, or its data set has a column of images."""
    return any(_has_pictures(given, limits) for given in inputs)
