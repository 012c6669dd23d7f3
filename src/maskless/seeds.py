"""Seeds: the whole number from which all random numbers of a call follow."""

from __future__ import annotations

import operator
import secrets


def check_seed(seed: object) -> int:
    """The seed as a whole number; a ValueError about one that no generator takes."""
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"seed {seed!r}: expected a whole number from 0 to {(1 << 63) - 1}") from None
    if not 0 <= number < 1 << 63:
        raise ValueError(f"seed {number} is out of range: expected 0 to {(1 << 63) - 1}")
    return number


def seed_of(seed: object) -> int:
    """The seed of a call; None: another one each time, as nobody can foretell."""
    return secrets.randbits(63) if seed is None else check_seed(seed)
