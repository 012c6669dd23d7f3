"""Objectives estimate one bound, weigh as they say, and do not depend on how a batch is shared out."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.checkpoint import Model
from maskless.objective import OBJECTIVES, bound, drop_labels, loss, noise, paper_bound
from maskless.problems import Problems, dense
from maskless.schedule import EDGE

L, V = 4, 3
ROW = torch.tensor([2, 0, 1, 1])
UNBIASED = ["pgm", "pgm-exact", "mdlm"]


def uniform_network(problems: Problems) -> Tensor:
    return torch.zeros(len(problems.targets), V)


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


def task_of(name: str, rows: int, seed: int = 0, valid: Tensor | None = None, length: int = L):
    t, u = noise(rows, length, seed=seed, step=0)
    tokens = ROW.repeat(rows, 1) if length == L else torch.zeros(rows, length, dtype=torch.long)
    return OBJECTIVES[name](tokens, t, u, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid)


def place(name: str, problems: Problems) -> tuple[Tensor, Tensor]:
    """The row and the position of every target."""
    owner = problems.target_offsets.owner
    return (owner // 2 if name.startswith("pgm") else owner), problems.targets


def by_row(name: str, task, values: Tensor, rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.float64).index_add(0, place(name, task.problems)[0], values.double())


def near(values: Tensor, truth: float, errors: float = 4.0) -> bool:
    standard_error = float(values.std()) / len(values) ** 0.5
    return abs(float(values.mean()) - truth) < errors * standard_error + 1e-6 * abs(truth)


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


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_every_sequence_of_pgm_exact_weighs_its_length_whatever_the_split(length):
    task = task_of("pgm-exact", 100, length=length)
    torch.testing.assert_close(by_row("pgm-exact", task, task.weights, 100), torch.full((100,), length).double())
    cost = float(loss(uniform_network, task)) / 100
    torch.testing.assert_close(cost, length * float(torch.tensor(float(V)).log()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", UNBIASED)
def test_the_expected_weight_of_every_token_is_one(name):
    rows = 100_000
    task = task_of(name, rows)
    row, position = place(name, task.problems)
    weight = torch.zeros(rows, L, dtype=torch.float64).index_put((row, position), task.weights.double())
    for column in weight.T:
        assert near(column, 1.0)


def one_row(name: str, t: float, u: list[float]):
    tokens = torch.zeros(1, len(u), dtype=torch.long)
    task = OBJECTIVES[name](tokens, torch.tensor([t]).double(), torch.tensor([u]).double(), tokens == 0)
    return dict(zip(task.problems.targets.tolist(), task.weights.tolist(), strict=True))


def test_a_token_weighs_half_of_one_over_the_probability_of_its_group():
    weights = one_row("pgm", 0.2, [0.1, 0.9, 0.5])
    t = EDGE + (1 - 2 * EDGE) * 0.2  # the chance of the second group, where only the 0.9 falls
    assert weights == pytest.approx({0: 0.5 / (1 - t), 1: 0.5 / t, 2: 0.5 / (1 - t)})


def test_no_weight_of_pgm_passes_half_of_one_over_the_edge():
    largest = one_row("pgm", 0.0, [0.1, 1 - 1e-9])[1], one_row("pgm", 1 - 1e-12, [0.0, 0.9])[0]
    assert largest == pytest.approx((0.5 / EDGE, 0.5 / EDGE))
    assert float(task_of("pgm", 100_000).weights.max()) <= 0.5 / EDGE * (1 + 1e-6)


def test_the_weights_of_the_released_objective_pass_it():
    assert one_row("pgm-released", 1 - 1e-6, [0.0, 0.9])[0] > 100 * 0.5 / EDGE
    assert one_row("pgm-released", 0.0, [0.1, 1 - 1e-9])[1] == pytest.approx(0.5 / EDGE)


def test_mdlm_predicts_the_hidden_tokens_with_weight_one_over_t():
    t = EDGE + (1 - EDGE) * 0.5
    assert one_row("mdlm", 0.5, [0.6, 0.1, 0.9]) == pytest.approx({0: 1 / t, 2: 1 / t})


def test_the_causal_objective_predicts_every_token_once_from_those_before():
    task = task_of("causal", 3)
    assert task.weights.tolist() == [1.0] * 3 * L
    assert task.problems.targets.tolist() == [0, 1, 2, 3] * 3
    assert task.problems.positions.tolist() == [0, 1, 2] * 3
    assert torch.equal(task.problems.tokens, ROW[:3].repeat(3))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_answers_are_the_tokens_at_the_targets_and_only_valid_ones_weigh(name):
    rows = 50
    valid = torch.rand(rows, L, generator=torch.Generator().manual_seed(0)) < 0.5
    task, plain = task_of(name, rows, valid=valid), task_of(name, rows)
    row, position = place(name, task.problems)
    assert torch.equal(task.answers, ROW[position])
    assert torch.equal(task.weights, plain.weights * valid[row, position])


@pytest.mark.parametrize("name", ["pgm", "pgm-exact", "pgm-released", "mdlm"])
def test_the_context_of_a_problem_comes_in_random_order(name, p_value):
    task = task_of(name, 30_000)
    offsets = task.problems.offsets
    begin = offsets.bounds[:-1].long()[offsets.lengths == 2]
    first, second = task.problems.positions[begin], task.problems.positions[begin + 1]
    up = int((first < second).sum())
    assert p_value(torch.tensor([up, len(begin) - up]), torch.full((2,), len(begin) / 2)) > 1e-4


def test_noise_is_the_same_again_and_different_at_every_step():
    seen = [noise(16, L, seed=seed, step=step) for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1))]
    again = noise(16, L, seed=1, step=0)
    assert torch.equal(again[0], seen[2][0])
    assert torch.equal(again[1], seen[2][1])
    for (t, u), (t_, u_) in itertools.combinations(seen, 2):
        assert not (t == t_).any()
        assert not (u == u_).any()


def test_the_times_of_a_global_batch_are_stratified():
    t, _ = noise(16, L, seed=3, step=9)
    assert (t * 16).long().sort().values.tolist() == list(range(16))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("processes", [2, 3, 6])
def test_the_loss_is_the_sum_of_the_losses_of_any_number_of_processes(tiny, name, processes):
    network = tiny("causal" if name == "causal" else "position", scale=0.3, length=L, vocab=V)
    tokens = torch.randint(V, (6, L), generator=torch.Generator().manual_seed(0))
    t, u = noise(6, L, seed=0, step=5)
    everything = tokens, t, u, torch.ones_like(tokens, dtype=torch.bool)
    whole = loss(network, OBJECTIVES[name](*everything))
    parts = zip(*(x.chunk(processes) for x in everything), strict=True)
    torch.testing.assert_close(sum(loss(network, OBJECTIVES[name](*part)) for part in parts), whole)


@pytest.mark.parametrize("kind", ["position", "mean", "logsumexp", "ordered", "masked", "causal"])
def test_every_parameter_learns(tiny, kind):
    network = tiny(kind, length=L, vocab=5)
    name = "causal" if kind == "causal" else "pgm"
    loss(network, task_of(name, 8)).backward()
    still = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_the_loss_of_a_half_precision_network_is_computed_in_float32():
    task = task_of("pgm", 5)
    logits = torch.randn(5 * L, V, generator=torch.Generator().manual_seed(0)).bfloat16()
    value = loss(lambda problems: logits, task)
    picked = logits.float().log_softmax(-1)[torch.arange(5 * L), task.answers]
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, -(task.weights * picked).sum())


def test_the_papers_estimator_has_the_same_mean_and_more_noise(table):
    rows = ROW.repeat(50_000, 1)
    papers, ours = paper_bound(table, rows, seed=2), bound(table, rows, samples=1, seed=2)
    assert near(papers, table.exact())
    assert papers.std() > ours.std()


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
    torch.testing.assert_close(score, causal_log_probability(network, tokens), atol=1e-5, rtol=0)
    known = torch.arange(L).expand_as(tokens) < 2
    prompt = causal_log_probability(network, tokens[:, :2])
    torch.testing.assert_close(-bound(network, tokens, known), score - prompt, atol=1e-5, rtol=0)


def test_a_causal_network_does_not_score_a_gap_with_text_behind_it(tiny):
    network = tiny("causal", scale=0.5, length=L, vocab=V)
    with pytest.raises(ValueError, match="causal"):
        bound(network, ROW[None], torch.tensor([[True, False, True, False]]))


def test_the_arccos_objectives_split_an_image_behind_its_bos():
    u, t = [0.99, 0.1, 0.4, 0.9], 0.5  # arccos(1/2) is 2/3 of a right angle: a third is in the first group
    tokens = torch.tensor([[7, 5, 6, 8]])
    arguments = tokens, torch.tensor([t]).double(), torch.tensor([u]).double(), tokens > 0
    both, hidden = OBJECTIVES["pgm-arccos"](*arguments), OBJECTIVES["maskgit"](*arguments)
    assert both.problems.positions.tolist() == [0, 1, 2, 3]
    assert both.problems.offsets.lengths.tolist() == [2, 2]
    assert both.problems.targets.tolist() == [2, 3, 1]
    assert both.problems.target_offsets.lengths.tolist() == [2, 1]
    assert both.answers.tolist() == [6, 8, 5]
    assert hidden.problems.positions.tolist() == [0, 1]
    assert hidden.answers.tolist() == [6, 8]
    assert both.weights.tolist() == [1, 1, 1]
    assert hidden.weights.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["pgm-arccos", "maskgit"])
def test_the_chance_of_the_second_group_is_an_arccosine(name):
    rows, n = 50_000, 9
    t, u = noise(rows, n, seed=1, step=0)
    tokens = torch.zeros(rows, n, dtype=torch.long)
    problems = OBJECTIVES[name](tokens, t, u, tokens == 0).problems
    second = problems.target_offsets.lengths[:: len(problems) // rows].double() / (n - 1)
    assert not (problems.targets == 0).any()
    for low in (0.0, 0.25, 0.5, 0.75):
        part = (t >= low) & (t < low + 0.25)
        assert near(second[part] - t[part].arccos() / (torch.pi / 2), 0.0)
    assert near(second, 2 / torch.pi)  # the mean of arccos over a right angle


def test_every_image_token_of_pgm_arccos_is_predicted_once():
    task = task_of("pgm-arccos", 40)
    row, position = place("pgm-arccos", task.problems)
    assert sorted(zip(row.tolist(), position.tolist(), strict=True)) == [(b, i) for b in range(40) for i in range(1, L)]
    context = task.problems.positions.split(task.problems.offsets.lengths.tolist())
    assert all(int(part[0]) == 0 for part in context[::2])  # BOS is known first
    assert not any((part == 0).any() for part in context[1::2])
    assert task.weights.sum() == 40 * (L - 1)


def test_the_draw_of_bos_is_free_for_other_use():
    t, u = noise(30, L, seed=0, step=0)
    tokens = ROW.repeat(30, 1)
    for name in ("pgm-arccos", "maskgit"):
        one, other = (OBJECTIVES[name](tokens, t, w, tokens >= 0) for w in (u, u.index_fill(1, torch.tensor([0]), 0.5)))
        assert torch.equal(one.problems.positions, other.problems.positions)
        assert torch.equal(one.problems.targets, other.problems.targets)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_task_carries_the_labels_of_its_sequences(name):
    problems = task_of(name, 6).labelled(torch.arange(6)).problems
    assert torch.equal(problems.labels[problems.target_offsets.owner], place(name, problems)[0])


def test_labels_are_dropped_where_the_draw_is_small():
    labels, u = torch.tensor([4, 1, 0, 2]), torch.tensor([0.05, 0.1, 0.0, 0.9])
    assert drop_labels(labels, u, 0.1, 10).tolist() == [10, 1, 10, 2]
    assert drop_labels(labels, u, 0.0, 10).tolist() == labels.tolist()
    assert labels.tolist() == [4, 1, 0, 2]


def test_the_bound_asks_with_the_labels_of_the_sequences():
    def knows_its_label(problems: Problems) -> Tensor:
        assert problems.labels is not None
        return 5.0 * F.one_hot(problems.labels[problems.target_offsets.owner], V)

    tokens = torch.tensor([[0] * L, [2] * L])
    right = bound(knows_its_label, tokens, labels=torch.tensor([0, 2]))
    wrong = bound(knows_its_label, tokens, labels=torch.tensor([1, 2]))
    assert right[0] == right[1] == wrong[1]
    assert wrong[0] - right[0] == pytest.approx(5.0 * L)
