"""A chain has the conditionals of sampling, sees nothing that comes later, and its likelihood is a distribution's."""

import itertools

import pytest
import torch
from torch import Tensor

from maskless.mixture import Mixture
from maskless.objective import along, bound, chain, noise
from maskless.problems import Seen, dense, split
from maskless.problems import chain as chained
from objective_tasks import loss

L, V = 6, 3


@pytest.fixture(scope="module")
def ordered(tiny):
    return tiny("ordered", vocab=V, length=L, scale=0.3)


def batch(rows: int, length: int = L, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (rows, length), generator=generator)
    return tokens, torch.rand(rows, length, generator=generator).argsort(1)


@torch.no_grad()
@pytest.mark.parametrize(("starts", "ends"), [([0] * 3, [L] * 3), ([0, 2, 5, 3], [4, 6, 6, 3])])
def test_the_logits_of_a_chain_are_those_of_each_prefix_alone(ordered, starts, ends):
    """Also where rows know and want different numbers."""
    tokens, order = batch(len(starts))
    problems, index = chained(tokens, order, torch.tensor(starts), torch.tensor(ends))
    assert problems.seen == Seen(problems.seen.counts, chain=True)
    spans = list(enumerate(zip(starts, ends, strict=True)))
    assert torch.equal(index, torch.cat([row * L + order[row, a:b] for row, (a, b) in spans]))
    logits = ordered(problems).split([b - a for a, b in zip(starts, ends, strict=True)])
    for row, (start, end) in spans:
        for n in range(start, end):
            known, target = order[row, None, :n], order[row, None, n : n + 1]
            alone = ordered(dense(tokens[row, None].gather(1, known), known, target))
            torch.testing.assert_close(logits[row][n - start, None], alone, atol=1e-4, rtol=0)


@torch.no_grad()
def test_tokens_that_are_decided_together_see_only_the_steps_before(ordered):
    tokens, order = batch(2)
    seen = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 1, 1, 1, 4, 4]])
    costs = along(ordered, tokens, order, torch.zeros(2).long(), seen=seen)
    for row, n in itertools.product(range(2), range(L)):
        known, target = order[row, None, : seen[row, n]], order[row, None, n : n + 1]
        logits = ordered(dense(tokens[row, None].gather(1, known), known, target)).double()
        expected = -logits.log_softmax(-1)[0, tokens[row, order[row, n]]]
        torch.testing.assert_close(costs[row, order[row, n]], expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_exact_likelihood_sums_to_one_over_all_sequences_in_every_order(tiny):
    network = tiny("ordered", vocab=V, length=4, scale=0.3)
    every = torch.tensor(list(itertools.product(range(V), repeat=4)))
    for order in itertools.permutations(range(4)):
        for seen in (None, torch.tensor([[0, 0, 2, 2]]).expand(len(every), 4)):
            orders, nothing = torch.tensor([order]).repeat(len(every), 1), torch.zeros(len(every)).long()
            costs = along(network, every, orders, nothing, seen=seen)
            assert float((-costs.sum(1)).exp().sum()) == pytest.approx(1, abs=1e-5)


@torch.no_grad()
def test_the_mean_over_orders_is_the_any_order_bound(tiny):
    """The bound, enumerated: over how many tokens are shown, which ones, and in which order they became known."""
    network = tiny("ordered", vocab=V, length=4, scale=0.3)
    tokens = torch.tensor([[2, 0, 1, 1]])
    orders = torch.tensor(list(itertools.permutations(range(4))))
    rows = tokens.repeat(len(orders), 1)
    enumerated = 0.0
    for n in range(4):  # each order shows its first n tokens and hides the others, whose mean cost counts
        problems, index = split(rows, orders, torch.full((24,), n), torch.full((24,), 4))
        costs = -network(problems).double().log_softmax(-1).gather(1, rows.flatten()[index, None])
        enumerated += float(costs.mean())
    task = chain(lambda t, u: orders)(rows, None, None, torch.ones_like(rows))
    assert task.weights.tolist() == [1.0] * 96
    assert float(loss(network, task)) / 24 == pytest.approx(enumerated, rel=1e-5)
    estimate = bound(network, tokens.repeat(400, 1), samples=8)
    error = float(estimate.std()) / 400**0.5
    assert abs(float(estimate.mean()) - enumerated) < 4 * error


@torch.no_grad()
def test_a_network_that_answers_no_chains_is_asked_token_by_token(tiny):
    tokens, order = batch(3)
    given = torch.tensor([0, 2, 1])
    for kind in ("position", "masked"):
        network = tiny(kind, vocab=V + 1, length=L, scale=0.3)
        costs = along(network, tokens, order, given)
        for row, n in itertools.product(range(3), range(L)):
            known, target = order[row, None, :n], order[row, None, n : n + 1]
            logits = network(dense(tokens[row, None].gather(1, known), known, target)).double()
            expected = -logits.log_softmax(-1)[0, tokens[row, order[row, n]]] * (n >= given[row])
            torch.testing.assert_close(costs[row, order[row, n]], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "how", "says"),
    [
        ("position", {}, "a chain with context 'full' would see what it predicts: expected 'ordered'"),
        ("mean", {"context": "ordered"}, "a chain with queries 'mean' would see what it predicts"),
        ("masked", {}, "a masked network shows every target its whole context: expected no chain"),
    ],
)
def test_a_network_that_would_see_what_it_predicts_refuses_a_chain(kind, how, says, tiny):
    tokens, order = batch(2)
    problems, _ = chained(tokens, order, torch.zeros(2).long(), torch.full((2,), L))
    with pytest.raises(ValueError, match=says):
        tiny(kind, vocab=V + 1, length=L, **how)(problems)


def test_gradients_are_those_of_each_prefix_alone(ordered):
    tokens, order = batch(2)
    problems, index = chained(tokens, order, torch.zeros(2).long(), torch.full((2,), L))
    answers, parameters = tokens.flatten()[index], list(ordered.parameters())
    total = torch.nn.functional.cross_entropy(ordered(problems), answers, reduction="sum")
    together = torch.autograd.grad(total, parameters)
    parts = []
    for n in range(L):
        one, at = split(tokens, order, torch.full((2,), n), torch.full((2,), n + 1))
        parts.append(torch.nn.functional.cross_entropy(ordered(one), tokens.flatten()[at], reduction="sum"))
    apart = torch.autograd.grad(sum(parts), parameters, allow_unused=True)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_only_valid_tokens_weigh_and_the_bos_of_an_image_is_never_predicted():
    tokens, _ = batch(8, 1 + L)
    t, u = noise(8, 1 + L, seed=0, step=0)
    valid = torch.rand(8, 1 + L, generator=torch.Generator().manual_seed(1)) < 0.5
    mixture = Mixture.parse("random,raster", image=True)
    task = chain(lambda t, u: mixture.draw(t, u, lead=1, grid=(2, 3)), given=1)(tokens, t, u, valid)
    assert task.problems.targets.min() == 1
    assert task.problems.seen.counts.view(8, L).tolist() == [list(range(1, 1 + L))] * 8
    assert (task.problems.positions.view(8, L)[:, 0] == 0).all()
    rows = task.problems.target_offsets.owner
    assert torch.equal(task.answers, tokens[rows, task.problems.targets])
    assert torch.equal(task.weights, valid[rows, task.problems.targets].float())
