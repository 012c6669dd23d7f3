"""The toy language: the checker accepts what the generator writes, and nothing else."""

import random
from itertools import product

import pytest

from maskless.data import toy
from maskless.data.toy import check, corpus, sentence, write

SENTENCES = list(corpus(5000, seed=0))
WORDS = sorted({word for line in SENTENCES for word in line.split()})


def test_generated_sentences_are_right_and_of_the_promised_length():
    assert all(check(line) for line in SENTENCES)
    assert {len(line.split()) for line in SENTENCES} <= set(range(6, 17))
    assert all(line == line.lower() and line.endswith(" .") for line in SENTENCES)
    assert len(WORDS) == 83


@pytest.mark.parametrize(
    ("right", "word", "wrong"),
    [
        ("the cats that the dog sees sleep .", "sleep", "sleeps"),
        ("the cat that sees the dogs sleeps .", "sees", "see"),
        ("the old cat that the dogs see likes the hen .", "likes", "like"),
        ("anna gives ben the red ball , so ben has the red ball .", "so ben", "so anna"),
        ("anna gives ben the red ball , so ben has the red ball .", "has the red", "has the old"),
        ("anna gives ben the red ball , so ben has the red ball .", "anna", "ben"),
        ("anna takes the red cup from ben , so anna has the red cup .", "so anna", "so ben"),
        ("anna has one red key and ben has two , so they have three .", "key", "keys"),
        ("anna has two red keys and ben has two , so they have four .", "four", "five"),
        ("two plus three is five .", "five", "six"),
        ("nine minus four plus one is six .", "nine minus four", "one minus four"),
        ("ten minus five plus one is six .", "minus five plus one", "plus one minus five"),
        ("first anna then ben then carl , so carl comes after anna .", "after", "before"),
        ("first anna then ben , so anna comes before ben .", "before ben", "before carl"),
        ("first anna then ben , so anna comes before ben .", "first anna then ben", "first anna then anna"),
        ("forward red red blue , backward blue red red .", "blue red red", "red red blue"),
    ],
)
def test_every_rule_is_kept(right, word, wrong):
    assert check(right)
    assert not check(right.replace(word, wrong))


def test_what_is_not_a_sentence_is_refused():
    right = "two plus three is five ."
    assert not any(check(text) for text in ("", ".", "the cat", right.removesuffix(" ."), f" {right}", f"{right} x"))


def test_one_wrong_word_is_almost_always_noticed():
    rng = random.Random(1)
    survivors = 0
    for line in SENTENCES:
        words = line.split()
        at = rng.randrange(len(words))
        words[at] = rng.choice([word for word in WORDS if word != words[at]])
        survivors += check(" ".join(words))
    # 42 of 5,000, 0.84 %, are right again: another animal, size, colour or name that nothing else depends on.
    assert survivors == 42


def test_the_checker_accepts_exactly_the_sentences_there_should_be():
    animals = ["the cat", "the cats", "the big dog", "the big dogs"]
    seeing = [form for pair in toy.SEEING.items() for form in pair]
    resting = [form for pair in toy.RESTING.items() for form in pair]
    clauses = [f"{a} {v}" for a, v in product(animals, seeing)] + [f"{v} {a}" for a, v in product(animals, seeing)]
    rests = [f"{v} {a}" for a, v in product(animals, seeing)] + resting
    accepted = sum(check(f"{a} that {c} {r} .") for a, c, r in product(animals, clauses, rests))
    assert accepted == 4 * (4 * 4 + 4 * 4) * (4 * 4 + 3)

    sums = [f"{a} {s} {b} is {c} ." for a, b, c in product(toy.NUMBERS, repeat=3) for s in ("plus", "minus")]
    assert sum(map(check, sums)) == 11 * 12

    names, thing = toy.NAMES, "the red hat"
    gifts = [f"{a} gives {b} {thing} , so {c} has {thing} ." for a, b, c in product(names, repeat=3)]
    assert sum(map(check, gifts)) == 6 * 5

    orders = [
        f"first {a} then {b} then {c} , so {d} comes {r} {e} ."
        for a, b, c, d, e in product(names[:4], repeat=5)
        for r in ("before", "after")
    ]
    assert sum(map(check, orders)) == 4 * 3 * 2 * 6


def test_the_generator_reaches_every_sentence_of_a_small_family():
    rng = random.Random(0)
    made = {line for line in (toy._order(rng) for _ in range(60_000)) if line.count("then") < 3}
    assert len(made) == 6 * 5 * 2 + 6 * 5 * 4 * 6


def test_there_are_hundreds_of_thousands_of_sentences():
    """Of 100,000 alike, 10,000 draws would find 9,516 with a standard deviation of 21, and of fewer or unlike less."""
    rng = random.Random(0)
    assert len({toy._agreement(rng) for _ in range(10_000)}) > 9_516 + 4 * 21


def test_a_seed_gives_the_same_corpus_again(tmp_path):
    assert list(corpus(50, seed=3)) == list(corpus(50, seed=3)) != list(corpus(50, seed=4))
    assert write(tmp_path / "toy.txt", 50, seed=3).read_text().splitlines() == list(corpus(50, seed=3))
    assert check(sentence(random.Random(5)))


def test_the_long_family_is_right_of_one_length_and_tolerates_no_wrong_word():
    sentences = list(corpus(200, 0, ("passing",)))
    assert all(check(one) and len(one.split()) == 37 for one in sentences)
    words = sorted({word for one in sentences for word in one.split()})
    right = sentences[0].split()
    for i in range(len(right)):
        for word in words:
            assert check(" ".join([*right[:i], word, *right[i + 1 :]])) == (word == right[i])
