"""A toy language to train on in tests: sentences whose words depend on others far away, in both directions.

agreement    the small cats that the old dog sees chase the hen .
handing      anna gives ben the red ball , so ben has the red ball .
counting     anna has two red balls and ben has three , so they have five .
sums         nine minus four plus one is six .
order        first anna then ben then carl , so carl comes after anna .
mirror       forward red blue green , backward green blue red .
"""

import random
from collections.abc import Iterator
from pathlib import Path

ANIMALS = {"cat": "cats", "dog": "dogs", "fox": "foxes", "hen": "hens", "cow": "cows"}  # singular: plural
SEEING = {"sees": "see", "hears": "hear", "chases": "chase", "likes": "like"}  # verbs with an object
RESTING = {"sleeps": "sleep", "runs": "run", "sings": "sing"}  # verbs without
SIZES = ("small", "big", "old", "young")
NAMES = ("anna", "ben", "carl", "dora", "emil", "fay")
THINGS = {"ball": "balls", "box": "boxes", "cup": "cups", "hat": "hats", "key": "keys"}
COLOURS = ("red", "blue", "green", "white", "black", "pink")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LONGEST_SUM, LONGEST_ORDER, LONGEST_MIRROR = 4, 4, 6


def _animal(rng: random.Random, plural: bool) -> str:
    noun = rng.choice(list(ANIMALS))
    size = rng.choice(("", *SIZES))
    return " ".join(filter(None, ("the", size, ANIMALS[noun] if plural else noun)))


def _verb(rng: random.Random, verbs: dict[str, str], plural: bool) -> str:
    verb = rng.choice(list(verbs))
    return verbs[verb] if plural else verb


def _agreement(rng: random.Random) -> str:
    plural, other = rng.random() < 0.5, rng.random() < 0.5
    clause = [_animal(rng, other), _verb(rng, SEEING, other)]
    if rng.random() < 0.5:
        clause = [_verb(rng, SEEING, plural), _animal(rng, other)]
    rest = [_verb(rng, SEEING, plural), _animal(rng, rng.random() < 0.5)]
    if rng.random() < 0.5:
        rest = [_verb(rng, RESTING, plural)]
    return " ".join([_animal(rng, plural), "that", *clause, *rest, "."])


def _handing(rng: random.Random) -> str:
    one, two = rng.sample(NAMES, 2)
    thing = f"the {rng.choice(SIZES + COLOURS)} {rng.choice(list(THINGS))}"
    if rng.random() < 0.5:
        return f"{one} gives {two} {thing} , so {two} has {thing} ."
    return f"{one} takes {thing} from {two} , so {one} has {thing} ."


def _counting(rng: random.Random) -> str:
    one, two = rng.sample(NAMES, 2)
    total = rng.randint(2, 10)
    first = rng.randint(1, total - 1)
    noun = rng.choice(list(THINGS))
    things = f"{NUMBERS[first]} {rng.choice(COLOURS)} {noun if first == 1 else THINGS[noun]}"
    return f"{one} has {things} and {two} has {NUMBERS[total - first]} , so they have {NUMBERS[total]} ."


def _sums(rng: random.Random) -> str:
    value = rng.randint(0, 10)
    words = [NUMBERS[value]]
    for _ in range(rng.randint(1, LONGEST_SUM)):
        after = rng.randint(0, 10)
        sign = rng.choice((-1, 1)) if after == value else after - value
        words += ["plus" if sign > 0 else "minus", NUMBERS[abs(after - value)]]
        value = after
    return " ".join([*words, "is", NUMBERS[value], "."])


def _order(rng: random.Random) -> str:
    row = rng.sample(NAMES, rng.randint(2, LONGEST_ORDER))
    one, two = rng.sample(range(len(row)), 2)
    return f"first {' then '.join(row)} , so {row[one]} comes {'before' if one < two else 'after'} {row[two]} ."


def _mirror(rng: random.Random) -> str:
    row = [rng.choice(COLOURS) for _ in range(rng.randint(2, LONGEST_MIRROR))]
    return " ".join(["forward", *row, ",", "backward", *reversed(row), "."])


FAMILIES = (_agreement, _handing, _counting, _sums, _order, _mirror)


def corpus(n: int, seed: int) -> Iterator[str]:
    """n sentences of 6 to 16 words, all families equally likely; the same ones for the same seed."""
    rng = random.Random(seed)
    return (rng.choice(FAMILIES)(rng) for _ in range(n))


def write(path: Path, n: int, seed: int) -> Path:
    """A file of n sentences, one per line."""
    path.write_text("".join(f"{line}\n" for line in corpus(n, seed)))
    return path
