"""A model trained on chains writes as it was trained, in strands, from left to right or in any order."""

import json
import math
import warnings

import pytest
import torch

import maskless
import toy_text
from maskless.checkpoint import Model
from maskless.codec.text import train_bpe
from maskless.mixture import Mixture

LENGTH = 24


@pytest.fixture(scope="module")
def codec():
    return train_bpe(list(toy_text.corpus(200, 0)), 300)


@pytest.fixture(scope="module")
def model(tiny, codec) -> Model:
    network = tiny("ordered", scale=0.15, vocab=codec.vocab, length=LENGTH, width=32)
    return Model(network, codec, mixture=Mixture.parse("random=1,strands=2,gaps=1"))


def with_orders(model: Model, orders: str) -> Model:
    return Model(model.network, model.codec, mixture=Mixture.parse(orders))


def test_by_default_it_writes_from_left_to_right_a_token_a_step(model):
    text = maskless.generate(model, seed=1)[0]
    assert text.steps == list(range(LENGTH))
    assert text.tokens == maskless.generate(model, seed=1, order="left")[0].tokens
    assert text.tokens == maskless.generate(model, seed=1, strands=1)[0].tokens


@pytest.mark.parametrize(("orders", "longest"), [("strands4", 6), ("strands3=1,random=1", 8), ("random", None)])
def test_the_default_is_what_it_was_trained_on(model, orders, longest):
    text = maskless.generate(with_orders(model, orders), seed=1)[0]
    if longest is None:  # in random order
        assert text.steps != sorted(text.steps) == list(range(LENGTH))
    else:
        assert text.steps == [i % longest for i in range(LENGTH)]


@pytest.mark.parametrize("strands", [1, 2, 3, 5, 8, LENGTH, 99])
def test_strands_are_written_in_step(model, strands):
    text = maskless.generate(model, seed=0, strands=strands)[0]
    longest = math.ceil(LENGTH / strands)
    assert text.steps == [i % longest for i in range(LENGTH)]
    same = maskless.generate(model, seed=0, order="strands", steps=longest)[0]
    assert (same.tokens, same.steps) == (text.tokens, text.steps)


def test_each_gap_is_a_strand_and_long_ones_are_several(model, codec):
    text = maskless.fill(model, "anna [3] the [7] ball [2] .", seed=0)
    gaps = [step for step in text.steps if step >= 0]
    assert gaps == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1]
    cut = maskless.fill(model, "anna [3] the [7] ball [2] .", seed=0, strands=4)  # 12 tokens: strands of 3
    assert [step for step in cut.steps if step >= 0] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize(
    "how", [{}, {"order": "random"}, {"order": "left"}, {"strands": 3}, {"revise": 3}, {"steps": 2}]
)
def test_given_tokens_stay_whatever_the_order(model, how):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab, (16, LENGTH), generator=generator)
    known = torch.rand(16, LENGTH, generator=generator) < 0.5
    known[:, 0] = False
    done = maskless.fill(model, tokens, known=known, seed=3, **how)
    assert torch.equal(done.tokens[known], tokens[known])
    assert (done.steps[known] == -1).all()
    assert (done.steps[~known] >= 0).all()


def test_what_is_known_enters_the_encoder_as_it_stands(model, monkeypatch):
    """In the order that training showed: by position, then as decided. Without strands or gaps it is shuffled."""
    monkeypatch.setattr("maskless.engine.backends.serves", lambda network: False)
    seen = []

    def watched(given: Model) -> list[list[int]]:
        seen.clear()
        handle = given.network.register_forward_pre_hook(lambda _, args: seen.append(args[0].positions.tolist()))
        maskless.fill(given, "anna has [3] and [2] ball", seed=0, order="random")
        handle.remove()
        return [list(one) for one in seen]

    first, *later = watched(model)
    assert first == sorted(first)
    assert all(one[: len(first)] == first for one in later)
    first, *_ = watched(with_orders(model, "random"))
    assert first != sorted(first)


def test_an_order_that_training_never_showed_works_and_says_so(model):
    plain = with_orders(model, "random")
    with pytest.warns(UserWarning, match="this model was trained on random=100: the order strands is new to it"):
        text = maskless.generate(plain, seed=0, strands=4)[0]
    assert max(text.steps) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maskless.generate(plain, seed=0)
        maskless.generate(model, seed=0, order="left")
        maskless.generate(model, seed=0, order="random", steps=4)


def test_the_mixture_goes_with_the_model(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["orders"] == "random=1,strands=2,gaps=1"
    again = maskless.load(tmp_path / "model")
    assert again.mixture == model.mixture
    assert maskless.generate(again, seed=1)[0].tokens == maskless.generate(model, seed=1)[0].tokens
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"orders": "sideways"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="unknown order 'sideways'"):
        maskless.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"strands": 0}, "strands 0 is out of range: expected 1 or more"),
        ({"strands": 2, "steps": 3}, "strands 2 replace order, steps and counts: expected none of them as well"),
        ({"strands": 2, "order": "random"}, "strands 2 replace order"),
        ({"order": "strands", "counts": "mdlm"}, "counts 'mdlm' with strands, which settle them"),
        ({"order": "strands", "steps": 25}, "steps 25 is out of range: expected 1 to 24"),
    ],
)
def test_what_strands_exclude_is_named(model, how, says):
    with pytest.raises(ValueError, match=says):
        maskless.generate(model, **how)


# Likelihood


def test_the_likelihood_along_an_order_is_that_of_its_conditionals(model):
    tokens = torch.randint(model.config.vocab, (3, 9), generator=torch.Generator().manual_seed(0))
    shuffled = torch.tensor([5, 0, 8, 3, 1, 2, 7, 4, 6])
    for order in (torch.arange(9), shuffled):
        expected = torch.zeros(3, dtype=torch.float64)
        for n in range(9):
            known = order[:n].expand(3, n)
            logits = model.predict(tokens.gather(1, known), known, order[n].expand(3, 1))[:, 0].double()
            expected += logits.log_softmax(-1).gather(1, tokens[:, order[n], None])[:, 0].detach()
        torch.testing.assert_close(maskless.log_likelihood(model, tokens, order=order), expected, atol=1e-4, rtol=0)
    assert torch.equal(
        maskless.log_likelihood(model, tokens, order="left"),
        maskless.log_likelihood(model, tokens, order=torch.arange(9)),
    )
    strands = torch.tensor([0, 3, 6, 1, 4, 7, 2, 5, 8])
    assert torch.equal(
        maskless.log_likelihood(model, tokens, order="strands", strands=3),
        maskless.log_likelihood(model, tokens, order=strands),
    )


def test_known_tokens_come_first_and_are_not_scored(model):
    tokens = torch.randint(model.config.vocab, (6,), generator=torch.Generator().manual_seed(1))
    known = torch.tensor([1, 0, 1, 0, 0, 1]).bool()
    asked = torch.tensor([4, 5, 0, 1, 2, 3])
    chain, expected = [5, 0, 2], 0.0  # as the order names them
    for place in (4, 1, 3):
        before = torch.tensor([chain])
        logits = model.predict(tokens[before], before, torch.tensor([[place]]))[0, 0].double()
        expected += float(logits.detach().log_softmax(-1)[tokens[place]])
        chain.append(place)
    assert float(maskless.log_likelihood(model, tokens, known, order=asked)) == pytest.approx(expected, abs=1e-4)


def test_several_orders_tighten_the_bound(model):
    tokens = torch.randint(model.config.vocab, (4, 8), generator=torch.Generator().manual_seed(2))
    mean = maskless.log_likelihood(model, tokens, samples=16, seed=3)
    tight = maskless.log_likelihood(model, tokens, orders=16, seed=3)  # the same orders
    assert (tight > mean).all()
    alone = maskless.log_likelihood(model, tokens, orders=1, seed=3)
    torch.testing.assert_close(alone, maskless.log_likelihood(model, tokens, samples=1, seed=3))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"order": "spiral"}, "unknown order 'spiral': expected one of left, strands, or a permutation"),
        ({"order": torch.tensor([0, 0, 1])}, "expected a permutation of 0 to 2"),
        ({"order": torch.tensor([0, 1])}, "expected a permutation of 0 to 2"),
        ({"strands": 2}, "strands 2 goes with the order 'strands'"),
        ({"order": "left", "orders": 2}, "orders 2 are random ones"),
        ({"orders": 0}, "orders 0 is out of range"),
    ],
)
def test_mistakes_of_scoring_are_named(model, how, says):
    with pytest.raises(ValueError, match=says):
        maskless.log_likelihood(model, torch.tensor([1, 2, 3]), **how)
