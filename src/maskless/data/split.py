"""Which documents and which pictures are held out where the data has no split of its own."""

from __future__ import annotations

import hashlib
from fractions import Fraction

VALID = 0.05  # the share that is


def share_of(valid: float) -> Fraction:
    """The share as an exact number."""
    if not 1e-6 <= valid <= 0.5:
        raise ValueError(f"valid is {valid}: expected a share above 0, at most 0.5")
    return Fraction(valid).limit_denominator(1_000_000)


def in_valid(unit: int, valid: Fraction) -> bool:
    """Whether a unit is held out: one of every 1/valid in a row, which one by a hash.

    Of the first stretch it is always the second unit, so that an input of two already has something held out.
    """
    stretch = unit * valid.numerator // valid.denominator
    first, end = (-(-s * valid.denominator // valid.numerator) for s in (stretch, stretch + 1))
    if stretch == 0:
        return unit == min(1, end - 1)
    digest = hashlib.blake2b(str(stretch).encode(), digest_size=8).digest()
    return unit == first + int.from_bytes(digest, "big") % (end - first)


def side_of(unit: int, valid: Fraction) -> str:
    return "valid" if in_valid(unit, valid) else "train"
