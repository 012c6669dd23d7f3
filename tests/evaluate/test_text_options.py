"""Scores of options: exact where a toy can be enumerated."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import maskless
from maskless.checkpoint import Model
from maskless.evaluate import options
from maskless.logits import row_keys
from maskless.objective import bound
from maskless.problems import Problems

V, L = 3, 4


@pytest.fixture(scope="module")
def joint() -> Tensor:
    """A distribution of all texts of four tokens.  (V, V, V, V)"""
    return torch.rand(V, V, V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(0).square()


def oracle(joint: Tensor) -> Callable[[Problems], Tensor]:
    """A network that knows the distribution: the exact conditional of each target given the context."""
    joint = joint / joint.sum()

    def answer(problems: Problems) -> Tensor:
        found = []
        for s in range(len(problems)):
            a, b = problems.offsets.bounds[s : s + 2].tolist()
            p = joint
            for token, place in zip(problems.tokens[a:b].tolist(), problems.positions[a:b].tolist(), strict=True):
                p = p * (torch.arange(V) == token).view([-1 if i == place else 1 for i in range(L)])
            c, d = problems.target_offsets.bounds[s : s + 2].tolist()
            for place in problems.targets[c:d].tolist():
                found.append(p.sum([i for i in range(L) if i != place]))
        return (torch.stack(found) if found else torch.zeros(0, V)).log().float()

    return answer


def log_p(joint: Tensor, prefix: list[int], target: list[int]) -> float:
    """log p(target | prefix), by summing over all texts."""
    whole, given = joint[(*prefix, *target)].sum(), joint[tuple(prefix)].sum() if prefix else joint.sum()
    return float((whole / given).log())


@pytest.mark.parametrize("m", [1, 2])
def test_the_score_of_a_short_target_is_its_likelihood(joint, m):
    requests = [
        (list(text[:n]), list(text[n : n + m]))
        for n in range(L - m + 1)
        for text in itertools.product(range(V), repeat=n + m)
    ]
    found = options.conditional(oracle(joint), requests, samples=4, batch=7)
    assert found == pytest.approx([log_p(joint, *request) for request in requests], abs=1e-5)


def test_the_score_of_a_longer_target_is_its_likelihood_on_average(joint):
    """Over seeds, and over requests of one call, one at a time too."""
    request, network = ([1], [2, 0, 1]), oracle(joint)
    for scores in (
        [options.conditional(network, [request], samples=3, seed=seed)[0] for seed in range(300)],
        options.conditional(network, [request] * 300, samples=3, batch=1),
    ):
        found = torch.tensor(scores)
        assert abs(float(found.mean()) - log_p(joint, *request)) < 4 * float(found.std()) / math.sqrt(300) + 1e-6


def test_a_conditional_score_has_less_variance_than_the_joint_form(joint):
    request = ([1, 2], [0, 1])
    network = oracle(joint)
    ours, papers = (
        torch.tensor([form(network, [request], samples=4, seed=s)[0] for s in range(60)])
        for form in (options.conditional, options.joint)
    )
    assert float(ours.std()) < 1e-5
    assert float(papers.std()) * L > 0.01
    assert abs(float(papers.mean()) * L - log_p(joint, [], [1, 2, 0, 1])) < 4 * float(papers.std()) * L / math.sqrt(60)


def test_the_joint_form_is_the_bound_of_everything_per_token(tiny):
    network = tiny("position")
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    keys = row_keys(2, torch.tensor([0]))  # of the first request
    expected = -float(bound(network, tokens, samples=6, keys=keys)) / 5
    assert options.joint(network, [([1, 2], [3, 4, 5])], samples=6, seed=2) == [pytest.approx(expected)]


def test_scores_do_not_depend_on_the_order_of_requests(tiny):
    network, rng = tiny("position"), random.Random(0)
    requests = [([rng.randrange(10) for _ in range(rng.randrange(1, 5))], [rng.randrange(10)]) for _ in range(12)]
    found = options.conditional(network, requests, batch=3)
    assert options.conditional(network, requests[::-1], batch=5) == pytest.approx(found[::-1], abs=1e-5)


def test_a_causal_model_has_exact_scores(tiny):
    network = tiny("causal", scale=0.3)
    (whole,) = options.conditional(network, [([], [1, 2, 3, 4])])
    (first,), (second,) = (options.conditional(network, [r]) for r in (([], [1, 2]), ([1, 2], [3, 4])))
    assert whole == pytest.approx(first + second, abs=1e-5)


@pytest.mark.parametrize("kind", ["position", "masked", "causal"])
def test_greedy_answers_are_those_that_filling_gives(kind, tiny):
    network = tiny(kind, scale=0.4, seed=3)
    model = Model(network)
    prefix = [1, 2, 3]
    rows = torch.tensor([[*prefix, 0, 0, 0]])
    known = torch.arange(6)[None] < 3
    filled = maskless.fill(model, rows, known=known, steps=3, order="left", temperature=0).tokens[0, 3:].tolist()
    wrong = [*filled[:2], (filled[2] + 1) % 10]
    requests = [(prefix, filled), (prefix, wrong), (prefix, filled[:1]), (prefix, [])]
    assert options.greedy(network, requests) == [True, False, True, False]


@pytest.mark.parametrize("kind", ["position", "masked"])
def test_answers_at_once_may_follow_prefixes_of_any_length(kind, tiny):
    """Six tokens in all, of which one to five are given, and some that end earlier."""
    network, rng = tiny(kind, scale=0.4, seed=3), random.Random(0)
    requests, expected = [], []
    for n, end in [(1, 6), (2, 6), (3, 6), (5, 6), (2, 4), (3, 4), (4, 6), (2, 6)]:
        rows = torch.tensor([[rng.randrange(10) for _ in range(end)]])
        filled = maskless.fill(Model(network), rows, known=torch.arange(end)[None] < n, steps=1, temperature=0)
        prefix, right = filled.tokens[0].tolist()[:n], filled.tokens[0].tolist()[n:]
        requests += [(prefix, right), (prefix, [*right[:-1], (right[-1] + 1) % 10])]
        expected += [True, False]
    for batch in (1, 3, 32):
        assert options.at_once(network, requests, batch=batch) == expected


def test_requests_are_fitted_from_the_left():
    assert options.fitted([1, 2, 3, 4], [5, 6], 5, [0]) == ([0, 3, 4], [5, 6])
    assert options.fitted([1], [5], 5, [0]) == ([0, 1], [5])
    with pytest.raises(ValueError, match="a target is 6 tokens long: expected at most 5"):
        options.fitted([1], [1] * 6, 5)
    with pytest.raises(ValueError, match="a target is empty: expected at least one token"):
        options.fitted([1], [], 5)
