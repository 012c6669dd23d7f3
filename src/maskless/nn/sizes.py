"""Checks of a network's or a codec's configuration: every field is of the kind that it says, and in range."""

from __future__ import annotations

import dataclasses
from typing import Any

IDS = ("mask", "never")  # fields that are ids of the vocabulary; all other whole numbers are sizes
NONE = ("neighbours",)  # of which there may be none


def whole(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number, and not less than it may be; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_fields(config: Any) -> None:
    """Raise a ValueError about the first field of a frozen dataclass that is not what its annotation says.

    Sizes are whole numbers from 1 on, ids less than `vocab`, and floats are shares from 0 to less than 1. What a str
    may be is for the configuration itself to say.
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        kind, _, optional = str(field.type).partition(" | ")
        if value is None and optional:
            continue
        if name in IDS:
            if not whole(value, 0) or value >= config.vocab:
                raise ValueError(f"{name} id {value!r} is outside the vocabulary of {config.vocab}")
        elif kind == "int" and not whole(value, least := 0 if name in NONE else 1):
            raise ValueError(f"{name} {value!r} is out of range: expected {least} or more, a whole number")
        elif kind == "float" and not (isinstance(value, int | float) and 0 <= value < 1):
            raise ValueError(f"{name} {value!r} is out of range: expected at least 0 and less than 1")
        elif kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name} {value!r} is neither true nor false")
        elif kind.startswith("tuple"):
            pair = kind == "tuple[int, int]"
            if not (isinstance(value, tuple | list) and all(map(whole, value)) and (len(value) == 2 or not pair)):
                raise ValueError(f"{name} {value!r}: expected {'two ' * pair}whole numbers, 1 or more")


def check_heads(width: int, heads: int) -> None:
    """Raise a ValueError where RoPE finds no pairs of channels."""
    if width % heads or (width // heads) % 2:
        raise ValueError(f"width {width} does not split into {heads} heads of even width")
