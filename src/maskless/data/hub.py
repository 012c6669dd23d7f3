"""Hugging Face data sets, with the extra `data`: on disk or as streams, by split, or the pictures of one."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maskless.data.image_files import UNLABELLED, Entry, ImageSource
from maskless.data.image_pixels import decode
from maskless.data.remote import asked, is_address
from maskless.data.remote import place as place_at
from maskless.data.unpack import extra
from maskless.terminal import first_line

_LABELS = ("label", "labels", "fine_label", "class", "target")  # of whole numbers, where no column names its classes


def load(place: str, split: str | None, *, config: str | None = None, revision: str | None = None) -> Any:
    """A split of a data set, on disk and memory-mapped; without a split, the names of its splits."""
    datasets = extra("datasets", f"the data set {place!r}")
    with _loading(place, datasets):
        if split is None:
            return datasets.get_dataset_split_names(place, config, revision=revision)
        return datasets.load_dataset(place, config, split=split, revision=revision)


@contextmanager
def _loading(place: str, datasets: Any) -> Iterator[None]:
    """What is wrong with a data set, in one line."""
    try:
        yield
    except (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise ValueError(f"cannot load the data set {place!r}: {first_line(error)}") from error


def _wanted(given: str) -> tuple[str, str | None, list[tuple[str | None, str]]]:
    """Place and configuration of NAME[@CONFIG][:SPLIT], and its splits by side.

    If no split is named, the validation or test split is held out.
    """
    name, _, split = given.partition(":")
    place, _, config = name.partition("@")
    if split:
        return place, config or None, [(None, split)]
    names = load(place, None, config=config or None)
    if "train" not in names:
        raise ValueError(f"the data set {place!r} has no split 'train'; add :SPLIT with one of {', '.join(names)}")
    held_out = next((name for name in ("validation", "valid", "test") if name in names), None)
    if held_out is None:
        return place, config or None, [(None, "train")]
    return place, config or None, [("train", "train"), ("valid", held_out)]


def splits(given: str) -> Iterator[tuple[str | None, Any]]:
    """What NAME[@CONFIG][:SPLIT] names, by side, on disk."""
    place, config, wanted = _wanted(given)
    for side, split in wanted:
        yield side, load(place, split, config=config)


# Streams


@dataclass(frozen=True)
class Streamed:
    """A split that is read as it is asked for, and stays where it is.  size: of a shard, about, in bytes."""

    place: str
    data: Any
    size: int
    identity: str  # changes where the data set does

    def shards(self) -> list[Any]:
        """As many streams as the split has files."""
        n = self.data.num_shards
        return [self.data.shard(n, number) for number in range(n)]


def stream(place: str, split: str, *, config: str | None = None, revision: str | None = None) -> Streamed:
    """A split of a data set."""
    datasets = extra("datasets", f"the data set {place!r}")
    with _loading(place, datasets):
        builder = datasets.load_dataset_builder(place, config, revision=revision)
        data = builder.as_streaming_dataset(split)
        told = (builder.info.splits or {}).get(split)
        files = (builder.config.data_files or {}).get(split, [])
        size = told.num_bytes // data.num_shards if told and told.num_bytes else _size(files)
    return Streamed(place, data, max(1, size), f"{place} {builder.hash} {split}")


def streams(given: str) -> Iterator[tuple[str | None, Streamed]]:
    """What NAME[@CONFIG][:SPLIT] names, by side, as streams."""
    place, config, wanted = _wanted(given)
    for side, split in wanted:
        yield side, stream(place, split, config=config)


def _size(files: Sequence[str]) -> int:
    """Of the first file; 0 where there is none."""
    return next((int((place_at(file) if is_address(file) else Path(file)).stat().st_size) for file in files), 0)


def batches(place: str, data: Any) -> Iterator[dict[str, Any]]:
    """The rows of a split or of a shard, a hundred at once, by column."""
    found = data.iter(batch_size=100)
    while (batch := asked(place, next, found, None)) is not None:
        yield batch


def check_field(place: str, data: Any, field: str) -> None:
    """Raise a ValueError if a data set has no such column."""
    names = data.column_names or list(next(iter(data.take(1)), {field: None}))
    if field not in names:
        raise ValueError(f"the data set {place!r} has no field {field!r}, it has {', '.join(names)}")


# Pictures


def _image_column(data: Any) -> str | None:
    return next((name for name, kind in data.features.items() if type(kind).__name__ == "Image"), None)


def _label_column(data: Any) -> str | None:
    named = next((name for name, kind in data.features.items() if hasattr(kind, "names")), None)
    whole = [name for name in _LABELS if getattr(data.features.get(name), "dtype", "").startswith(("int", "uint"))]
    return named or (whole[0] if whole else None)


def has_images(given: str) -> bool:
    """Whether a data set has a column of images."""
    return any(_image_column(data) for _, data in splits(given))


def pictures(given: str) -> ImageSource:
    """The pictures of NAME[@CONFIG][:SPLIT], with the names of their classes if it tells them, or else numbers."""
    parts = list(splits(given))
    first = parts[0][1]
    column, labels = _image_column(first), _label_column(first)
    if column is None:
        raise ValueError(f"the data set {given!r} has no column of images, it has {', '.join(first.column_names)}")
    found = set() if labels is None else {label for _, data in parts for label in data.unique(labels)}
    names = getattr(first.features[labels], "names", None) if labels else ()
    classes = tuple(names if names is not None else map(str, range(1 + max(found - {None}, default=-1))))
    if wrong := found - set(range(len(classes))):
        raise ValueError(
            f"the data set {given!r} has the label {min(wrong, key=str)}, expected 0 to {len(classes) - 1}"
        )
    counts = Counter[str | None]()
    for side, data in parts:
        counts[side] += len(data)
    if not counts.total():
        raise ValueError(f"the data set {given!r} has no pictures")
    return ImageSource(classes, counts, partial(_entries, given, parts, column, labels))


def _entries(given: str, parts: Sequence[tuple[str | None, Any]], column: str, labels: str | None) -> Iterator[Entry]:
    for side, data in parts:
        undecoded = type(data.features[column])(decode=False)
        rows = data.select_columns([column, *([labels] if labels else [])]).cast_column(column, undecoded)
        for i, row in enumerate(rows):
            where = f"hf:{given}, {data.split} picture {i}"
            yield Entry(where, row[labels] if labels else UNLABELLED, side, partial(_stored, row[column]))


def _stored(cell: dict[str, Any] | None) -> np.ndarray:
    if cell is None:
        raise ValueError("no picture in this row")
    if cell["bytes"] is not None:
        return decode(cell["bytes"])
    try:
        return decode(Path(cell["path"]).read_bytes())
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
