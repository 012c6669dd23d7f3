"""A toy language whose sentences a program can check: what a model has learnt is a number, not an impression.

    anna has the red ball , anna gives the red ball to ben , [twice more,] so dora has the red ball .

Sentences have 37 words, each at its place, so that even a very small model learns the language in a minute.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

NAMES = ("anna", "ben", "carl", "dora", "emil", "fay")
KINDS = ("small", "big", "old", "young", "red", "blue", "green", "white", "black", "pink")
THINGS = ("ball", "box", "cup", "hat", "key")
PASSED = 3  # times


def _sentence(rng: random.Random) -> str:
    thing = f"the {rng.choice(KINDS)} {rng.choice(THINGS)}"
    names = [rng.choice(NAMES)]
    while len(names) < PASSED + 1:
        names.append(rng.choice([name for name in NAMES if name != names[-1]]))
    handed = " , ".join(f"{one} gives {thing} to {two}" for one, two in pairwise(names))
    return f"{names[0]} has {thing} , {handed} , so {names[-1]} has {thing} ."


def corpus(n: int, seed: int) -> Iterator[str]:
    """n sentences; the same ones for the same seed."""
    rng = random.Random(seed)
    return (_sentence(rng) for _ in range(n))


def write(path: Path, n: int, seed: int) -> Path:
    """A file of n sentences as JSON lines, each a document of its own."""
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in corpus(n, seed)))
    return path


_NAME = f"(?:{'|'.join(NAMES)})"
_FORM = re.compile(
    rf"{_NAME} has (the (?:{'|'.join(KINDS)}) (?:{'|'.join(THINGS)})) , "
    rf"(?:{_NAME} gives \1 to {_NAME} , ){{{PASSED}}}so {_NAME} has \1 \."
)


def check(sentence: str) -> bool:
    """Whether a sentence is right: whoever is given the thing has it next, and nobody gives it to themselves."""
    if not _FORM.fullmatch(sentence):
        return False
    names = [word for word in sentence.split() if word in NAMES]  # owner, giver, taker, giver, taker, ..., owner
    same, handed = zip(names[::2], names[1::2], strict=True), zip(names[1::2], names[2::2], strict=False)
    return all(one == two for one, two in same) and all(one != two for one, two in handed)
