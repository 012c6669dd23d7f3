"""Confidence sampling: each step keeps the drawn tokens that are surest, as many as planned, and disturbs no others."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskless import logits as lg
from maskless.drafts import Step
from maskless.draw import DRAW, Truncation
from maskless.logits import row_keys
from maskless.order import after_lead, random, uniform
from maskless.plans import plan
from maskless.problems import Problems
from maskless.sampling import sample
from sampling_runs import KINDS, B, L, V, certain, state
from sampling_runs import run as planned_run

run = partial(planned_run, confident=True)


def sure_of(ranking: Tensor):
    """A network that says each target's position, with a confidence that grows along the ranking."""

    def network(problems: Problems) -> Tensor:
        doubt = -torch.full((len(problems.targets), V), 1.0)
        strength = 2.0 + ranking.argsort()[problems.targets].float()
        return doubt.scatter(1, problems.targets[:, None], strength[:, None])

    return network


def came_in(steps: list[Step], row: int) -> list[int]:
    return [int(p) for step in steps for r, p in zip(step.rows, step.positions, strict=True) if r == row]


def test_a_step_sees_what_was_decided_and_asks_for_all_that_is_left():
    tokens, known = state()
    seen: list[Problems] = []

    def watching(problems: Problems) -> Tensor:
        seen.append(problems)
        return torch.sin(problems.targets[:, None] * torch.arange(1, V + 1) + len(seen))

    done, steps, _ = run(watching, tokens, known, steps=3, noise=1.0)
    decided, order = known.clone(), {row: [] for row in range(B)}
    for problems, step in zip(seen, steps, strict=True):
        contexts = problems.positions.split(problems.offsets.lengths.tolist())
        targets = problems.targets.split(problems.target_offsets.lengths.tolist())
        values = problems.tokens.split(problems.offsets.lengths.tolist())
        for row, context, value, target in zip(step.rows.unique().tolist(), contexts, values, targets, strict=True):
            assert sorted(target.tolist()) == (~decided[row]).nonzero()[:, 0].tolist()
            assert context.tolist()[int(known[row].sum()) :] == order[row]  # as it became known
            assert sorted(context.tolist()) == decided[row].nonzero()[:, 0].tolist()
            assert torch.equal(value, done[row, context])
        decided[step.rows, step.positions] = True
        for row, position in zip(step.rows.tolist(), step.positions.tolist(), strict=True):
            order[row].append(position)
    assert decided.all()


@pytest.mark.parametrize("steps", range(1, L + 1))
def test_without_noise_the_surest_tokens_come_first(steps):
    ranking = torch.tensor([2, 5, 0, 3, 1, 4])  # from the least sure to the surest
    tokens, known = torch.zeros(3, L, dtype=torch.long), torch.zeros(3, L, dtype=torch.bool)
    known[1, [5, 4]] = True
    _, taken, planned = run(sure_of(ranking), tokens, known, steps=min(steps, L), filter=Truncation(temperature=0))
    for row in range(3):
        expected = [p for p in ranking.flip(0).tolist() if not known[row, p]]
        assert came_in(taken, row) == expected
        assert planned.decided()[row] == expected


def orders_of(network, noise: float, rows: int = 6_000, n: int = 3) -> Tensor:
    """How often each order of n positions came."""
    unknown = torch.zeros(rows, n, dtype=torch.bool)
    _, _, planned = run(network, unknown.long(), unknown, steps=n, noise=noise)
    return (torch.tensor(planned.decided()) @ torch.tensor([9, 3, 1])).bincount(minlength=27)


@pytest.mark.parametrize(("network", "noise"), [("sure", 1e6), ("equal", 0.0)])
def test_with_much_noise_or_equal_confidence_every_order_is_equally_likely(p_value, network, noise):
    networks = {"sure": sure_of(torch.arange(3)), "equal": lambda p: torch.zeros(len(p.targets), 4)}
    observed = orders_of(networks[network], noise)
    assert int((observed > 0).sum()) == 6
    assert p_value(observed[observed > 0], torch.full((6,), 1_000.0)) > 1e-4


def test_noise_fades_by_a_rows_own_steps():
    """In the last step of a row the noise is gone: there the surer ones are named first."""
    counts = torch.tensor([[1, 1, 2], [1, 3, 0]]).repeat(200, 1)
    unknown = torch.zeros(400, 4, dtype=torch.bool)
    how = {"steps": 3, "counts": lambda m, s, u: counts, "noise": 1e6, "filter": Truncation(temperature=0)}
    _, steps, planned = run(sure_of(torch.arange(4)), unknown.long(), unknown, **how)
    three, two = torch.tensor(planned.decided()).view(200, 2, 4).unbind(1)
    assert len(three[:, :2].unique(dim=0)) == 12
    assert (three[:, 2] > three[:, 3]).all()
    assert len(two[:, 0].unique()) == 4
    assert (two[:, 1:].diff() < 0).all()
    assert [len(step.rows) for step in steps] == [400, 800, 400]


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_samples_have_the_law_of_the_method(p_value, noise):
    """Two positions, two steps: which of the two draws is kept depends on both, and the other is drawn anew."""
    rows, vocab = 20_000, 3
    table = torch.randn(2, vocab + 1, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def network(problems: Problems) -> Tensor:  # position, and the one known token or none
        known = torch.zeros(len(problems), dtype=torch.long).index_add(0, problems.offsets.owner, 1 + problems.tokens)
        return table[problems.targets, known[problems.target_offsets.owner]]

    law, p = torch.zeros(vocab, vocab, dtype=torch.float64), table.softmax(-1)
    for x in itertools.product(range(vocab), repeat=2):
        both = p[0, 0, x[0]] * p[1, 0, x[1]]
        gap = float((p[0, 0, x[0]] / p[1, 0, x[1]]).log())
        first = 1 / (1 + math.exp(-gap / noise)) if noise else float(gap > 0)  # a difference of two Gumbel draws
        law[x[0]] += both * first * p[1, 1 + x[0]]
        law[:, x[1]] += both * (1 - first) * p[0, 1 + x[1]]
    assert float(law.sum()) == pytest.approx(1)
    unknown = torch.zeros(rows, 2, dtype=torch.bool)
    done, _, _ = run(network, unknown.long(), unknown, steps=2, noise=noise)
    observed = (done @ torch.tensor([vocab, 1])).bincount(minlength=vocab * vocab)
    assert p_value(observed, rows * law) > 1e-4


def test_a_row_does_not_depend_on_the_length_of_those_beside_it(tiny):
    network, keys = tiny("position", scale=0.2), row_keys(5, torch.arange(2))
    wanted = torch.arange(L) < torch.tensor([[4], [L]])
    nothing, tokens = torch.zeros(2, L, dtype=torch.bool), torch.zeros(2, L, dtype=torch.long)
    together, _, _ = run(network, tokens, nothing, wanted=wanted, steps=4, keys=keys, noise=2.0)
    alone, _, _ = run(network, tokens[:1, :4], nothing[:1, :4], steps=4, keys=keys[:1], noise=2.0)
    assert torch.equal(together[0, :4], alone[0])


def test_the_plan_tells_afterwards_what_happened(tiny):
    tokens, known = state()
    _, steps, planned = run(tiny("ordered", scale=0.2), tokens, known, steps=3, noise=3.0)
    expected = torch.full((B, L), -1)
    for step in steps:
        expected[step.rows, step.positions] = step.number
    assert torch.equal(planned.came(), expected)
    assert planned.decided() == [came_in(steps, row) for row in range(B)]
    assert torch.equal(planned.order.sort(1).values, torch.arange(L).expand(B, L))


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_draws_what_the_planned_sampler_draws(tiny, kind):
    network, (tokens, known) = tiny(kind, scale=0.2), state()
    expected, *_ = planned_run(network, tokens, known)
    assert torch.equal(run(network, tokens, known, noise=4.0)[0], expected)


def test_a_lead_stays_first_in_the_context():
    tokens, known = torch.zeros(1, L, dtype=torch.long), torch.tensor([[True, False, True, True, False, True]])
    contexts: list[list[int]] = []

    def watching(problems: Problems) -> Tensor:
        contexts.append(problems.positions.tolist())
        return certain(problems.targets)

    run(watching, tokens, known, steps=2, order=after_lead(random, 1), noise=1.0)
    assert [context[0] for context in contexts] == [0, 0]


def test_warm_up_counts_the_steps_in_which_a_row_decides_something():
    seen: list[tuple[list[int], list[float]]] = []

    def watching(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        seen.append((rows.tolist(), logits[:, 0].tolist()))
        return logits

    counts, unknown = torch.tensor([[0, 1, 1], [1, 0, 1]]), torch.zeros(2, 2, dtype=torch.bool)
    how = {"steps": 2, "counts": lambda m, s, u: counts, "filter": watching, "warmup": 1}
    run(lambda p: torch.full((len(p.targets), 3), 8.0), unknown.long(), unknown, **how)
    assert seen == [([1, 1], [4.0, 4.0]), ([0, 0], [4.0, 4.0]), ([0, 1], [8.0, 8.0])]


def test_rounding_does_not_decide_between_equals():
    """Tokens that are equally sure come in the order of the row, whatever the last digits of the logits are."""
    unknown, orders = torch.zeros(2, 64, dtype=torch.bool), set()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def equally_sure(problems: Problems, generator=generator) -> Tensor:
            jitter = 1e-6 * torch.rand(len(problems.targets), 1, generator=generator)
            return torch.tensor([1.0, 0, 0]) + F.pad(jitter, (0, 2))

        how = {"steps": 8, "filter": Truncation(temperature=0)}
        orders.add(str(run(equally_sure, unknown.long(), unknown, **how)[2].decided()))
    planned = plan(unknown, ~unknown, row_keys(0, torch.arange(2)), steps=8, order=random, counts=uniform)
    assert orders == {str(planned.decided())}


def test_draws_and_noise_use_random_numbers_of_their_own_in_each_step(monkeypatch):
    used: list[Tensor] = []

    def watching(keys: Tensor, columns: Tensor, purpose: int) -> Tensor:
        u = original(keys, columns, purpose)
        used.append(u.flatten())
        return u

    original = lg.uniforms
    unknown, keys = torch.zeros(2, 4, dtype=torch.bool), row_keys(0, torch.arange(2))
    planned = plan(unknown, ~unknown, keys, steps=4, order=random, counts=uniform)
    monkeypatch.setattr(lg, "uniforms", watching)
    how = {"confident": True, "noise": 1.0}
    list(sample(lambda p: torch.zeros(len(p.targets), 3), unknown.long(), planned, keys, **how))
    numbers = torch.cat(used)
    assert len(numbers) == 2 * 2 * (4 + 3 + 2 + 1)
    assert len(numbers.unique()) == len(numbers)
    first = original(keys[:, None], torch.arange(4), DRAW)  # as in the planned sampler
    assert set(used[0].tolist()) == set(first.flatten().tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["position", "ordered", "masked"])
def test_a_gpu_decides_what_a_cpu_decides(tiny, kind):
    network, (tokens, known) = tiny(kind, scale=0.5), state()
    expected = run(network, tokens, known, steps=4, noise=5.0, warmup=1)
    mine = run(network.cuda(), tokens, known, steps=4, noise=5.0, warmup=1)
    assert torch.equal(mine[0], expected[0])
    assert torch.equal(mine[2].order, expected[2].order)
