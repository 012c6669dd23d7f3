"""What the library takes: tensors, arrays, lists and texts, alike; and the keywords that an editor shows."""

import inspect
import typing

import numpy as np
import pytest
import torch

from maskless import fill, generate, load, log_likelihood
from maskless.how import Choices, How

IDS = [[1, 2, 3, 4], [5, 6, 7, 8]]
KINDS = [torch.tensor, np.array, lambda x: np.array(x, dtype=np.uint16), lambda x: x, lambda x: tuple(map(tuple, x))]


@pytest.fixture(scope="module")
def stories():
    return load("stories", device="cpu")


def test_every_choice_stands_in_the_signatures_with_its_default():
    for door in (generate, fill):
        found = inspect.signature(door).parameters
        assert all(found[name].default == about.default for name, about in How.__dataclass_fields__.items())
        assert all(one.kind is not one.VAR_KEYWORD for one in found.values())


def test_what_a_type_checker_sees_is_what_how_takes():
    ours, theirs = typing.get_type_hints(Choices), typing.get_type_hints(How)
    assert list(ours) == list(theirs)
    assert {name for name in ours if ours[name] != theirs[name]} == {"seed"}  # None is taken, and made a number


@pytest.mark.parametrize("kind", KINDS)
def test_ids_may_be_tensors_arrays_or_lists(plain, kind):
    tokens, known = torch.tensor(IDS), torch.tensor([[True, False, False, True]]).expand(2, 4)
    assert torch.equal(log_likelihood(plain, kind(IDS), samples=2), log_likelihood(plain, tokens, samples=2))
    masked = log_likelihood(plain, kind(IDS), known.tolist(), order=[3, 1, 0, 2])
    assert torch.equal(masked, log_likelihood(plain, tokens, known, order=torch.tensor([3, 1, 0, 2])))
    filled = fill(plain, kind(IDS), known=known.tolist(), numbers=[4, 7])
    assert torch.equal(filled.tokens, fill(plain, tokens, known=known, numbers=torch.tensor([4, 7])).tokens)
    logits = plain.predict(kind(IDS), [[0, 1, 2, 3]] * 2, [[5], [6]], lengths=[4, 2])
    places, targets = torch.arange(4).repeat(2, 1), torch.tensor([[5], [6]])
    assert torch.equal(logits, plain.predict(tokens, places, targets, lengths=torch.tensor([4, 2])))


def test_several_texts_are_scored_as_each_alone(plain):
    texts = ["abc", "a longer one"]
    alone = [float(log_likelihood(plain, text, samples=2)) for text in texts]
    assert log_likelihood(plain, texts, samples=2).tolist() == alone


@pytest.mark.parametrize("how", [{"samples": 8}, {"order": "left"}, {"orders": 2}])
def test_a_text_scores_as_its_tokens_with_the_bos_before_them(stories, how):
    text = "Once upon a time, there was a dog named Max."
    ids = stories.lead + stories.codec.encode(text)
    assert float(log_likelihood(stories, ids, **how)) == float(log_likelihood(stories, text, **how))
    longer = log_likelihood(stories, stories.codec.encode(text), **how)  # as they stand: the first token has no BOS
    assert longer < log_likelihood(stories, text, **how) - 5


def test_n_ways_to_fill_a_text_differ_and_the_first_is_that_of_one(plain):
    ways = fill(plain, "ab[6]cd", n=5, seed=3)
    assert ways[0] == fill(plain, "ab[6]cd", seed=3)
    assert len(set(ways)) == 5
    assert fill(plain, "ab[6]cd", n=2, seed=3) == ways[:2]
    assert all(way.tokens[:2] == list(b"ab") and way.tokens[-2:] == list(b"cd") for way in ways)


def test_many_ways_are_computed_in_batches_and_steps_are_numbered_through(plain, monkeypatch):
    whole, rows = fill(plain, "a[4]", n=5), set()
    monkeypatch.setattr("maskless.texts.BATCH", 2)
    assert fill(plain, "a[4]", n=5, on_step=lambda step: rows.update(step.rows.tolist())) == whole
    assert rows == set(range(5))
