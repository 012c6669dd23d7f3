"""The bound: every objective and estimator has the mean over all orders, and a causal network's score is exact."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.checkpoint import Model
from maskless.logits import row_keys
from maskless.objective import OBJECTIVES, bound, paper_bound
from maskless.problems import Problems, dense
from objective_tasks import ROW, UNBIASED, L, V, by_row, loss, near, task_of, uniform_network


def every_context(network) -> Tensor:
    """Logits at every position for every set of known tokens of ROW; bit i of a set says that i is known."""
    table = []
    for code in range(2**L):
        known = torch.tensor([i for i in range(L) if code >> i & 1], dtype=torch.long)
        table.append(network.predict(ROW[known][None], known[None], torch.arange(L)[None])[0])
    return torch.stack(table)  # (2^L, L, V)


class Table:
    """A network that looks its answers up, so that 100,000 problems take no time."""

    def __init__(self, network):
        with torch.no_grad():
            self.logits = every_context(Model(network))
        self.cost = -self.logits.log_softmax(-1)[:, torch.arange(L), ROW].double()  # (2^L, L)

    def __call__(self, problems: Problems) -> Tensor:
        assert torch.equal(problems.tokens, ROW[problems.positions])
        code = torch.zeros(len(problems), dtype=torch.long)
        code.index_add_(0, problems.offsets.owner, 1 << problems.positions)
        return self.logits[code[problems.target_offsets.owner], problems.targets]

    def exact(self, known: int = 0, counted: int = 15) -> float:
        """The mean over all orders of the unknown positions of the costs as they are decided one by one."""
        unknown = [i for i in range(L) if not known >> i & 1]
        totals = []
        for order in itertools.permutations(unknown):
            code, total = known, 0.0
            for position in order:
                total += float(self.cost[code, position]) * (counted >> position & 1)
                code |= 1 << position
            totals.append(total)
        return sum(totals) / len(totals)


@pytest.fixture(scope="module", params=["position", "mean", "masked"])
def table(request, tiny) -> Table:
    vocab = V + (request.param == "masked")
    made = Table(tiny(request.param, scale=0.3, vocab=vocab, length=L))
    assert (made.cost[1:15:2, 1:] - made.cost[0, 1:]).abs().max() > 0.5  # costs depend on the context, or nothing shows
    return made


def bits(code: int) -> Tensor:
    return torch.tensor([bool(code >> i & 1) for i in range(L)])


@pytest.mark.parametrize("name", UNBIASED)
def test_every_objective_estimates_the_same_bound(name, table):
    rows = 100_000
    task = task_of(name, rows)
    cost = F.cross_entropy(table(task.problems), task.answers, reduction="none")
    estimates = by_row(name, task, cost * task.weights, rows)
    assert near(estimates, table.exact())
    assert float(estimates.std()) / rows**0.5 < 0.02 * table.exact()  # sharp enough to tell a wrong weight


def test_pgm_exact_averages_to_the_bound_over_all_sizes_and_orders(table):
    orders = torch.tensor(list(itertools.permutations(range(L)))).double() / L
    t = (torch.arange(L).double() + 0.5).repeat_interleave(len(orders)) / L
    tokens = ROW.repeat(len(t), 1)
    task = OBJECTIVES["pgm-exact"](tokens, t, orders.repeat(L, 1), torch.ones_like(tokens, dtype=torch.bool))
    torch.testing.assert_close(float(loss(table, task)) / len(t), table.exact(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("samples", [1, 3, 8])
@pytest.mark.parametrize("known", [0b0000, 0b0100, 0b1010])
def test_the_bound_estimates_the_mean_over_all_orders(table, known, samples):
    rows = 20_000 // samples
    estimates = bound(table, ROW.repeat(rows, 1), bits(known).repeat(rows, 1), samples=samples, seed=1)
    assert near(estimates, table.exact(known))


def test_the_bound_of_an_ordered_context_is_the_mean_over_all_orders(tiny):
    model = Model(tiny("ordered", scale=0.3, vocab=V, length=L))
    costs = []
    with torch.no_grad():
        for order in itertools.permutations(range(L)):
            for n in range(L):
                shown, target = torch.tensor([order[:n]], dtype=torch.long), torch.tensor([order[n : n + 1]])
                logits = model.predict(ROW[shown], shown, target)[0]
                costs.append(float(F.cross_entropy(logits, ROW[target[0]])))
    estimates = bound(model.network, ROW.repeat(4_000, 1), samples=L)
    assert near(estimates, L * sum(costs) / len(costs))


@pytest.mark.parametrize("known", [0b0111, 0b1111])
def test_the_bound_of_one_unknown_token_or_none_is_exact(table, known):
    estimates = bound(table, ROW.repeat(5, 1), bits(known).repeat(5, 1), samples=2)
    expected = torch.full((5,), table.exact(known), dtype=torch.float64)
    torch.testing.assert_close(estimates, expected, atol=1e-6, rtol=0)


def test_only_counted_tokens_cost(table):
    counted = bits(0b0110).repeat(20_000, 1)
    assert near(bound(table, ROW.repeat(20_000, 1), counted=counted, samples=2), table.exact(counted=0b0110))
    assert near(paper_bound(table, ROW.repeat(20_000, 1), counted=counted), table.exact(counted=0b0110))


def test_the_bound_is_the_sum_over_how_many_are_shown():
    def costs_fall_with_context(problems: Problems) -> Tensor:
        shown = problems.offsets.lengths[problems.target_offsets.owner]
        return F.pad(shown[:, None].float(), (0, V - 1))  # token 0 gets likelier

    tokens, known = torch.zeros(6, 9, dtype=torch.long), torch.arange(9) < torch.arange(6)[:, None]
    expected = []
    for row in known:
        shown = torch.arange(int(row.sum()), 9).float()
        logits = F.pad(shown[:, None], (0, V - 1))
        expected.append(float(F.cross_entropy(logits, torch.zeros(len(shown), dtype=torch.long), reduction="sum")))
    for row, exact in enumerate(expected):
        m = int((~known[row]).sum())
        estimate = bound(costs_fall_with_context, tokens[row : row + 1], known[row : row + 1], samples=m, seed=row)
        torch.testing.assert_close(float(estimate), exact, rtol=1e-6, atol=0)


def test_each_sample_of_the_bound_lets_two_groups_predict_each_other():
    seen: list[Problems] = []

    def watching(problems: Problems) -> Tensor:
        seen.append(problems)
        return uniform_network(problems)

    known = torch.tensor([[False] * 7, [True, False, False, True, False, False, False]])
    bound(watching, torch.zeros(2, 7, dtype=torch.long), known, samples=5)
    for one, other in zip(seen[::2], seen[1::2], strict=True):
        for row in range(2):
            given = set(known[row].nonzero()[:, 0].tolist())
            shown = [set(p.positions[p.offsets.owner == row].tolist()) - given for p in (one, other)]
            asked = [set(p.targets[p.target_offsets.owner == row].tolist()) for p in (one, other)]
            assert shown == asked[::-1]
            assert shown[0] | shown[1] | given == set(range(7))
            assert given <= set(one.positions[one.offsets.owner == row].tolist())
    assert len({len(problems.targets) for problems in seen}) > 2


@pytest.mark.parametrize("samples", [1, 2, 7])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_uniform_model_costs_exactly_log_v_per_unknown_token(samples, length):
    tokens = torch.zeros(7, length, dtype=torch.long)
    log_v = float(F.cross_entropy(torch.zeros(1, V), torch.zeros(1, dtype=torch.long)))
    whole = bound(uniform_network, tokens, samples=samples)
    torch.testing.assert_close(whole, torch.full((7,), length * log_v).double(), rtol=1e-7, atol=0)
    known = torch.rand(7, length, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 7)[:, None]
    given = bound(uniform_network, tokens, known, samples=samples)
    torch.testing.assert_close(given, (~known).sum(1) * torch.tensor(log_v).double(), rtol=1e-7, atol=0)


def causal_log_probability(network, tokens: Tensor) -> Tensor:
    """Of whole rows, token by token, each from a problem of its own.  (B, n) -> (B,)"""
    total = torch.zeros(len(tokens))
    for position in range(tokens.shape[1]):
        before, here = tokens[:, :position], torch.full((len(tokens), 1), position)
        with torch.no_grad():
            each = network(dense(before, torch.arange(position).expand_as(before), here)).log_softmax(-1)
        total += each.gather(1, tokens[:, position : position + 1])[:, 0]
    return total.double()


def test_a_causal_network_is_scored_exactly(tiny):
    network = tiny("causal", scale=0.5, length=L, vocab=V)
    tokens = torch.cartesian_prod(*[torch.arange(V)] * L)
    score = -bound(network, tokens)
    torch.testing.assert_close(score.exp().sum(), torch.tensor(1.0).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(score, causal_log_probability(network, tokens), atol=1e-4, rtol=0)
    known = torch.arange(L).expand_as(tokens) < 2
    prompt = causal_log_probability(network, tokens[:, :2])
    torch.testing.assert_close(-bound(network, tokens, known), score - prompt, atol=1e-4, rtol=0)


def test_a_row_with_a_key_is_split_by_it_alone(tiny):
    network = tiny("position", scale=0.5, length=L, vocab=V)
    keys = row_keys(3, torch.arange(40))
    together = bound(network, ROW.repeat(40, 1), samples=2, keys=keys)
    alone = [bound(network, ROW[None], samples=2, seed=9, keys=keys[i : i + 1]) for i in (0, 7, 39)]
    torch.testing.assert_close(torch.cat(alone), together[[0, 7, 39]], atol=5e-4, rtol=0)
    assert len({round(float(score), 4) for score in together}) > 5
    table = Table(network)
    many = bound(table, ROW.repeat(20_000, 1), samples=2, keys=row_keys(0, torch.arange(20_000)))
    assert near(many, table.exact())


def test_a_causal_network_does_not_score_a_gap_with_text_behind_it(tiny):
    network = tiny("causal", scale=0.5, length=L, vocab=V)
    with pytest.raises(ValueError, match="causal"):
        bound(network, ROW[None], torch.tensor([[True, False, True, False]]))


def test_the_bound_asks_with_the_labels_of_the_sequences():
    def knows_its_label(problems: Problems) -> Tensor:
        assert problems.labels is not None
        return 5.0 * F.one_hot(problems.labels[problems.target_offsets.owner], V)

    tokens = torch.tensor([[0] * L, [2] * L])
    right = bound(knows_its_label, tokens, labels=torch.tensor([0, 2]))
    wrong = bound(knows_its_label, tokens, labels=torch.tensor([1, 2]))
    assert right[0] == right[1] == wrong[1]
    assert wrong[0] - right[0] == pytest.approx(5.0 * L)
