"""Hugging Face data sets, with the extra `data`: a split by name, all that is to be read, or the pictures of one."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maskless.data.image_files import UNLABELLED, Entry, ImageSource
from maskless.data.image_pixels import decode
from maskless.data.unpack import extra
from maskless.terminal import first_line

_LABELS = ("label", "labels", "fine_label", "class", "target")  # of whole numbers, where no column names its classes


def load(place: str, split: str | None, *, config: str | None = None, revision: str | None = None) -> Any:
    """A split of a data set, on disk and memory-mapped; without a split, the names of its splits."""
    datasets = extra("datasets", f"the data set {place!r}")
    try:
        if split is None:
            return datasets.get_dataset_split_names(place, config, revision=revision)
        return datasets.load_dataset(place, config, split=split, revision=revision)
    except (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise ValueError(f"cannot load the data set {place!r}: {first_line(error)}") from error


def splits(given: str) -> Iterator[tuple[str | None, Any]]:
    """What NAME[@CONFIG][:SPLIT] names, by side: if it is no split, the validation or test split is held out."""
    name, _, split = given.partition(":")
    place, _, config = name.partition("@")
    read = partial(load, place, config=config or None)
    if split:
        yield None, read(split)
        return
    names = read(None)
    if "train" not in names:
        raise ValueError(f"the data set {place!r} has no split 'train'; add :SPLIT with one of {', '.join(names)}")
    held_out = next((name for name in ("validation", "valid", "test") if name in names), None)
    yield "train" if held_out else None, read("train")
    if held_out:
        yield "valid", read(held_out)


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
