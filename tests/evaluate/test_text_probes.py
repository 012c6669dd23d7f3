"""Probes of a network: orders against brute force, leaks that are found, gradient variance in closed form."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from maskless.evaluate.orders import along
from maskless.evaluate.probes import gradient_variance, leak, objectives_of
from maskless.objective import OBJECTIVES, Task, bound, mdlm, pgm_exact
from maskless.problems import Problems, dense
from maskless.schedule import bounded, released
from objective_tasks import loss

V, L = 11, 8


def rows(count: int, length: int = L, seed: int = 0) -> Tensor:
    return torch.randint(0, V - 1, (count, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def log_p(network, row: Tensor, context: list[int], targets: list[int]) -> Tensor:
    """Log-probabilities at some positions, given the tokens at others in this order.  -> (k, V)"""
    known = torch.tensor([context], dtype=torch.long)
    return network(dense(row[known], known, torch.tensor([targets]))).float().log_softmax(-1)


# Orders


def test_left_to_right_is_the_sum_over_the_tokens_before(network):
    tokens = rows(3)
    expected = [-sum(float(log_p(network, row, list(range(i)), [i])[0, row[i]]) for i in range(L)) for row in tokens]
    assert along(network, tokens, "left", samples=L).tolist() == pytest.approx(expected, rel=1e-5)


def test_steps_of_several_tokens_predict_them_together(network):
    tokens = rows(2)
    expected = []
    for row in tokens:
        cost = 0.0
        for begin, end in ((0, 2), (2, 5), (5, 8)):
            found = log_p(network, row, list(range(begin)), list(range(begin, end)))
            cost -= float(found.gather(1, row[begin:end, None]).sum())
        expected.append(cost)
    assert along(network, tokens, "left", steps=3, samples=3).tolist() == pytest.approx(expected, rel=1e-5)


def test_confidence_takes_the_surest_position_first(network):
    tokens = rows(3, seed=4)
    expected = []
    for row in tokens:
        known: list[int] = []
        cost = 0.0
        for _ in range(4):  # 4 steps of 2 tokens
            hidden = [i for i in range(L) if i not in known]
            found = log_p(network, row, known, hidden)
            surest = found.amax(-1).argsort(descending=True, stable=True)[:2].tolist()
            cost -= sum(float(found[j, row[hidden[j]]]) for j in surest)
            known += [hidden[j] for j in surest]
        expected.append(cost)
    assert along(network, tokens, "confidence", steps=4).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("order", ["random", "left"])
def test_a_few_steps_stand_for_all(network, order):
    tokens = rows(1).expand(1500, L)
    few = along(network, tokens, order, samples=2, seed=1)
    if order == "random":
        exact = bound(network, tokens, samples=8)
        error = math.hypot(float(few.std()), float(exact.std())) / math.sqrt(len(few))
    else:
        exact, error = along(network, tokens[:1], order, samples=L), float(few.std()) / math.sqrt(len(few))
    assert abs(float(few.mean() - exact.mean())) < 4 * error + 1e-6


def test_every_order_sums_to_one_over_all_texts(tiny):
    """So each is a likelihood, that of confidence too."""
    network = tiny("position", vocab=3, length=3, scale=0.5)
    texts = torch.tensor(list(itertools.product(range(3), repeat=3)))
    for order, steps in itertools.product(("left", "confidence"), (1, 2, 3)):
        cost = along(network, texts, order, steps=steps, samples=3)
        assert float((-cost).exp().sum()) == pytest.approx(1, rel=1e-4)


def test_what_has_no_order_is_refused(tiny):
    with pytest.raises(ValueError, match="unknown order 'spiral': expected one of random, left, strands, confidence"):
        along(tiny("position"), rows(1), "spiral")
    with pytest.raises(ValueError, match="knows one order only"):
        along(tiny("causal"), rows(1), "random")


# Leaks


@pytest.mark.parametrize("kind", ["position", "mean", "logsumexp", "ordered", "masked", "causal"])
def test_no_network_leaks_and_all_see_what_they_may(kind, tiny):
    found = leak(tiny(kind, scale=0.3), rows(4), vocab=V - 1)
    assert found.tight
    assert (found.moved, found.furthest) == (0, 0.0)
    assert found.gradient == (None if kind == "causal" else 0.0)
    assert found.seen > 0.9
    assert found.error == pytest.approx(3 / found.predictions)


class Leaking(nn.Module):
    """A network that adds to the predictions of every problem a little of what the next problem knows."""

    def __init__(self, network: nn.Module, amount: float = 1e-3):
        super().__init__()
        self.network, self.embedding, self.amount = network, network.embedding, amount

    def forward(self, problems: Problems) -> Tensor:
        told = torch.zeros(len(problems), self.embedding.weight.shape[1])
        told = told.index_add(0, problems.offsets.owner, self.embedding(problems.tokens)).roll(1, 0)
        logits = self.network(problems)
        return logits + self.amount * told.sum(1)[problems.target_offsets.owner, None]


def test_a_leaking_network_is_found_out(tiny):
    found = leak(Leaking(tiny("position")), rows(4), vocab=V - 1)
    assert not found.tight
    assert found.moved > found.predictions / 2
    assert found.furthest > 0
    assert found.error < 0.2
    found = leak(Leaking(tiny("position"), 1e-12), rows(4), vocab=V - 1)
    assert found.gradient  # what is too small to move a float32 logit still has one
    assert not found.tight


def test_a_causal_network_that_looks_ahead_is_found_out(tiny):
    network = tiny("causal", scale=0.3)
    for block in network.blocks:
        block.causal = False
    found = leak(network, rows(4), vocab=V - 1)
    assert not found.tight


def test_a_network_comes_back_as_it_was(tiny):
    network = tiny("position").train()
    leak(network, rows(2), vocab=V - 1)
    assert network.training
    with pytest.raises(ValueError, match=r"expected \(B, L\)"):
        leak(network, rows(2)[0], vocab=V)
    with pytest.raises(ValueError, match="vocab 1 is out of range"):
        leak(network, rows(2), vocab=1)


# Variance


class Bias(nn.Module):
    """A network that knows nothing but how often each token comes: the gradient of a target is p - its token."""

    def __init__(self, vocab: int):
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, vocab))

    def forward(self, problems: Problems) -> Tensor:
        return self.bias.expand(len(problems.targets), -1)


@pytest.mark.parametrize("name", ["mdlm", "pgm"])
def test_one_token_has_the_variance_of_its_weight(name):
    """The weight is 1/t with probability t (mdlm), or 1/2t and 1/2(1-t) with t and 1-t (pgm).

    Here t is uniform between a fifth and four fifths: over all times the tail is too heavy for a small test.
    """
    network, token = Bias(5), torch.tensor([[3]])

    def between(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor):
        return OBJECTIVES[name](tokens, 0.2 + 0.6 * t, u, valid)

    g = float((network.bias.detach().softmax(0) - torch.eye(5)[3]).double().square().sum())
    times = {"mdlm": released, "pgm": bounded}[name]
    a, b = (float(times(torch.tensor(t, dtype=torch.float64))) for t in (0.2, 0.8))
    if name == "mdlm":
        expected = g * (math.log(b / a) / (b - a) - 1)
    else:
        expected = g * (0.25 * (math.log(b / a) + math.log((1 - a) / (1 - b))) / (b - a) - 1)
    found = gradient_variance(network, token, between, name, pairs=1000)
    assert abs(found.variance - expected) < 4 * found.error
    assert abs(found.signal - g) < 4 * found.signal_error
    assert found.error < 0.1 * found.variance


def test_at_equal_cost_draws_that_are_averaged_gain_nothing():
    """Two of them have half the variance and cost twice as much."""

    def draws(count: int):
        def objective(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
            t, u = (torch.cat([x * 1000**i % 1 for i in range(count)]) for x in (t, u))
            task = mdlm(tokens.repeat(count, 1), 0.2 + 0.6 * t, u, valid.repeat(count, 1))
            return Task(task.problems, task.answers, task.weights / count)

        return gradient_variance(Bias(5), torch.tensor([[3]]), objective, "mdlm", pairs=200)

    one, two = draws(1), draws(2)
    assert two.cost == 2 * one.cost
    unsure = math.hypot(one.error * one.cost, two.error * two.cost)
    assert abs(two.at_equal_cost - one.at_equal_cost) < 4 * unsure
    assert abs(two.variance - one.variance) > 4 * unsure
    assert two.as_dict()["at_equal_cost"] == two.at_equal_cost


def test_the_variance_is_that_of_all_splits(tiny):
    """pgm-exact has finitely many: every size and every order, equally likely."""
    network, tokens = tiny("position", length=3, scale=0.3), rows(1, 3)
    parameters = list(network.parameters())
    gradients = []
    for n, order in itertools.product(range(3), itertools.permutations((0.1, 0.5, 0.9))):
        t, u = torch.tensor([(n + 0.5) / 3], dtype=torch.float64), torch.tensor([order], dtype=torch.float64)
        cost = loss(network, pgm_exact(tokens, t, u, torch.ones_like(tokens, dtype=torch.bool))) / 3
        found = torch.autograd.grad(cost, parameters, allow_unused=True)
        each = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        gradients.append(torch.cat([g.flatten() for g in each]).double())
    every = torch.stack(gradients)
    expected, signal = float((every - every.mean(0)).square().sum(1).mean()), float(every.mean(0).square().sum())
    measured = gradient_variance(network, tokens, pgm_exact, "pgm-exact", pairs=100)
    assert abs(measured.variance - expected) < 4 * measured.error
    assert abs(measured.signal - signal) < 4 * measured.signal_error
    assert measured.error < 0.15 * measured.variance
    assert measured.cost == 1


def test_two_groups_have_less_variance_than_one(tiny):
    tokens = rows(6)
    for kind, names in (
        ("position", ["pgm", "pgm-exact", "pgm-released", "mdlm"]),
        ("masked", ["mdlm-complementary", "mdlm"]),
    ):
        network = tiny(kind, scale=0.3)
        objectives = objectives_of(network)
        assert list(objectives) == names
        found = {name: gradient_variance(network, tokens, objectives[name], name, pairs=24) for name in objectives}
        assert found[names[0]].variance < found["mdlm"].variance
        assert found[names[0]].cost == pytest.approx(2 * found["mdlm"].cost, rel=1e-6)
    with pytest.raises(ValueError, match="has no split to vary"):
        objectives_of(tiny("causal"))


def test_probes_in_two_threads_do_not_hide_a_leak_from_each_other(tiny):
    """Both look at the same embedding, at the same time."""
    both, inner = threading.Barrier(2), tiny("masked", scale=0.3)

    class Leaky(nn.Module):
        """Answers all problems of a batch from the tokens of all of them."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = inner.embedding

        def forward(self, problems: Problems) -> Tensor:
            both.wait(60)
            seen = self.embedding(problems.tokens).sum(0)
            both.wait(60)  # neither has gone while the other looks
            return seen[:V].expand(len(problems.targets), V) * torch.arange(1, V + 1)

    network = Leaky()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda seed: leak(network, rows(2), vocab=V - 1, seed=0), range(2)))
    assert found[0] == found[1]
    assert found[0].gradient
