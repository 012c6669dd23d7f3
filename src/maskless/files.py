"""Files and folders that appear whole or not at all, and JSON that every program can read."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then rename it into place: a kill or a full disk leaves the old file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.unlink(missing_ok=True)
        aside.touch()
        mode = stat.S_IMODE(aside.stat().st_mode)  # what the umask says; safetensors gives 0600
        write(aside)
        if stat.S_IMODE(aside.stat().st_mode) != mode:
            aside.chmod(mode)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written in a folder, and in those that are in it."""
    for part in (*folder.glob(".*.part"), *folder.glob("*/.*.part")):
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def put_folder(aside: Path, target: Path) -> None:
    """Rename a finished folder into its place, where an empty or an older one may stand."""
    old = aside.with_suffix(".old")
    if target.exists():
        os.rename(target, old)
    os.rename(aside, target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to fill: in the end it takes the place of `target`, after an error it is gone."""
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    aside.mkdir(parents=True)
    try:
        yield aside
        put_folder(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON. What is not a finite number, such as the standard error of a single value, is null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
