"""Prepared token files: a folder's index, its rows memory-mapped, and which rows an optimiser step takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch

from maskless.codec.text import TextCodec

INDEX = "index.json"
SPLITS = ("train", "valid")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class SplitIndex:
    """rows: how many.  tokens: those in the rows, padding not counted.  bytes: UTF-8 bytes of the text in the rows."""

    rows: int
    tokens: int
    bytes: int


class Described:
    """A folder of token files and the index.json that describes them: what prepared text and pictures share."""

    FORMAT: ClassVar[int | str]
    HOLDS: ClassVar[str]
    MADE_OF: ClassVar[str]
    SPLIT: ClassVar[type[Any]]
    TUPLES: ClassVar[tuple[str, ...]] = ("sources",)  # fields that JSON has as lists

    folder: Path
    length: int
    dtype: str
    splits: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What the index of a folder says, its token files not looked at."""
        path = folder / INDEX
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            version = fields.pop("format")
            if version != cls.FORMAT:
                raise ValueError(f"format {version}, expected {cls.FORMAT}")
            fields["splits"] = {name: cls.SPLIT(**fields["splits"][name]) for name in SPLITS}
            fields |= {name: tuple(fields[name]) for name in cls.TUPLES}
            prepared: Self = cast(Any, cls)(folder=folder, **fields)
            if prepared.dtype not in DTYPES:
                raise ValueError(f"dtype {prepared.dtype!r}, expected {' or '.join(DTYPES)}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: not an index of prepared {cls.HOLDS} ({error})") from error
        return prepared

    def checked(self) -> Self:
        """The same, its files as large as it says."""
        for path, wanted in self.sizes():
            size = path.stat().st_size if path.is_file() else 0
            if size != wanted:
                raise ValueError(
                    f"{path}: {size:,} bytes, but {INDEX} says {wanted:,}; prepare the {self.MADE_OF} again"
                )
        return self

    def sizes(self) -> Iterator[tuple[Path, int]]:
        """The files that there must be, and how many bytes each has."""
        for name, split in self.splits.items():
            yield bin_path(self.folder, name), split.rows * self.length * DTYPES[self.dtype].itemsize

    def check_split(self, name: str) -> None:
        if name not in self.splits:
            raise ValueError(f"no split {name!r} in {self.folder}: expected {' or '.join(self.splits)}")

    def write(self) -> None:
        """Writes index.json into the folder that it describes."""
        fields = {"format": self.FORMAT} | {k: v for k, v in asdict(cast(Any, self)).items() if k != "folder"}
        (self.folder / INDEX).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Prepared(Described):
    """What the index of a prepared folder says."""

    FORMAT, HOLDS, MADE_OF, SPLIT = 1, "tokens", "data", SplitIndex

    folder: Path
    length: int
    dtype: str
    layout: str
    vocab: int
    bos: int | None
    eos: int | None
    pad: int | None
    sources: tuple[str, ...]
    splits: Mapping[str, SplitIndex]

    def codec(self) -> TextCodec:
        return TextCodec.load(self.folder / "tokenizer.json")

    def split(self, name: str) -> TokenRows:
        """The rows of "train" or "valid"."""
        self.check_split(name)
        return TokenRows(bin_path(self.folder, name), self.dtype, self.splits[name].rows, self.length, self.vocab)


class TokenRows:
    """The rows of one token file, read from disk as they are asked for; vocab: how many ids there are, if known."""

    given = 0  # tokens at the start of each row that a model is given, and that do not count
    classes = 0  # of labels

    def __init__(self, path: Path, dtype: str, rows: int, length: int, vocab: int | None = None) -> None:
        self.path, self.dtype, self.length, self.vocab = path, dtype, length, vocab
        self._tokens = np.memmap(path, dtype=DTYPES[dtype], mode="r", shape=(rows, length))

    def __len__(self) -> int:
        return len(self._tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process opens the file again; a pickled memmap would carry all of it.
        return TokenRows, (self.path, self.dtype, len(self), self.length, self.vocab)

    def rows(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """The tokens of some rows.  (n,) -> (n, L) int64"""
        check_size(self._tokens, self.path)
        found = self._tokens[np.asarray(indices, dtype=np.int64)]
        self.check_ids(found)
        return torch.from_numpy(found.astype(np.int64))

    def labels(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor | None:
        """The labels of some rows, None if they have no classes.  (n,) -> (n,) int64"""
        return None

    def counted(self, tokens: torch.Tensor, pad: int | None) -> torch.Tensor:
        """Which tokens of some rows count: all but padding and what is given.  (n, L) -> (n, L) bool"""
        counted = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
        counted[:, : self.given] = False
        return counted

    def check_ids(self, found: np.ndarray) -> None:
        """Raise a ValueError about an id that is not in the vocabulary.  (n, L)"""
        if self.vocab is not None and found.size and (largest := int(found.max())) >= self.vocab:
            raise ValueError(
                f"{self.path} holds the id {largest}, its vocabulary has {self.vocab:,}; prepare the data again"
            )


def check_size(mapped: np.memmap[Any, Any], path: Path) -> None:
    """Raise a ValueError if a file is shorter now than when it was opened: to read beyond its end is a SIGBUS."""
    size = mapped._mmap.size()  # type: ignore[attr-defined]
    if size < mapped.nbytes:
        raise ValueError(f"{path}: {size:,} bytes, but it had {mapped.nbytes:,} when it was opened; prepare it again")


def bin_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def dtype_for(vocab: int) -> str:
    """The smallest kind of number that holds every token."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def read_index(folder: Path) -> Prepared:
    """What the index of a folder of prepared text says."""
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder}: not a prepared folder, it has no {INDEX}; make one with `maskless prepare`")
    return Prepared.read(folder)


def open_tokens(folder: str | Path) -> Prepared:
    """The prepared folder that `prepare` made, its files checked against its index."""
    return read_index(Path(folder)).checked()


def check_target(target: Path, overwrite: bool, check: Callable[[Path], object]) -> None:
    """Raise a ValueError about a folder that cannot be written; check: raises for one that is not ours to replace."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{target} exists already: choose another folder, or say overwrite=True (--overwrite)")
    check(target)


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(rows)
    return order.astype(np.uint32) if rows <= 1 << 32 else order


def global_batch(step: int, batch: int, rows: int, seed: int) -> np.ndarray:
    """The rows of the global batch of one optimiser step.  (batch,) int64

    Every epoch is a fresh permutation of the rows; put end to end, they are cut into batches. So a run resumes from its
    step alone, and each process takes its own slice of what comes back.
    """
    if rows < 1 or batch < 1 or step < 0:
        raise ValueError(f"step {step}, batch {batch}, rows {rows}: expected step >= 0, batch >= 1, rows >= 1")
    start, stop = step * batch, (step + 1) * batch
    parts = []
    for epoch in range(start // rows, (stop - 1) // rows + 1):
        first = epoch * rows
        parts.append(_permutation(rows, seed, epoch)[max(start - first, 0) : stop - first])
    return np.concatenate(parts).astype(np.int64)
