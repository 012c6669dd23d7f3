"""Orders are permutations that keep the stages apart; counts add up and follow their laws and tables exactly."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskless.order import (
    COUNTS,
    ORDERS,
    after_lead,
    arccos,
    arccos_after_one,
    halton,
    left,
    mdlm,
    random,
    uniform,
)

TABLES = Path(__file__).resolve().parents[2] / "shared" / "parity" / "tables"
grids = st.tuples(st.integers(1, 9), st.integers(1, 9))
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
def test_left_decides_from_left_to_right(stage, seed):
    order = left(stage, draws(*stage.shape, seed=seed))
    for s, o in zip(stage, order, strict=True):
        wanted = o[s[o] == 1]
        assert torch.equal(wanted, (s == 1).nonzero()[:, 0])


@pytest.mark.parametrize(("order", "stage"), [(random, 0), (random, 1), (left, 0), (halton((1, 3)), 0)])
def test_every_order_of_a_shuffled_stage_is_equally_likely(order, stage, p_value):
    order = order(torch.full((12_000, 3), stage), draws(12_000, 3))
    observed = (order @ torch.tensor([9, 3, 1])).bincount(minlength=27)
    assert int((observed > 0).sum()) == 6
    assert p_value(observed[observed > 0], torch.full((6,), 2_000.0)) > 1e-4


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_row_depends_on_its_own_draws_only(name):
    stage, u = torch.randint(3, (6, 9), generator=torch.Generator().manual_seed(1)), draws(6, 9)
    together = ORDERS[name](stage, u)
    for row in range(6):
        assert torch.equal(ORDERS[name](stage[row : row + 1], u[row : row + 1])[0], together[row])


@pytest.mark.parametrize("counts", [uniform, mdlm])
@given(unknown=st.lists(st.integers(0, 12), min_size=1, max_size=5), steps=st.integers(1, 12), seed=st.integers(0, 99))
def test_counts_add_up_and_uniform_ones_differ_by_at_most_one(counts, unknown, steps, seed):
    each = counts(torch.tensor(unknown), torch.full((len(unknown),), steps), draws(len(unknown), 12, seed=seed))
    assert each.shape == (len(unknown), steps)
    assert each.sum(1).tolist() == unknown
    assert (each >= 0).all()
    assert counts is mdlm or ((each.amax(1) - each.amin(1)) <= 1).all()


@pytest.mark.parametrize("name", COUNTS)
def test_one_step_decides_everything(name):
    unknown = torch.tensor([0, 3, 7])
    assert COUNTS[name](unknown, torch.ones(3, dtype=torch.long), draws(3, 7))[:, 0].tolist() == [0, 3, 7]


def test_cosine_counts_decide_the_share_that_is_not_under_the_cosine():
    done = COUNTS["cosine"](torch.tensor([256]), torch.tensor([8]), draws(1, 256))[0].cumsum(0)
    assert done.tolist() == [max(s, int(256 * (1 - math.cos(math.pi / 2 * s / 8)))) for s in range(1, 8)] + [256]
    few = COUNTS["cosine"](torch.tensor([5, 9]), torch.tensor([5, 3]), draws(2, 9))
    assert few.tolist() == [[1, 1, 1, 1, 1], [1, 3, 5, 0, 0]]  # no step is empty


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


def table(name: str) -> dict:
    path = TABLES / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return json.loads(path.read_text())


def cells_of(H: int, W: int, **how) -> list[int]:
    """The cells of an empty grid, as they come."""
    return halton((H, W), **how)(torch.ones(1, H * W, dtype=torch.long), draws(1, H * W))[0].tolist()


def mirrored(i: int, base: int) -> Fraction:
    """The radical inverse by its definition, in exact fractions."""
    value, scale = Fraction(0), Fraction(1, base)
    while i:
        value, i, scale = value + i % base * scale, i // base, scale / base
    return value


def test_halton_orders_equal_the_released_tables():
    for side, order in table("halton")["order"].items():
        assert cells_of(int(side), int(side)) == order, side


@pytest.mark.parametrize(("H", "W"), [(1, 1), (1, 7), (7, 1), (3, 9), (9, 3), (5, 16), (12, 6), (39, 26)])
def test_halton_visits_cells_as_the_sequence_first_falls_in_them(H, W):
    visited: dict[int, None] = {}  # keeps the order of first entry
    i = 0
    while len(visited) < H * W:
        i += 1
        visited.setdefault(int(mirrored(i, 2) * H) * W + int(mirrored(i, 3) * W))
    assert cells_of(H, W) == list(visited)


@given(grid=grids, seed=st.integers(0, 99))
def test_halton_keeps_its_order_among_the_cells_that_are_left_with_known_ones_first_and_ignored_ones_last(grid, seed):
    n = grid[0] * grid[1]
    u, v = draws(2, 3, n, seed=seed)
    stage = (3 * v).long()
    order = halton(grid)(stage, u)
    assert torch.equal(order.sort(1).values, torch.arange(n).expand_as(order))
    assert torch.equal(stage.gather(1, order), stage.sort(1).values)
    for row, cells in zip(stage, order, strict=True):
        assert cells[row[cells] == 1].tolist() == [cell for cell in cells_of(*grid) if row[cell] == 1]


@pytest.mark.parametrize(("order", "cells"), [(random, (3, 4)), (left, (3, 4)), (halton((3, 4)), (3, 4))])
def test_a_lead_comes_first_and_the_rest_in_its_own_order(order, cells):
    n = cells[0] * cells[1]
    u, v = draws(2, 5, 2 + n)
    stage = torch.where(torch.arange(2 + n) < 2, 0, (3 * v).long())
    led = after_lead(order, 2)(stage, u)
    assert torch.equal(led[:, :2], torch.tensor([[0, 1]]).expand(5, 2))
    assert torch.equal(led[:, 2:] - 2, order(stage[:, 2:], u[:, 2:]))
    assert torch.equal(after_lead(order, 0)(stage[:, 2:], u[:, 2:]), order(stage[:, 2:], u[:, 2:]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: halton((0, 4)), "grid 0 x 4 is out of range: expected 1 x 1 or more"),
        (lambda: halton((4, -1)), "grid 4 x -1 is out of range"),
        (lambda: halton((4, 4))(torch.ones(1, 17), draws(1, 17)), "17 cells do not fit the grid 4 x 4: expected 16"),
        (lambda: after_lead(random, -1), "lead -1 is out of range: expected 0 or more"),
        (lambda: after_lead(random, 1)(torch.ones(1, 3), draws(1, 3)), "first 1 tokens .* expected them to be known"),
    ],
)
def test_grids_and_leads_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def growing(counts, unknown: int, steps: int) -> list[int]:
    return counts(torch.tensor([unknown]), torch.tensor([steps]), draws(1, unknown))[0].tolist()


def test_arccos_counts_are_those_that_are_known():
    first = [20, 20, 21, 20, 21, 20, 21, 21, 21, 22, 21, 22, 22, 23, 23, 23]
    last = [24, 24, 25, 26, 26, 28, 28, 30, 32, 34, 36, 40, 45, 53, 68, 164]
    assert growing(arccos, 1024, 32) == first + last
    assert growing(arccos, 1024, 64)[-2:] == [48, 116]
    assert growing(arccos_after_one, 1024, 32)[:3] == [1, 21, 21]
    assert growing(arccos_after_one, 1024, 32)[-2:] == [69, 166]
    assert [growing(arccos_after_one, 50, steps)[0] for steps in (1, 2, 5)] == [50, 1, 1]
    assert growing(arccos, 9, 2) == [3, 6]  # 1 - arccos(1/2) / (pi/2) = 1/3, in floating point only nearly
    assert growing(arccos, 768, 2) == [256, 512]


@pytest.mark.parametrize(("sampler", "counts"), [("halton", arccos), ("confidence", arccos_after_one)])
def test_arccos_counts_equal_the_released_tables(sampler, counts):
    for name, expected in table("arccos_counts")[sampler].items():
        steps, length = (int(part[1:]) for part in name.split("_"))
        if expected is None:  # the released sampler breaks down where a step has nothing to decide; ours has no such
            assert growing(counts, length, steps) == [1] * length
        else:
            assert growing(counts, length, steps) == expected, name


@pytest.mark.parametrize("counts", [arccos, arccos_after_one])
@given(unknown=st.lists(st.integers(0, 40), min_size=1, max_size=4), steps=st.integers(1, 40))
def test_arccos_counts_add_up_and_no_step_is_empty_that_need_not_be(counts, unknown, steps):
    n, own = torch.tensor(unknown), torch.tensor(unknown).clamp(1, steps)
    each = counts(n, own, draws(len(unknown), 40))
    assert each.shape == (len(unknown), int(own.max()))
    assert each.sum(1).tolist() == unknown
    for row, s in enumerate(own.tolist()):
        assert (each[row, :s] >= min(1, unknown[row])).all()
        assert (each[row, s:] == 0).all()
        assert torch.equal(each[row, :s], counts(n[row, None], own[row, None], draws(1, 40))[0])
    more = counts(n, torch.full_like(n, steps), draws(len(unknown), 40))  # also with more steps than positions
    assert (more >= 0).all()
    assert more.sum(1).tolist() == unknown
