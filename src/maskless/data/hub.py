"""Hugging Face data sets, with the extra `data`: a split by name, or all that is to be read."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial
from typing import Any

from maskless.data.unpack import extra
from maskless.terminal import first_line


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
