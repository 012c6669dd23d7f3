"""Orders are permutations that keep the stages apart; counts add up and follow MDLM's posterior exactly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskless.order import COUNTS, ORDERS, mdlm, random, raster, uniform

stages = st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=4).map(torch.tensor)


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ORDERS)
@given(stage=stages, seed=st.integers(0, 99))
def test_an_order_is_a_permutation_with_known_first_and_ignored_last(name, stage, seed):
    order = ORDERS[name](stage, draws(*stage.shape, seed=seed))
    assert torch.equal(order.sort(1).values, torch.arange(5).expand_as(order))
    assert torch.equal(stage.gather(1, order), stage.sort(1).values)


@given(stage=stages, seed=st.integers(0, 99))
def test_raster_decides_from_left_to_right(stage, seed):
    order = raster(stage, draws(*stage.shape, seed=seed))
    for s, o in zip(stage, order, strict=True):
        wanted = o[s[o] == 1]
        assert torch.equal(wanted, (s == 1).nonzero()[:, 0])


@pytest.mark.parametrize(("name", "stage"), [("random", 0), ("random", 1), ("raster", 0)])
def test_every_order_of_a_shuffled_stage_is_equally_likely(name, stage, p_value):
    order = ORDERS[name](torch.full((12_000, 3), stage), draws(12_000, 3))
    observed = (order @ torch.tensor([9, 3, 1])).bincount(minlength=27)
    assert int((observed > 0).sum()) == 6
    assert p_value(observed[observed > 0], torch.full((6,), 2_000.0)) > 1e-4


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_row_depends_on_its_own_draws_only(name):
    stage, u = torch.randint(3, (6, 9), generator=torch.Generator().manual_seed(1)), draws(6, 9)
    together = ORDERS[name](stage, u)
    for row in range(6):
        assert torch.equal(ORDERS[name](stage[row : row + 1], u[row : row + 1])[0], together[row])


@given(unknown=st.lists(st.integers(0, 12), min_size=1, max_size=5), steps=st.integers(1, 12))
def test_uniform_counts_add_up_and_differ_by_at_most_one(unknown, steps):
    counts = uniform(torch.tensor(unknown), torch.full((len(unknown),), steps), draws(len(unknown), 12))
    assert counts.shape == (len(unknown), steps)
    assert counts.sum(1).tolist() == unknown
    assert ((counts.amax(1) - counts.amin(1)) <= 1).all()


@given(unknown=st.lists(st.integers(0, 12), min_size=1, max_size=5), steps=st.integers(1, 12), seed=st.integers(0, 99))
def test_mdlm_counts_add_up(unknown, steps, seed):
    counts = mdlm(torch.tensor(unknown), torch.full((len(unknown),), steps), draws(len(unknown), 12, seed=seed))
    assert counts.shape == (len(unknown), steps)
    assert counts.sum(1).tolist() == unknown
    assert (counts >= 0).all()


@pytest.mark.parametrize("name", COUNTS)
def test_one_step_decides_everything(name):
    unknown = torch.tensor([0, 3, 7])
    assert COUNTS[name](unknown, torch.ones(3, dtype=torch.long), draws(3, 7))[:, 0].tolist() == [0, 3, 7]


def test_uniform_counts_with_as_many_steps_as_positions_are_all_one():
    assert (uniform(torch.tensor([7]), torch.tensor([7]), draws(1, 7)) == 1).all()


def test_each_mdlm_count_is_binomial_over_what_remains(p_value):
    L, K, B = 6, 4, 60_000
    counts = mdlm(torch.full((B,), L), torch.full((B,), K), draws(B, L))
    remaining = L - (counts.cumsum(1) - counts)
    for step in range(K - 1):
        p = 1 / (K - step)  # (a_s - a_t) / (1 - a_t) with alpha(t) = 1 - t
        for r in range(1, L + 1):
            seen = counts[remaining[:, step] == r, step]
            law = torch.tensor([math.comb(r, k) * p**k * (1 - p) ** (r - k) for k in range(r + 1)])
            if len(seen) > 200:
                assert p_value(seen.bincount(minlength=r + 1), len(seen) * law) > 1e-5, (step, r)
    assert torch.equal(counts[:, -1], remaining[:, -1])


def test_mdlm_counts_ignore_the_draws_beyond_the_unknown_positions():
    u, unknown, five = draws(4, 9), torch.tensor([0, 2, 5, 9]), torch.full((4,), 5)
    changed = torch.where(torch.arange(9) < unknown[:, None], u, 1 - u)
    assert torch.equal(mdlm(unknown, five, u), mdlm(unknown, five, changed))


def test_mdlm_counts_survive_the_largest_draw():
    u = torch.full((1, 4), 1.0, dtype=torch.float64).nextafter(torch.zeros(1, dtype=torch.float64))
    assert mdlm(torch.tensor([4]), torch.tensor([3]), u).tolist() == [[0, 0, 4]]


def test_random_is_not_raster():
    stage = torch.ones(1, 20, dtype=torch.long)
    assert not torch.equal(random(stage, draws(1, 20)), raster(stage, draws(1, 20)))
