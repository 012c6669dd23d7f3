"""Prepared token files: a folder's index, its rows memory-mapped, and which rows an optimiser step takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskless.codec.text import TextCodec

FORMAT = 1
INDEX = "index.json"
SPLITS = ("train", "valid")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class SplitIndex:
    """rows: how many.  tokens: those in the rows, padding not counted.  bytes: UTF-8 bytes of the text in the rows."""

    rows: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the index of a prepared folder says."""

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
        if name not in self.splits:
            raise ValueError(f"no split {name!r} in {self.folder}: expected {' or '.join(self.splits)}")
        return TokenRows(bin_path(self.folder, name), self.dtype, self.splits[name].rows, self.length, self.vocab)


class TokenRows:
    """The rows of one token file, read from disk as they are asked for; vocab: how many ids there are, if known."""

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


def write_index(prepared: Prepared) -> None:
    """Writes index.json into the folder that it describes."""
    fields = {"format": FORMAT} | {k: v for k, v in asdict(prepared).items() if k != "folder"}
    (prepared.folder / INDEX).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def read_index(folder: Path) -> Prepared:
    """What the index of a folder says, its token files not looked at."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder}: not a prepared folder, it has no {INDEX}; make one with `maskless prepare`")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields.pop("format")
        if version != FORMAT:
            raise ValueError(f"format {version}, expected {FORMAT}")
        fields["splits"] = {name: SplitIndex(**fields["splits"][name]) for name in SPLITS}
        fields["sources"] = tuple(fields["sources"])
        prepared = Prepared(folder=folder, **fields)
        if prepared.dtype not in DTYPES:
            raise ValueError(f"dtype {prepared.dtype!r}, expected {' or '.join(DTYPES)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not an index of prepared tokens ({error})") from error
    return prepared


def open_tokens(folder: str | Path) -> Prepared:
    """The prepared folder that `prepare` made, its files checked against its index."""
    prepared = read_index(Path(folder))
    for name, split in prepared.splits.items():
        path = bin_path(prepared.folder, name)
        size = path.stat().st_size if path.is_file() else 0
        wanted = split.rows * prepared.length * DTYPES[prepared.dtype].itemsize
        if size != wanted:
            raise ValueError(f"{path}: {size:,} bytes, but {INDEX} says {wanted:,}; prepare the data again")
    return prepared


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
