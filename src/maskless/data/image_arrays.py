"""Pictures in arrays: MNIST's idx files, CIFAR-10's binary version, .npy and .npz files.

Shapes: N pictures, H, W their height and width, C channels.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np

from maskless.data.image_files import UNLABELLED, Entry, Folder, ImageSource, Store, whole
from maskless.data.image_pixels import as_pixels
from maskless.data.unpack import AT_ONCE, LIMITS, InputLimits, bounded, too_much

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MOST_CLASSES = 1 << 16
BLOCK = 1 << 20  # bytes of an array read at once
BYTE = np.dtype(np.uint8)

_IDX = re.compile(r"(?P<before>(?:.*/)?[^/]*)images(?P<after>[-._]idx)[34](?P<end>[-._]ubyte(?:\.gz)?)")
# Names of pictures and labels in .npz files, or of .npy files in a folder, and the split they are.
_PAIRS: tuple[tuple[str | None, str, str], ...] = (
    ("train", "x_train", "y_train"),
    ("train", "train_images", "train_labels"),
    ("valid", "x_val", "y_val"),
    ("valid", "val_images", "val_labels"),
    ("valid", "x_test", "y_test"),
    ("valid", "test_images", "test_labels"),
    (None, "images", "labels"),
    (None, "x", "y"),
    (None, "arr_0", "arr_1"),
)
NPZ_KEYS = "images and labels, x_train and y_train, or arr_0 and arr_1"

Rows = Callable[[], Iterator[np.ndarray]]  # pictures one by one, (H, W) or (H, W, C) or (C, H, W)


@dataclass(frozen=True)
class Part:
    """Pictures of one split that lie together, with a label each."""

    where: str
    split: str | None
    rows: Rows
    labels: np.ndarray | None  # (N,)
    count: int


def _source(parts: Sequence[Part], classes: tuple[str, ...] | None = None) -> ImageSource:
    """The parts as one source; without names of classes, these are their numbers."""
    labelled = [part.labels for part in parts if part.labels is not None]
    if labelled and len(labelled) < len(parts):
        bare = next(part.where for part in parts if part.labels is None)
        raise ValueError(f"{bare}: no labels for these pictures, though others have them")
    for part in parts:
        _check_labels(part, len(classes) if classes else MOST_CLASSES)
    if labelled and classes is None:
        classes = tuple(str(i) for i in range(1 + max(int(labels.max()) for labels in labelled)))
    counts: dict[str | None, int] = {}
    for part in parts:
        counts[part.split] = counts.get(part.split, 0) + part.count
    return ImageSource(classes or (), counts, partial(_entries, tuple(parts)))


def _check_labels(part: Part, classes: int) -> None:
    if part.count == 0:
        raise ValueError(f"{part.where}: no pictures in this file")
    if part.labels is None:
        return
    if len(part.labels) != part.count:
        raise ValueError(f"{part.where}: {part.count:,} pictures, but {len(part.labels):,} labels")
    wrong = (part.labels < 0) | (part.labels >= classes)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"{part.where}: picture {i} has the label {part.labels[i]}, expected 0 to {classes - 1}")


def _entries(parts: Sequence[Part]) -> Iterator[Entry]:
    for part in parts:
        for i, row in enumerate(part.rows()):
            label = UNLABELLED if part.labels is None else int(part.labels[i])
            yield Entry(f"{part.where}, picture {i}", label, part.split, partial(as_pixels, row))


def _stream(
    opened: Callable[[], IO[bytes]],
    where: str,
    shape: tuple[int, ...],
    dtype: np.dtype = BYTE,
    header: Callable[[IO[bytes], str], object] = lambda stream, where: None,
) -> Iterator[np.ndarray]:
    """The rows of an array whose bytes come next in a stream, behind its header, a block at a time."""
    size = math.prod(shape[1:]) * dtype.itemsize
    if size > AT_ONCE:
        raise ValueError(f"{where}: pictures of {size:,} bytes, expected {AT_ONCE:,} or fewer")
    step = max(1, BLOCK // max(1, size))
    with whole(where), opened() as stream:
        header(stream, where)
        for start in range(0, shape[0], step):
            count = min(step, shape[0] - start)
            data = stream.read(count * size)
            if len(data) < count * size:
                raise EOFError(f"{start + len(data) // size:,} of {shape[0]:,} pictures are there")
            yield from np.frombuffer(data, dtype).reshape(count, *shape[1:])


# MNIST


def _idx_open(files: Store, name: str) -> IO[bytes]:
    return cast(BinaryIO, bounded(files.open(name), files.most(name), f"{files.path}/{name}"))


def _idx_header(stream: IO[bytes], where: str) -> tuple[int, ...]:
    """The shape of an idx array of bytes, its magic number and sizes read off the stream."""
    magic = stream.read(4)
    if len(magic) < 4:
        raise EOFError("no header")
    if magic[:3] != b"\0\0\x08" or not 1 <= magic[3] <= 4:
        raise ValueError(f"{where}: it begins with {magic.hex()}, expected an idx file of bytes (00000801 to 00000804)")
    return struct.unpack(f">{magic[3]}I", stream.read(4 * magic[3]))


def _idx_part(files: Store, name: str, labels: str | None) -> Part:
    where = f"{files.path}/{name}"
    with whole(where), _idx_open(files, name) as stream:
        shape = _idx_header(stream, where)
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise ValueError(f"{where}: shape {shape}, expected (N, H, W) or (N, H, W, 1 or 3)")
    if name.endswith(".gz") and math.prod(shape) > files.most(name):
        raise too_much(where, files.most(name))
    given = None
    if labels is not None:
        with whole(f"{files.path}/{labels}"), _idx_open(files, labels) as stream:
            (count, *rest) = _idx_header(stream, labels)
            given = np.frombuffer(stream.read(count), np.uint8).astype(np.int64)
            if rest or len(given) < count:
                raise EOFError(f"{len(given):,} of {count:,} labels are there")
    split = "train" if "train" in name.lower() else "valid" if re.search("t10k|test|val", name.lower()) else None
    rows = partial(_stream, partial(_idx_open, files, name), where, shape, header=_idx_header)
    return Part(where, split, rows, given, shape[0])


def is_idx(name: str) -> bool:
    return _IDX.fullmatch(name) is not None


def idx(files: Store, names: Sequence[str], only: Sequence[str] | None = None) -> ImageSource:
    """MNIST's kind of files: ...images-idx3-ubyte with ...labels-idx1-ubyte beside it, packed as .gz or not."""
    parts = []
    for name in only if only is not None else [name for name in names if is_idx(name)]:
        found = _IDX.fullmatch(name)
        assert found is not None
        plain = f"{found['before']}labels{found['after']}1{found['end'].removesuffix('.gz')}"
        labels = next((other for other in (plain, f"{plain}.gz") if other in names), None)
        parts.append(_idx_part(files, name, labels))
    for split in {part.split for part in parts}:
        same = [part.where for part in parts if part.split == split]
        if len(same) > 1:
            raise ValueError(f"{same[0]} and {same[1]}: two sets of pictures for one split, name the files to take")
    return _source(parts)


def idx_file(path: Path, limits: InputLimits = LIMITS) -> ImageSource:
    """One idx file, with its labels if they are beside it."""
    return idx(Folder(path.parent, limits), [p.name for p in path.parent.iterdir()], [path.name])


# CIFAR-10


def _cifar_binary_rows(files: Store, name: str, count: int) -> Iterator[np.ndarray]:
    records = _stream(partial(files.open, name), f"{files.path}/{name}", (count, 3073))
    return (record[1:].reshape(3, 32, 32).transpose(1, 2, 0) for record in records)


def cifar_binary(files: Store, batches: Sequence[str]) -> ImageSource:
    """CIFAR-10's binary version: records of a label and 32x32 red, then green, then blue bytes."""
    parts = []
    for name in sorted(batches):
        where = f"{files.path}/{name}"
        labels, size = [], 0
        with whole(where), files.open(name) as stream:
            while block := stream.read(3073 << 8):
                labels.append(np.frombuffer(block, np.uint8)[::3073].astype(np.int64))
                size += len(block)
        if size % 3073:
            raise ValueError(f"{where}: {size:,} bytes, expected records of 3073 bytes; the file is broken or cut off")
        split = "valid" if "test" in Path(name).name else "train"
        count = size // 3073
        rows = partial(_cifar_binary_rows, files, name, count)
        parts.append(Part(where, split, rows, np.concatenate([*labels, np.empty(0, np.int64)]), count))
    return _source(parts, CIFAR)


# NumPy


def _npy_header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except ValueError as error:
        raise ValueError(f"{where}: not a NumPy array ({error})") from error
    if fortran and len(shape) > 1:
        raise ValueError(f"{where}: an array in Fortran order, expected C order")
    return shape, dtype


def _npy_part(files: Store, name: str, labels: str | None, split: str | None) -> Part:
    where = f"{files.path}/{name}"
    with whole(where), files.open(name) as stream:
        shape, dtype = _npy_header(stream, where)
    channels = len(shape) == 3 or (len(shape) == 4 and (shape[3] in (1, 3, 4) or shape[1] in (1, 3)))
    if dtype not in (np.uint8, np.uint16) or not channels or 0 in shape[1:]:
        raise ValueError(
            f"{where}: {dtype} of shape {shape}, expected uint8 or uint16, (N, H, W), (N, H, W, C) or (N, C, H, W)"
        )
    given = None
    if labels is not None:
        with whole(f"{files.path}/{labels}"), files.open(labels) as stream:
            given = _npy_labels(stream, f"{files.path}/{labels}")
    rows = partial(_stream, partial(files.open, name), where, shape, dtype, _npy_header)
    return Part(where, split, rows, given, shape[0])


def _npy_labels(stream: IO[Any], where: str) -> np.ndarray:
    try:
        labels = np.lib.format.read_array(stream, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{where}: not an array of labels ({error})") from error
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{where}: {labels.dtype} of shape {labels.shape}, expected whole numbers (N,)")
    return labels.astype(np.int64)


def npy_pairs(names: Sequence[str]) -> list[tuple[str | None, str, str | None]]:
    """Which arrays are pictures of which split, and which their labels: (split, pictures, labels)"""
    found: dict[str | None, tuple[str | None, str, str | None]] = {}
    for split, pictures, labels in _PAIRS:
        if f"{pictures}.npy" in names and split not in found:
            found[split] = (split, f"{pictures}.npy", f"{labels}.npy" if f"{labels}.npy" in names else None)
    return [pair for split, pair in found.items() if split is not None] or list(found.values())


def arrays(files: Store, names: Sequence[str]) -> ImageSource:
    """The arrays of a .npz file, or of .npy files in a folder, read a block at a time and without pickles."""
    pairs = npy_pairs(names)
    if not pairs:
        has = ", ".join(name.removesuffix(".npy") for name in names) or "nothing"
        raise ValueError(f"{files.path}: it has {has}; expected arrays called {NPZ_KEYS}")
    return _source([_npy_part(files, pictures, labels, split) for split, pictures, labels in pairs])


def npy_file(path: Path) -> ImageSource:
    """One .npy file of pictures without labels."""
    return _source([_npy_part(Folder(path.parent), path.name, None, None)])
