"""Times: one in each slice, dealt out at random, and never too near the ends."""

import pytest
import torch

from maskless.schedule import EDGE, bounded, released, stratified


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("rows", [1, 2, 7, 512])
def test_exactly_one_time_falls_in_each_slice(rows):
    t = stratified(rows, generator=generator())
    assert (t * rows).long().sort().values.tolist() == list(range(rows))
    assert (t != t.float().double()).any()  # all the bits of a double


def test_times_within_a_slice_are_uniform(p_value):
    u = (stratified(20_000, generator=generator()) * 20_000) % 1
    observed = (u * 20).long().bincount(minlength=20)
    assert p_value(observed, torch.full((20,), 1_000.0)) > 1e-4


def test_no_row_always_gets_the_same_slice(p_value):
    g = generator()
    first = torch.tensor([int(stratified(8, generator=g)[0] * 8) for _ in range(4_000)])
    assert p_value(first.bincount(minlength=8), torch.full((8,), 500.0)) > 1e-4


def test_bounded_times_keep_from_both_ends_and_released_ones_from_0_alone():
    t = torch.tensor([0.0, 0.5, 1.0]).double()
    torch.testing.assert_close(bounded(t), torch.tensor([EDGE, 0.5, 1 - EDGE]).double())
    torch.testing.assert_close(released(t[[0, 2]]), torch.tensor([EDGE, 1.0]).double())
