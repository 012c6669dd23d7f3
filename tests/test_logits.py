"""Filters keep exactly the tokens of their definitions; draws are exact; random numbers belong to their row."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskless.logits import draw, guide, gumbel, log_probability, row_keys, rule_out, temper, top_k, top_p, uniforms

LARGEST = 1 - 2.0**-53  # the largest double below 1


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]


def unchanged_where_kept(filtered: torch.Tensor, logits: torch.Tensor) -> bool:
    return torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])


@pytest.mark.parametrize("k", [1, 2, 5, 9, 100])
def test_top_k_keeps_the_k_largest(k):
    logits = random_logits(20, 9)
    filtered = top_k(logits, k)
    for row, found in zip(logits, kept(filtered), strict=True):
        assert found == set(sorted(range(9), key=lambda i: -row[i])[:k])
    assert unchanged_where_kept(filtered, logits)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(weights, p):
    share = torch.tensor(weights).double() / sum(weights)
    filtered = top_p(share.log()[None], p)
    order, total, expected = sorted(range(len(weights)), key=lambda i: -weights[i]), 0.0, set()
    for i in order:
        if abs(total - p) < 1e-9:
            return  # which side a sum falls on is then a matter of rounding
        if total >= p:
            break
        expected.add(i)
        total += float(share[i])
    assert kept(filtered) == [expected]
    assert unchanged_where_kept(filtered, share.log()[None])


@pytest.mark.parametrize("p", [5e-324, 1e-45, 1e-30])
def test_top_p_keeps_the_most_likely_token_however_small_p_is(p):
    kept = top_p(torch.tensor([[0.1, 2.0, 0.3]]), p)
    assert kept.isfinite().tolist() == [[False, True, False]]


def test_top_p_filters_each_row_by_itself():
    logits = random_logits(8, 12)
    for row, filtered in zip(logits, top_p(logits, 0.7), strict=True):
        assert torch.equal(top_p(row[None], 0.7)[0], filtered)


@pytest.mark.parametrize(("p", "count"), [(0.2, 2), (0.24, 2), (0.26, 3), (0.9, 8)])
def test_of_equal_logits_a_filter_keeps_the_first_and_none_that_was_ruled_out(p, count):
    assert kept(top_p(torch.zeros(2, 8), p)) == [set(range(count))] * 2
    assert kept(top_p(torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]), 0.999)) == [{1, 2}]
    for vocab, k in itertools.product((4, 100, 5_000), (1, 3)):
        assert kept(top_k(torch.zeros(2, vocab), k)) == [set(range(k))] * 2


@pytest.mark.parametrize("filter", [lambda x: top_p(x, 0.9), lambda x: top_k(x, 2)], ids=["top_p", "top_k"])
def test_a_filter_does_not_hide_that_logits_are_no_numbers(filter):
    assert draw(filter(torch.tensor([[0.0, torch.nan, 1.0]])), torch.tensor([0.5])).tolist() == [3]


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_a_temperature_is_a_power_of_the_probabilities(temperature):
    logits = random_logits(5, 7)
    power = logits.softmax(-1) ** (1 / temperature)
    torch.testing.assert_close(temper(logits, temperature).softmax(-1), power / power.sum(-1, keepdim=True))


def test_temperature_zero_is_greedy():
    logits = random_logits(50, 9)
    for u in (0.0, 0.5, LARGEST):
        drawn = draw(temper(logits, 0), torch.full((50,), u, dtype=torch.float64))
        assert torch.equal(drawn, logits.argmax(-1))


def test_draws_follow_the_softmax(p_value):
    logits = random_logits(1, 12)
    u = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = draw(logits.expand(200_000, 12), u)
    assert p_value(drawn.bincount(minlength=12), 200_000 * logits[0].double().softmax(-1)) > 1e-4


def test_a_draw_is_the_inverse_of_the_cumulative_sum():
    logits = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64).log().expand(5, 3)
    u = torch.tensor([0.0, 0.24, 0.26, 0.74, 0.76], dtype=torch.float64)
    assert draw(logits, u).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.5, LARGEST])
@given(possible=st.lists(st.booleans(), min_size=1, max_size=9).filter(any), scale=st.floats(0, 200))
def test_a_token_of_probability_zero_is_never_drawn(u, possible, scale):
    logits = scale * torch.linspace(-1, 1, len(possible))
    logits = logits.masked_fill(~torch.tensor(possible), -torch.inf)[None]
    drawn = int(draw(logits, torch.tensor([u], dtype=torch.float64)))
    assert possible[drawn]


def test_the_extreme_draws_give_the_first_and_the_last_possible_token():
    logits = torch.tensor([[-torch.inf, 1.0, 0.0, 2.0, -torch.inf]])
    assert draw(logits, torch.tensor([0.0]).double()).tolist() == [1]
    assert draw(logits, torch.tensor([LARGEST])).tolist() == [3]


def test_uniforms_have_53_even_bits(p_value):
    whole = (uniforms(row_keys(3, torch.arange(4_000)), torch.tensor(5), 2) * 2.0**53).long()
    assert 0 <= int(whole.min()) <= int(whole.max()) < 2**53
    for bit in range(53):
        ones = int((whole >> bit & 1).sum())
        assert p_value(torch.tensor([ones, 4_000 - ones]), torch.tensor([2_000.0, 2_000.0])) > 1e-6, bit


def test_uniforms_are_a_function_of_their_arguments():
    keys, columns = row_keys(7, torch.arange(5))[:, None], torch.arange(6)
    table = uniforms(keys, columns, 1)
    assert table.shape == (5, 6)
    assert torch.equal(table, uniforms(keys, columns, 1))
    assert table[3, 4] == uniforms(keys[3], torch.tensor([4]), 1)


def pairs(what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two long rows of numbers that differ in one argument only."""
    samples, columns = torch.arange(300)[:, None], torch.arange(300)
    keys = row_keys(0, samples)
    base = uniforms(keys, columns, 0)
    other = {
        "purpose": lambda: uniforms(keys, columns, 1),
        "seed": lambda: uniforms(row_keys(1, samples), columns, 0),
        "sample": lambda: uniforms(row_keys(0, samples + 1), columns, 0),
        "column": lambda: uniforms(keys, columns + 1, 0),
    }
    return base.flatten(), other[what]().flatten()


@pytest.mark.parametrize("what", ["purpose", "seed", "sample", "column"])
def test_numbers_that_differ_in_one_argument_are_independent(what, p_value):
    a, b = pairs(what)
    together = ((a * 10).long() * 10 + (b * 10).long()).bincount(minlength=100)
    assert p_value(together, torch.full((100,), len(a) / 100)) > 1e-4
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / len(a) ** 0.5


def test_row_keys_are_distinct_and_fit_the_generator():
    keys = torch.cat([row_keys(seed, torch.arange(1_000)) for seed in (0, 1, 2, -1, 2**62)])
    assert len(keys.unique()) == len(keys)
    assert int(keys.min()) >= 0
    assert int(keys.max()) < 2**60  # times 8 purposes, this still fits 63 bits


def test_ids_that_are_ruled_out_and_no_others_are_gone():
    logits = random_logits(5, 9)
    before = logits.clone()
    filtered = rule_out(logits, (8, 2))
    assert kept(filtered) == [set(range(9)) - {2, 8}] * 5
    assert unchanged_where_kept(filtered, logits)
    assert torch.equal(logits, before)
    assert torch.equal(rule_out(logits, ()), logits)


def test_guided_logits_go_beyond_the_conditional_ones():
    conditional, unconditional = random_logits(3, 5, seed=1), random_logits(3, 5, seed=2)
    weight = torch.tensor([0.0, 0.5, 3.0])
    expected = (1 + weight[:, None]) * conditional - weight[:, None] * unconditional
    guided = guide(conditional, unconditional, weight)
    torch.testing.assert_close(guided, expected)
    assert torch.equal(guided[0], conditional[0])
    coarse = conditional.bfloat16(), unconditional.bfloat16()  # of an autocast network, and not coarsened again
    assert torch.equal(guide(*coarse, weight), guide(coarse[0].float(), coarse[1].float(), weight))


def test_a_token_that_either_half_rules_out_stays_ruled_out():
    conditional = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
    unconditional = torch.tensor([[0.5, -torch.inf, 0.0, -torch.inf]])
    assert guide(conditional, unconditional, torch.tensor([2.0])).tolist() == [[-1.0, *[-torch.inf] * 3]]
    assert torch.equal(guide(conditional, unconditional, torch.tensor([0.0])), conditional)


def test_log_probabilities_are_those_of_the_softmax():
    logits, tokens = random_logits(6, 9), torch.tensor([0, 8, 3, 3, 5, 1])
    expected = logits.softmax(-1)[torch.arange(6), tokens].log()
    torch.testing.assert_close(log_probability(logits, tokens), expected)
    torch.testing.assert_close(log_probability(logits.bfloat16(), tokens), expected, atol=0.05, rtol=0)


def test_gumbel_draws_have_their_law_and_are_finite(p_value):
    u = uniforms(row_keys(0, torch.arange(100))[:, None], torch.arange(300), 3).flatten()
    edges = torch.linspace(-1.5, 4, 23, dtype=torch.float64)
    below = torch.cat([torch.zeros(1), torch.exp(-torch.exp(-edges)), torch.ones(1)])
    observed = torch.searchsorted(edges, gumbel(u)).bincount(minlength=24)
    assert p_value(observed, len(u) * below.diff()) > 1e-4
    extremes = gumbel(torch.tensor([0.0, LARGEST], dtype=torch.float64))
    assert extremes.isfinite().all()
    assert extremes[1] == pytest.approx(53 * math.log(2), abs=0.01)
