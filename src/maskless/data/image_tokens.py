"""Prepared pictures: a folder's index, its token rows and labels memory-mapped.

Shapes: h, w the grid of tokens, L = 1 + h*w with BOS first, then the grid line by line.
With K codes, the tokens are 0 to K-1, the mask is K and BOS is K+1, as in the released code: V = K + 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskless.codec.vq import ImageCodec, read_codec
from maskless.data.tokens import INDEX, Described, TokenRows, bin_path, check_size

KIND = "images-1"  # stands where the index of prepared text has its number
CODEC = "codec"
LABELS = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True)
class ImageSplit:
    """rows: how many, mirrored ones included.  tokens: in all of them.  pictures: how many they were made from."""

    rows: int
    tokens: int
    pictures: int


@dataclass(frozen=True, kw_only=True)
class PreparedImages(Described):
    """What the index of a folder of prepared pictures says.

    size: pixels a side.  grid: tokens, (h, w).  classes: names by label, () if there are none.
    flips: whether the second half of the train rows mirrors the first.  skipped: how many pictures were broken, and
    broken: the first of them, a line each.
    """

    FORMAT, HOLDS, MADE_OF, SPLIT = KIND, "pictures", "pictures", ImageSplit
    TUPLES = ("grid", "classes", "broken", "sources")

    folder: Path
    size: int
    filter: str
    channels: int
    grid: tuple[int, int]
    codes: int
    dtype: str
    classes: tuple[str, ...]
    flips: bool
    skipped: int
    broken: tuple[str, ...]
    sources: tuple[str, ...]
    splits: Mapping[str, ImageSplit]

    eos = pad = None  # as prepared text may have

    def __post_init__(self) -> None:
        if len(self.grid) != 2:
            raise ValueError(f"grid {self.grid}, expected height and width")

    @property
    def length(self) -> int:  # type: ignore[override]
        return 1 + self.grid[0] * self.grid[1]

    @property
    def mask(self) -> int:
        return self.codes

    @property
    def bos(self) -> int:
        return self.codes + 1

    @property
    def vocab(self) -> int:
        return self.codes + 2

    def codec(self) -> ImageCodec:
        """The codec that made the tokens, of which the folder has a copy."""
        return read_codec(self.folder / CODEC)

    def split(self, name: str) -> ImageTokens:
        """The rows of "train" or "valid"."""
        self.check_split(name)
        rows, classes = self.splits[name].rows, len(self.classes)
        return ImageTokens(bin_path(self.folder, name), self.dtype, rows, self.length, classes, self.codes)

    def sizes(self) -> Iterator[tuple[Path, int]]:
        yield from super().sizes()
        for name, split in self.splits.items() if self.classes else ():
            yield label_path(self.folder, name), split.rows * LABELS.itemsize


class ImageTokens(TokenRows):
    """The rows of one token file and their labels, read from disk as they are asked for; classes, codes: how many."""

    given = 1  # BOS

    def __init__(self, path: Path, dtype: str, rows: int, length: int, classes: int, codes: int | None = None) -> None:
        super().__init__(path, dtype, rows, length, codes)
        self.classes = classes
        self.labelled = label_path(path.parent, path.stem)
        known = self.labelled.exists()
        self._labels = np.memmap(self.labelled, dtype=LABELS, mode="r", shape=(rows,)) if known else None

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageTokens, (self.path, self.dtype, len(self), self.length, self.classes, self.vocab)

    def check_ids(self, found: np.ndarray) -> None:
        """Raise a ValueError about a code that the codec does not have, or a row that does not begin with BOS."""
        super().check_ids(found[:, 1:])
        if self.vocab is not None and len(wrong := found[found[:, 0] != self.vocab + 1, 0]):
            raise ValueError(f"{self.path}: a row begins with {wrong[0]}, expected {self.vocab + 1} for BOS")

    def labels(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor | None:
        if self._labels is None:
            return None
        check_size(self._labels, self.labelled)
        found = self._labels[np.asarray(indices, dtype=np.int64)]
        if len(wrong := found[(found < 0) | (found >= self.classes)]):
            raise ValueError(f"{self.labelled} holds the label {wrong[0]}, there are {self.classes} classes")
        return torch.from_numpy(found.astype(np.int64))


def label_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.labels.bin"


def holds_images(folder: str | Path) -> bool:
    """Whether a folder was made by `prepare_images`, by its index alone."""
    try:
        return json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))["format"] == KIND
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def open_images(folder: str | Path) -> PreparedImages:
    """The folder that `prepare_images` made, its files checked against its index."""
    if not holds_images(folder):
        raise ValueError(f"{folder}: not a folder of prepared pictures; make one with `maskless prepare`")
    return PreparedImages.read(Path(folder)).checked()
