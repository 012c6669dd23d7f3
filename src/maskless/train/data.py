"""The prepared data of a run: opened, and recognised when the run resumes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from maskless.data.image_tokens import CODEC, PreparedImages, holds_images, open_images
from maskless.data.tokens import INDEX, SPLITS, Prepared, open_tokens

CODED = ("tokenizer.json", f"{CODEC}/config.json", f"{CODEC}/model.safetensors")  # what made the tokens: one or two
NAMES = ("sources", "broken")  # of the index: how files are called, which says nothing about the tokens
SAMPLED = 1_024  # rows of each split: with a tokenizer of bytes, texts of one length have the same index


def open_data(folder: str | Path) -> Prepared | PreparedImages:
    """A prepared folder of either kind."""
    return open_images(folder) if holds_images(folder) else open_tokens(folder)


def fingerprint(data: Prepared | PreparedImages) -> str:
    """The sha256 of the index, the tokenizer or codec, and rows spread evenly over each split, with their labels.

    Neither where the folder is nor how its sources are called matters.
    """
    index = json.loads((data.folder / INDEX).read_text(encoding="utf-8"))
    facts = json.dumps({name: value for name, value in index.items() if name not in NAMES}, sort_keys=True)
    found = hashlib.sha256(facts.encode())
    for path in (data.folder / name for name in CODED):
        if path.is_file():
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    for name in SPLITS:
        rows = data.split(name)
        numbers = evenly(len(rows), SAMPLED)
        found.update(rows.rows(numbers).numpy().tobytes())
        if (labels := rows.labels(numbers)) is not None:
            found.update(labels.numpy().tobytes())
    return found.hexdigest()


def evenly(count: int, most: int) -> np.ndarray:
    """At most so many numbers below a count, over their whole range."""
    taken = min(most, count)
    return np.arange(taken) * count // taken


def same_data(data: Prepared | PreparedImages, known: str | None, folder: Path) -> str:
    """The fingerprint of the data; a ValueError where it is not the one that the run in `folder` knows, if any."""
    found = fingerprint(data)
    if known not in (None, found):
        raise ValueError(
            f"the data in {data.folder} changed since {folder} began (another text, tokenizer, codec or labels): "
            "it goes on with the same data only"
        )
    return found


def found_again(before: str, given: Path | None, known: str | None, folder: Path) -> str:
    """Where the data of a resumed run is: as before, or where it was moved to, known by its fingerprint."""
    gone = not Path(before).exists()
    if given is None or str(given.resolve()) == before:
        if gone:
            raise ValueError(f"the data of {folder} is no longer in {before}: name its folder with --data")
        return before
    if not (gone if known is None else fingerprint(open_data(given)) == known):
        raise ValueError(f"data is {before} in {folder}, not {given}: a run goes on as it began")
    return str(given.resolve())
