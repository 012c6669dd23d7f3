"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_aside(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then rename it into place: a kill or a full disk leaves the old file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
