"""Pictures to a folder of token rows, ready to train on: encoded once, in constant memory, with their labels beside.

Shapes: B batch, N pictures, s pixels a side, C channels, h, w the grid of tokens, L = 1 + h*w with BOS first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from maskless.codec.vq import ImageCodec, check_indices, check_size, to_images
from maskless.data.image_pixels import FILTER, check_fit
from maskless.data.image_tokens import CODEC, LABELS, ImageSplit, PreparedImages, holds_images, label_path, open_images
from maskless.data.images import Square, read_images
from maskless.data.split import VALID
from maskless.data.tokens import DTYPES, SPLITS, bin_path, check_target, dtype_for
from maskless.data.unpack import LIMITS, InputLimits
from maskless.files import whole_folder

NAMED = 20  # broken pictures that the index names; the others are counted

Progress = Callable[[int, int, int], None]  # pictures seen, pictures to see, those of them left out as broken


class _Side:
    """The rows of one split on their way to disk, and their labels; mirrored rows wait aside, to follow the others."""

    def __init__(self, folder: Path, name: str, dtype: str, stack: ExitStack) -> None:
        self.folder, self.name, self.dtype = folder, name, DTYPES[dtype]
        self.file: IO[bytes] = stack.enter_context(bin_path(folder, name).open("wb"))
        self.waiting: IO[bytes] = stack.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115
        self.labels, self.mirrored = [np.empty(0, LABELS)], 0

    def add(self, rows: np.ndarray, labels: np.ndarray) -> None:
        """rows (n, L), labels (n,)"""
        self.file.write(rows.astype(self.dtype).tobytes())
        self.labels.append(labels.astype(LABELS))

    def mirror(self, rows: np.ndarray) -> None:
        self.waiting.write(rows.astype(self.dtype).tobytes())
        self.mirrored += len(rows)

    def finish(self, length: int, labelled: bool) -> ImageSplit:
        """What was written in all: the mirrored rows follow the others, their labels once more."""
        labels = np.concatenate(self.labels)
        pictures, rows = len(labels), len(labels) + self.mirrored
        if not pictures:
            raise ValueError(f"no pictures for the {self.name} split: give more of them, or two splits")
        self.waiting.seek(0)
        shutil.copyfileobj(self.waiting, self.file)
        if labelled:
            label_path(self.folder, self.name).write_bytes(np.resize(labels, rows).tobytes())
        return ImageSplit(rows=rows, tokens=rows * length, pictures=pictures)


def _rows(codec: ImageCodec, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Token rows of squares, and their grid.  (B, s, s, C) uint8 -> (B, L)"""
    indices = codec.encode(to_images(pixels)).cpu()  # (B, h, w)
    check_indices(indices, codec.codes)
    grid = (indices.shape[1], indices.shape[2])
    tokens = indices.flatten(1).numpy().astype(np.int64)
    return np.pad(tokens, ((0, 0), (1, 0)), constant_values=codec.codes + 1), grid


def _batches(pictures: Iterator[Square], batch: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Squares (B, s, s, C), labels (B,) and sides (B,)"""
    while taken := list(islice(pictures, batch)):
        squares, labels, sides = zip(*taken, strict=True)
        yield np.stack(squares), np.array(labels), np.array(sides)


def _check_ours(target: Path) -> None:
    if not holds_images(target):
        raise ValueError(f"{target}: not a folder of prepared pictures, so it is not overwritten")


def _write(
    pictures: Iterator[Square],
    codec: ImageCodec,
    folder: Path,
    *,
    batch: int,
    flips: bool,
    labelled: bool,
    report: Callable[[int], None],
) -> tuple[tuple[int, int], dict[str, ImageSplit]]:
    """Encodes pictures into the token files of a folder; their grid, and what each split has."""
    grid, done, dtype = (0, 0), 0, dtype_for(codec.codes + 2)
    with ExitStack() as stack:
        sides = {name: _Side(folder, name, dtype, stack) for name in SPLITS}
        for squares, labels, names in _batches(pictures, batch):
            rows, grid = _rows(codec, squares)
            for name, side in sides.items():
                these = names == name
                side.add(rows[these], labels[these])
                if flips and name == "train" and these.any():  # validation pictures are never mirrored
                    side.mirror(_rows(codec, squares[these, :, ::-1].copy())[0])
            done += len(squares)
            report(done)
        return grid, {name: side.finish(1 + grid[0] * grid[1], labelled) for name, side in sides.items()}


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
    overwrite: bool = False,
    limits: InputLimits = LIMITS,
    on_progress: Progress | None = None,
) -> PreparedImages:
    """The folder `out`, with train.bin, valid.bin, their labels, index.json and the codec.

    inputs: see `maskless.data.images.read_images`.  size: pixels a side.  flips: mirror the train pictures too, as the
    released code did not: row N + i is the mirror image of row i, encoded.  valid: the share of pictures held out,
    unless the data has its own split.  batch: pictures encoded at once.
    limits: how large a packed input may turn out to be.
    on_progress: called with pictures seen, pictures to see, and those left out as broken, which the index counts.
    `out` appears when all is done or never.
    """
    check_fit(size, filter, codec.channels)
    check_size(size, size, codec.factor)
    if batch < 1:
        raise ValueError(f"batch is {batch}: expected 1 or more")
    target = Path(out).resolve()
    check_target(target, overwrite, _check_ours)
    images, broken = read_images(inputs, limits), list[str]()

    def report(done: int) -> None:
        if on_progress:
            on_progress(done + len(broken), images.total, len(broken))

    how: dict[str, Any] = {"filter": filter, "channels": codec.channels}
    with whole_folder(target) as folder:
        pictures = images.pictures(size, valid=valid, on_broken=broken.append, **how)
        labelled = bool(images.classes)
        grid, splits = _write(pictures, codec, folder, batch=batch, flips=flips, labelled=labelled, report=report)
        prepared = PreparedImages(
            folder=folder,
            size=size,
            **how,
            grid=grid,
            codes=codec.codes,
            dtype=dtype_for(codec.codes + 2),
            classes=images.classes,
            flips=flips,
            skipped=len(broken),
            broken=tuple(broken[:NAMED]),
            sources=images.names,
            splits=splits,
        )
        codec.save(folder / CODEC)
        prepared.write()
    return open_images(out)
