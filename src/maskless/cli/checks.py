"""What is checked of options before any work: numbers, files, and whether they concern this kind of model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

N = TypeVar("N", int, float)


def numbers(option: str, given: str, of: Callable[[str], N], such_as: str) -> list[N]:
    """A number, or several with commas between."""
    try:
        return [of(number) for number in given.split(",")]
    except ValueError:
        kind = "whole number" if of is int else "number"
        raise ValueError(f"--{option} {given!r}: expected a {kind}, or several: {such_as}") from None


def check_places(*paths: Path | None) -> None:
    """Raise a ValueError about a file whose folder does not exist."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: {path.parent} is not a folder")


def refuse(options: Iterable[str], kind: str) -> None:
    """Raise a ValueError about the first of the options, which are for models of the other kind."""
    this = "an image model" if kind == "text" else "a text model"
    for name in options:
        raise ValueError(f"{flag(name)} is for {kind} models: this is {this}")


def launched_together() -> bool:
    """Whether a launcher started several processes. Asked of the environment: Accelerate takes a second to load."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def flag(field: str) -> str:
    """top_p -> --top-p"""
    return f"--{field.replace('_', '-')}"
