"""A toy language whose sentences a program can check: what a model has learnt is a number, not an impression.

Six families, each with words that depend on others far away, in both directions:
  agreement    the small cats that the old dog sees chase the hen .
  handing      anna gives ben the red ball , so ben has the red ball .
  counting     anna has two red balls and ben has three , so they have five .
  sums         nine minus four plus one is six .
  order        first anna then ben then carl , so carl comes after anna .
  mirror       forward red blue green , backward green blue red .
83 words make 4,413,400 sentences of 6 to 16 words, punctuation counted. A seventh, left out unless it is asked for,
always has 37 words, each at its place, so that even a very small model learns it in a minute:
  passing      anna has the red ball , anna gives the red ball to ben , [twice more,] so dora has the red ball .
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ANIMALS = {"cat": "cats", "dog": "dogs", "fox": "foxes", "hen": "hens", "cow": "cows"}  # singular: plural
SEEING = {"sees": "see", "hears": "hear", "chases": "chase", "likes": "like"}  # verbs with an object
RESTING = {"sleeps": "sleep", "runs": "run", "sings": "sing"}  # verbs without
SIZES = ("small", "big", "old", "young")
NAMES = ("anna", "ben", "carl", "dora", "emil", "fay")
THINGS = {"ball": "balls", "box": "boxes", "cup": "cups", "hat": "hats", "key": "keys"}
COLOURS = ("red", "blue", "green", "white", "black", "pink")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LONGEST_SUM, LONGEST_ORDER, LONGEST_MIRROR, PASSED = 4, 4, 6, 3


# The generator


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


def _passing(rng: random.Random) -> str:
    thing = f"the {rng.choice(SIZES + COLOURS)} {rng.choice(list(THINGS))}"
    names = [rng.choice(NAMES)]
    while len(names) < PASSED + 1:
        names.append(rng.choice([name for name in NAMES if name != names[-1]]))
    handed = " , ".join(f"{one} gives {thing} to {two}" for one, two in itertools.pairwise(names))
    return f"{names[0]} has {thing} , {handed} , so {names[-1]} has {thing} ."


FAMILIES: dict[str, Callable[[random.Random], str]] = {
    "agreement": _agreement,
    "handing": _handing,
    "counting": _counting,
    "sums": _sums,
    "order": _order,
    "mirror": _mirror,
    "passing": _passing,
}
ALL = tuple(name for name in FAMILIES if name != "passing")


def sentence(rng: random.Random, families: Sequence[str] = ALL) -> str:
    """One sentence, 6 to 16 words with its punctuation, all families equally likely."""
    return FAMILIES[rng.choice(families)](rng)


def corpus(n: int, seed: int, families: Sequence[str] = ALL) -> Iterator[str]:
    """n sentences; the same ones for the same seed."""
    rng = random.Random(seed)
    return (sentence(rng, families) for _ in range(n))


def write(path: str | Path, n: int, seed: int, families: Sequence[str] = ALL) -> Path:
    """A file of n sentences, one per line; each a document of its own where the path ends in .jsonl."""
    path = Path(path)
    as_json = path.suffix == ".jsonl"
    with path.open("w", encoding="utf-8") as file:
        for line in corpus(n, seed, families):
            file.write((json.dumps({"text": line}) if as_json else line) + "\n")
    return path


# The checker, which shares nothing with the generator but the word lists


def _any(*words: Iterable[str]) -> str:
    return "(?:" + "|".join(word for group in words for word in group) + ")"


_PLURALS = {word for forms in (ANIMALS, THINGS, SEEING, RESTING) for word in forms.values()}
_BEING = rf"the (?:{_any(SIZES)} )?({_any(ANIMALS, ANIMALS.values())})"
_OBJECT = rf"the {_any(SIZES, COLOURS)} {_any(THINGS)}"
_SEE, _REST = (rf"({_any(verbs, verbs.values())})" for verbs in (SEEING, RESTING))
_NAME, _COLOUR, _NUMBER = (_any(words) for words in (NAMES, COLOURS, NUMBERS))


def _agrees(subject: str, other: str, theirs: str, own: str, _: str, seeing: str, __: str, resting: str) -> bool:
    plural = subject in _PLURALS
    clause = (theirs in _PLURALS) == (other in _PLURALS) if theirs else (own in _PLURALS) == plural
    return clause and ((seeing or resting) in _PLURALS) == plural


def _counts(one: str, first: str, things: str, two: str, second: str, total: str) -> bool:
    a, b, c = (NUMBERS.index(number) for number in (first, second, total))
    return one != two and a > 0 and b > 0 and a + b == c and (things in _PLURALS) == (a > 1)


def _adds_up(first: str, steps: str, total: str) -> bool:
    value = NUMBERS.index(first)
    for sign, number in re.findall(r"(\w+) (\w+)", steps):
        value += NUMBERS.index(number) * (1 if sign == "plus" else -1)
        if not 0 <= value <= 10:
            return False
    return value == NUMBERS.index(total)


def _is_ordered(first: str, others: str, one: str, relation: str, two: str) -> bool:
    row = [first, *others.replace("then", "").split()]
    known = len(set(row)) == len(row) and one != two and one in row and two in row
    return known and (row.index(one) < row.index(two)) == (relation == "before")


def _is_passed_on(sentence: str) -> bool:
    """Whoever is given the thing is who has it next, and nobody gives it to themselves."""
    names = [word for word in sentence.split() if word in NAMES]  # owner, giver, taker, giver, taker, ..., owner
    pairs = list(zip(names[::2], names[1::2], strict=True))
    handed = list(zip(names[1::2], names[2::2], strict=False))
    return all(one == two for one, two in pairs) and all(one != two for one, two in handed)


_RULES: list[tuple[str, Callable[..., bool]]] = [
    (rf"{_BEING} that (?:{_BEING} {_SEE}|{_SEE} {_BEING}) (?:{_SEE} {_BEING}|{_REST}) \.", _agrees),
    (rf"({_NAME}) gives ({_NAME}) ({_OBJECT}) , so \2 has \3 \.", lambda one, two, _: one != two),
    (rf"({_NAME}) takes ({_OBJECT}) from ({_NAME}) , so \1 has \2 \.", lambda one, _, two: one != two),
    (
        rf"({_NAME}) has ({_NUMBER}) {_COLOUR} ({_any(THINGS, THINGS.values())}) and ({_NAME}) has ({_NUMBER}) , "
        rf"so they have ({_NUMBER}) \.",
        _counts,
    ),
    (rf"({_NUMBER})((?: (?:plus|minus) {_NUMBER}){{1,{LONGEST_SUM}}}) is ({_NUMBER}) \.", _adds_up),
    (
        rf"first ({_NAME})((?: then {_NAME}){{1,{LONGEST_ORDER - 1}}}) , "
        rf"so ({_NAME}) comes (before|after) ({_NAME}) \.",
        _is_ordered,
    ),
    (
        rf"(?=(.*))({_NAME}) has ({_OBJECT}) , (?:{_NAME} gives \3 to {_NAME} , ){{{PASSED}}}so {_NAME} has \3 \.",
        lambda sentence, _, __: _is_passed_on(sentence),
    ),
    (
        rf"forward((?: {_COLOUR}){{2,{LONGEST_MIRROR}}}) , backward((?: {_COLOUR}){{2,{LONGEST_MIRROR}}}) \.",
        lambda there, back: there.split() == back.split()[::-1],
    ),
]
_PARSERS = [(re.compile(pattern), holds) for pattern, holds in _RULES]


def check(sentence: str) -> bool:
    """Whether a sentence belongs to the language."""
    return any(holds(*match.groups()) for pattern, holds in _PARSERS if (match := pattern.fullmatch(sentence)))
