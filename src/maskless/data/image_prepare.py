"""Pictures to a folder of token rows, ready to train on: encoded once, in constant memory, with their labels beside.

Shapes: B batch, N pictures, s pixels a side, C channels, h, w the grid of tokens, L = 1 + h*w with BOS first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from maskless.codec.vq import ImageCodec, check_indices, check_size, to_images
from maskless.data.image_pixels import FILTER, check_fit
from maskless.data.image_tokens import (
    CODEC,
    LABELS,
    ImageSplit,
    PreparedImages,
    holds_images,
    label_path,
    open_images,
    write_index,
)
from maskless.data.images import VALID, WORKERS, read_images
from maskless.data.tokens import DTYPES, SPLITS, bin_path, dtype_for
from maskless.data.unpack import LIMITS, Limits
from maskless.files import whole_folder

NAMED = 20  # broken pictures that the index names; the others are counted

Progress = Callable[[int, int, int], None]  # pictures seen, pictures to see, those of them left out as broken


class _Writer:
    """Token files and label files that grow; mirrored rows wait in a file of their own, to follow all the others."""

    def __init__(self, folder: Path, dtype: str, labelled: bool) -> None:
        self.folder, self.dtype, self.labelled = folder, DTYPES[dtype], labelled
        self.pictures, self.mirrored = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        self.stack = ExitStack()
        self.files: dict[Path, Any] = {}
        for name in SPLITS:
            self._append(bin_path(folder, name), b"")
            if labelled:
                self._append(label_path(folder, name), b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def _append(self, path: Path, data: bytes) -> None:
        if path not in self.files:
            self.files[path] = self.stack.enter_context(path.open("w+b"))
        self.files[path].write(data)

    def add(self, split: str, rows: np.ndarray, labels: np.ndarray, mirrored: np.ndarray | None) -> None:
        """rows (n, L), labels (n,), mirrored (n, L)"""
        self._append(bin_path(self.folder, split), rows.astype(self.dtype).tobytes())
        if self.labelled:
            self._append(label_path(self.folder, split), labels.astype(LABELS).tobytes())
        self.pictures[split] += len(rows)
        if mirrored is not None:
            self._append(self._waiting(split), mirrored.astype(self.dtype).tobytes())
            self.mirrored[split] += len(mirrored)

    def _waiting(self, split: str) -> Path:
        return self.folder / f"{split}.mirrored"

    def finish(self) -> None:
        """Puts the mirrored rows behind the others, their labels once more."""
        for split in SPLITS:
            if not self.mirrored[split]:
                continue
            waiting = self.files[self._waiting(split)]
            waiting.seek(0)
            shutil.copyfileobj(waiting, self.files[bin_path(self.folder, split)])
            if self.labelled:
                labels = self.files[label_path(self.folder, split)]
                labels.seek(0)
                again = labels.read()  # 4 bytes a picture
                labels.write(again)
            self._waiting(split).unlink()

    def splits(self, length: int) -> dict[str, ImageSplit]:
        """What was written in all."""
        for name, count in self.pictures.items():
            if not count:
                raise ValueError(f"no pictures for the {name} split: give more of them, or two splits")
        rows = {name: count + self.mirrored[name] for name, count in self.pictures.items()}
        return {n: ImageSplit(rows=rows[n], tokens=rows[n] * length, pictures=self.pictures[n]) for n in SPLITS}


def _rows(codec: ImageCodec, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Token rows of squares, and their grid.  (B, s, s, C) uint8 -> (B, L)"""
    indices = codec.encode(to_images(pixels)).cpu()  # (B, h, w)
    check_indices(indices, codec.codes)
    grid = (indices.shape[1], indices.shape[2])
    tokens = indices.flatten(1).numpy().astype(np.int64)
    return np.pad(tokens, ((0, 0), (1, 0)), constant_values=codec.codes + 1), grid


class _Broken:
    """Counts pictures that cannot be read, and keeps the first lines about them."""

    def __init__(self) -> None:
        self.count, self.lines = 0, list[str]()

    def __call__(self, line: str) -> None:
        self.count += 1
        if len(self.lines) < NAMED:
            self.lines.append(line)


def _batches(pictures: Iterator[tuple[np.ndarray, int, str]], batch: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Squares (B, s, s, C), labels (B,) and sides (B,)"""
    while taken := list(islice(pictures, batch)):
        squares, labels, sides = zip(*taken, strict=True)
        yield np.stack(squares), np.array(labels), np.array(sides)


def _write(
    batches: Iterator[tuple[np.ndarray, ...]],
    codec: ImageCodec,
    out: _Writer,
    flips: bool,
    report: Callable[[int], None],
) -> tuple[int, int]:
    """Encodes all pictures into the files of a folder; returns the grid. Validation pictures are never mirrored."""
    grid, done = (0, 0), 0
    for squares, labels, sides in batches:
        rows, grid = _rows(codec, squares)
        for split in SPLITS:
            these = sides == split
            if these.any():
                mirror = flips and split == "train"
                mirrored = _rows(codec, squares[these, :, ::-1].copy())[0] if mirror else None
                out.add(split, rows[these], labels[these], mirrored)
        done += len(squares)
        report(done)
    out.finish()
    return grid


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{target} exists already: choose another folder, or say overwrite=True (--overwrite)")
    if not holds_images(target):
        raise ValueError(f"{target}: not a folder of prepared pictures, so it is not overwritten")


def prepare_images(
    inputs: Sequence[str | Path],
    out: str | Path,
    codec: ImageCodec,
    *,
    size: int,
    flips: bool = False,
    valid: float = VALID,
    filter: str = FILTER,
    batch: int = 64,
    workers: int = WORKERS,
    overwrite: bool = False,
    limits: Limits = LIMITS,
    on_progress: Progress | None = None,
) -> PreparedImages:
    """The folder `out`, with train.bin, valid.bin, their labels, index.json and the codec.

    inputs: see `maskless.data.images.read_images`.  size: pixels a side.  flips: mirror the train pictures too, as the
    released code did not: row N + i is the mirror image of row i, encoded.  valid: the share of pictures held out,
    unless the data has its own split.  batch: pictures encoded at once.  workers: threads that decode ahead.
    limits: how large a packed input may turn out to be.
    on_progress: called with pictures seen, pictures to see, and those left out as broken, which the index counts.
    `out` appears when all is done or never.
    """
    check_fit(size, filter, codec.channels)
    check_size(size, size, codec.factor)
    if batch < 1:
        raise ValueError(f"batch is {batch}: expected 1 or more")
    target = Path(out).resolve()
    _check_target(target, overwrite)
    images = read_images(inputs, limits)
    broken, dtype = _Broken(), dtype_for(codec.codes + 2)

    def report(done: int) -> None:
        if on_progress:
            on_progress(done + broken.count, images.total, broken.count)

    with whole_folder(target) as folder:
        pictures = images.pictures(
            size, valid=valid, filter=filter, channels=codec.channels, workers=workers, on_broken=broken
        )
        with _Writer(folder, dtype, bool(images.classes)) as writer:
            grid = _write(_batches(pictures, batch), codec, writer, flips, report)
        prepared = PreparedImages(
            folder=folder,
            size=size,
            filter=filter,
            channels=codec.channels,
            grid=grid,
            codes=codec.codes,
            dtype=dtype,
            classes=images.classes,
            flips=flips,
            skipped=broken.count,
            broken=tuple(broken.lines),
            sources=images.names,
            splits=writer.splits(1 + grid[0] * grid[1]),
        )
        codec.save(folder / CODEC)
        write_index(prepared)
    return open_images(out)
