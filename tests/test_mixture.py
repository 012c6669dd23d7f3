"""Mixtures give every row an order of one of their families, in their shares, from its own draws alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from maskless.mixture import IMAGE_FAMILIES, TEXT_FAMILIES, Mixture, hidden_spans, strand_numbers
from maskless.objective import noise
from maskless.order import in_place, left, random, region_turns, regions, strand_steps, strands

L = 24


def drawn(orders: str, rows: int = 60, length: int = L, seed: int = 0, **how) -> Tensor:
    t, u = noise(rows, length, seed=seed, step=0)
    return Mixture.parse(orders, image="grid" in how).draw(t, u, **how)


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 3, 9, L])
@pytest.mark.parametrize("family", [*TEXT_FAMILIES, "strands4", "random=1,strands=2,gaps=1"])
def test_every_order_is_a_permutation_that_begins_with_the_lead(family, length, lead):
    order = drawn(family, length=lead + length, lead=lead)
    assert torch.equal(order.sort(1).values, torch.arange(lead + length).expand_as(order))
    assert (order[:, :lead] == torch.arange(lead)).all()


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (4, 6)])
@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, "regions1", "random=1,halton=1,raster=1,regions=1"])
def test_every_order_of_a_grid_is_a_permutation_that_begins_with_the_bos(family, grid):
    order = drawn(family, length=1 + grid[0] * grid[1], lead=1, grid=grid)
    assert torch.equal(order.sort(1).values, torch.arange(order.shape[1]).expand_as(order))
    assert (order[:, 0] == 0).all()


def test_families_have_their_shares_of_a_batch():
    order = drawn("left=1,random=3", rows=400)
    in_order = (order == torch.arange(L)).all(1).sum()
    assert int(in_order) == 100  # times are stratified, so shares are exact


def test_a_row_depends_on_its_own_draws_only():
    t, u = noise(20, L, seed=3, step=5)
    mixture = Mixture.parse("random=25,strands=50,gaps=25")
    together = mixture.draw(t, u, lead=1)
    for row in range(20):
        assert torch.equal(mixture.draw(t[row : row + 1], u[row : row + 1], lead=1)[0], together[row])


def test_strands_are_drawn_in_powers_of_two_down_to_eight_positions():
    assert strand_numbers(64) == [1, 2, 4, 8]
    assert strand_numbers(256) == strand_numbers(255) == [1, 2, 4, 8, 16, 32]
    assert strand_numbers(1) == [1]
    order = drawn("strands", rows=200, length=64)
    seen = {int((row.diff() < 0).sum()) for row in order}  # as often as it goes back, once a step but the last
    assert seen == {0, 31, 15, 7}


def test_gaps_have_the_known_tokens_first_as_they_stand_and_then_strands():
    t, u = noise(300, L, seed=0, step=0)
    hidden, alone = hidden_spans(u), 0
    for row, gone in zip(Mixture.parse("gaps").draw(t, u).tolist(), hidden.tolist(), strict=True):
        known = gone.count(False)
        assert row[:known] == [p for p in range(L) if not gone[p]]
        ways = []
        for number in strand_numbers(L):
            longest = max(1, -(-(L - known) // number))
            step = strand_steps(torch.tensor([gone]), longest)[0].tolist()
            ways.append(sorted((p for p in range(L) if gone[p]), key=lambda p: (step[p], p)))
        assert row[known:] in ways
        alone += row[known:] == ways[0]
    assert 100 < alone < 300  # each gap one strand, or several


def test_hidden_spans_are_half_of_all_and_some_are_prompts_and_endings():
    hidden = hidden_spans(noise(4_000, 64, seed=0, step=0)[1])
    assert abs(float(hidden.float().mean()) - 0.5) < 0.02
    spans = (hidden.int().diff(dim=1) != 0).sum(1)  # how often known and hidden change
    assert int(spans.max()) == 16
    assert {0, 1, 2, 3} <= set(spans.tolist())
    prompt = (spans == 1) & ~hidden[:, 0]
    assert 50 < int(prompt.sum()) < 400


@given(
    st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 9),
)
def test_strands_keep_runs_apart_and_have_no_more_steps_than_asked(wanted, longest, seed):
    wanted = torch.tensor(wanted)
    steps = strand_steps(wanted, longest)
    stage = torch.where(wanted, 1, 0)
    u = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    order = in_place(strands(longest))(stage, u)
    for want, step, places in zip(wanted.tolist(), steps.tolist(), order.tolist(), strict=True):
        known = [p for p in range(7) if not want[p]]
        assert places[: len(known)] == known
        rest = places[len(known) :]
        assert rest == sorted(rest, key=lambda p: (step[p], p))
        for p in range(7):
            if want[p]:
                assert step[p] < longest
                begins = p == 0 or not want[p - 1] or step[p - 1] == longest - 1
                assert step[p] == (0 if begins else step[p - 1] + 1)


def test_known_positions_stand_in_place_instead_of_shuffled():
    stage = torch.tensor([[1, 0, 0, 1, 0, 0, 1, 2]])
    u = torch.rand(1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for order in (random, left, strands(8)):
        assert in_place(order)(stage, u)[0, :4].tolist() == [1, 2, 4, 5]
        assert in_place(order)(stage, u)[0, 4:].tolist() == order(stage, u)[0, 4:].tolist()


def test_regions_are_strands_in_the_plane():
    turn = region_turns(4, 4, 2).view(4, 4)
    assert turn.tolist() == [[0, 4, 1, 5], [8, 12, 9, 13], [2, 6, 3, 7], [10, 14, 11, 15]]
    stage = torch.ones(1, 16, dtype=torch.long)
    assert torch.equal(regions((4, 4), 2)(stage, stage.double())[0].argsort(), turn.flatten())


def test_a_mixture_knows_what_is_in_it():
    mixture = Mixture.parse("random=25, strands=50,gaps=25")
    assert str(mixture) == "random=25,strands=50,gaps=25"
    assert mixture.has("strands")
    assert not mixture.has("left")
    assert mixture.strands(255) == [1, 2, 4, 8, 16, 32]
    assert Mixture.parse("strands8=50,left=50").strands(256) == [1, 8]
    assert Mixture.parse("random").strands(256) == []
    assert Mixture.parse("strands8").has("strands")
    pictures = Mixture.parse("regions=3,regions5=1", image=True)
    assert pictures.has("regions")
    assert pictures.regions((16, 16)) == [1, 2, 4, 5, 8]
    assert Mixture.parse("raster", image=True).regions((16, 16)) == []
    with pytest.raises(ValueError, match="regions 5 of a grid of 4 x 6 is out of range: expected 1 to 4"):
        pictures.families(24, (4, 6))


@pytest.mark.parametrize(
    ("text", "image", "says"),
    [
        ("sideways=3", False, "unknown order 'sideways' in orders 'sideways=3': expected random, left, strands, gaps"),
        ("halton", False, "unknown order 'halton'"),
        ("strands", True, "unknown order 'strands' in orders 'strands': expected random, halton, raster, regions"),
        ("strands0", False, "unknown order 'strands0'"),
        ("strands4", True, "unknown order 'strands4'"),
        ("regions4", False, "unknown order 'regions4'"),
        ("random=-1", False, "share '-1' of random in orders 'random=-1': expected a number above 0"),
        ("random=x", False, "share 'x' of random"),
        ("random=nan", False, "share 'nan' of random"),
        ("random,random=2", False, "random stands twice"),
        ("", False, "unknown order ''"),
        (7, False, "orders 7: expected shares of families"),
    ],
)
def test_a_mistake_in_a_mixture_is_named(text, image, says):
    with pytest.raises(ValueError, match=says):
        Mixture.parse(text, image=image)
