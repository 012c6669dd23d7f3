"""Objectives weigh as they say, split as they say, and do not depend on how a batch is shared out."""

import itertools

import pytest
import torch

from maskless.nn.loss import total_cost
from maskless.objective import OBJECTIVES, drop_labels, noise
from maskless.schedule import EDGE
from objective_tasks import ROW, L, V, by_row, loss, near, place, task_of, uniform_network


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_every_sequence_of_pgm_exact_weighs_its_length_whatever_the_split(length):
    task = task_of("pgm-exact", 100, length=length)
    torch.testing.assert_close(
        by_row("pgm-exact", task, task.weights, 100), torch.full((100,), length).double(), rtol=1e-6, atol=0
    )
    cost = float(loss(uniform_network, task)) / 100
    torch.testing.assert_close(cost, length * float(torch.tensor(float(V)).log()), rtol=1e-5, atol=0)


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
    value = total_cost(lambda problems: logits, task.problems, task.answers, task.weights)
    picked = logits.float().log_softmax(-1)[torch.arange(5 * L), task.answers]
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, -(task.weights * picked).sum())


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
