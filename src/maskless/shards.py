"""Samples into a folder, shared out over processes: the same files whatever their number; after a kill it resumes.

Sample i of a seed is the same whatever is drawn beside it. Consecutive samples are a shard, which one process makes; a
shard whose files are there is done. What the samples are stands in a file beside the folder: a command that resumes
must ask for the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from maskless.checkpoint import Model, digest
from maskless.drafts import OnStep
from maskless.files import json_text, sweep, write_aside, write_json
from maskless.how import check_positive
from maskless.images import class_ids, generate_images
from maskless.texts import generate_texts
from maskless.train.processes import processes

TEXTS, PICTURES = 128, 64  # in a shard, which is computed at once
Shard = tuple[list[Path], Callable[[], None]]  # files that one process makes at once, and what makes them


def write_texts(
    model: Model, folder: Path, n: int, *, resume: bool = False, on_step: OnStep | None = None, **how: Any
) -> int:
    """n texts as lines of JSON in texts-00000.jsonl and so on, 128 in each. Returns how many files that makes.

    how: keywords of `generate_texts`.
    """
    check_positive(n=n)

    def make(first: int, file: Path) -> None:
        texts = generate_texts(model, min(TEXTS, n - first), first=first, on_step=on_step, **how)
        lines = [json.dumps({"number": number} | text.as_dict()) + "\n" for number, text in enumerate(texts, first)]
        write_aside(file, lambda aside: aside.write_text("".join(lines), encoding="utf-8"))

    settings = {"model": digest(model.network), "n": n, **how}
    if not resume and _settings(folder).exists() and any(folder.glob("texts-*.jsonl")):
        raise ValueError(f"{folder} holds texts already: continue with --resume, or name another --out")
    files = {first: folder / f"texts-{first // TEXTS:05}.jsonl" for first in range(0, n, TEXTS)}
    shards = [([file], partial(make, first, file)) for first, file in files.items()]
    _make(folder, shards, settings, resume)
    return len(files)


def write_pictures(
    model: Model,
    folder: Path,
    labels: Sequence[str | int] | None,
    n: int | None,
    *,
    resume: bool = False,
    on_step: OnStep | None = None,
    **how: Any,
) -> int:
    """A picture for each label, or n, as files: 00000-cat.png, 00001-dog.png, ... Returns how many.

    how: keywords of `generate_images`.
    """
    ids = class_ids(model, labels, n).tolist()
    names = [model.classes[i] if i < len(model.classes) else None for i in ids]
    files = [picture_file(folder, number, name) for number, name in enumerate(names)]

    def make(first: int) -> None:
        end = min(first + PICTURES, len(ids))
        given = (None, end - first) if labels is None else (labels[first:end], None)
        drawn = generate_images(model, *given, first=first, on_step=on_step, **how)
        for file, one in zip(files[first:end], drawn, strict=True):
            write_aside(file, partial(one.image.save, format="png"), durable=False)

    settings = {"model": digest(model.network), "n": len(ids), "labels": labels, **how}
    shards = [(files[i : i + PICTURES], partial(make, i)) for i in range(0, len(files), PICTURES)]
    _make(folder, shards, settings, resume)
    return len(files)


def picture_file(folder: Path, number: int, label: str | None) -> Path:
    """00000-cat.png, or 00000.png without a label"""
    return folder / (re.sub(r"[^\w.-]+", "_", f"{number:05}-{label}" if label else f"{number:05}") + ".png")


def _make(folder: Path, shards: Sequence[Shard], settings: dict[str, Any], resume: bool) -> None:
    """This process's share of the shards; in the end those of all processes are there."""
    state = processes()
    mine = shards[state.process_index :: state.num_processes]
    goes_on = resume and _goes_on(folder, json.loads(json_text(settings)))
    folder.mkdir(parents=True, exist_ok=True)
    if state.is_local_main_process:
        with suppress(FileNotFoundError):  # another machine may do the same
            sweep(folder)
    if not goes_on:
        for file in (file for files, _ in mine for file in files):
            file.unlink(missing_ok=True)
    state.wait_for_everyone()  # from here on nothing is removed
    if state.is_local_main_process:  # of each machine: folders need not be shared
        write_json(_settings(folder), settings)
    for files, make in mine:
        if not all(file.exists() for file in files):
            make()
    state.wait_for_everyone()


def _goes_on(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a folder holds a part of these samples; a ValueError where it holds others."""
    path = _settings(folder)
    if not path.exists() or not folder.is_dir():
        return False
    try:
        own = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} does not say what is in {folder}: {error}") from None
    for name in sorted(own.keys() | settings):
        if own.get(name) != settings.get(name):
            was, asked = own.get(name), settings.get(name)
            raise ValueError(f"{name} is {was!r} in {folder}, not {asked!r}: samples go on as they began")
    return True


def _settings(folder: Path) -> Path:
    """Beside the folder, so that it holds nothing but samples."""
    return folder.with_name(f"{folder.name}.json")
