"""The moving average follows its recursion and leaves the parameters as they were."""

import pytest
import torch

from maskless.ema import EMA


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3,), (2, 4))]


@pytest.mark.parametrize("decay", [0.0, 0.15, 0.5, 0.9999])
def test_the_average_is_the_recursion_with_a_warm_up(decay):
    current = parameters()
    ema, by_hand = EMA(current, decay), [p.detach().clone() for p in current]
    for n in range(1, 30):
        with torch.no_grad():
            for p, new in zip(current, parameters(seed=n), strict=True):
                p.copy_(new)
        ema.update(current)
        d = min(decay, (1 + n) / (10 + n))
        by_hand = [d * average + (1 - d) * p.detach() for average, p in zip(by_hand, current, strict=True)]
        for ours, expected in zip(ema.averages, by_hand, strict=True):
            torch.testing.assert_close(ours, expected)
    assert ema.updates == 29


@pytest.mark.parametrize("fails", [False, True])
def test_the_averages_stand_in_for_a_block_and_then_the_parameters_are_back(fails):
    current = parameters()
    ema = EMA(parameters(seed=1), 0.9)
    try:
        with ema.swapped_into(iter(current)):
            inside = [p.detach().clone() for p in current]
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    for p, seen, average, before in zip(current, inside, ema.averages, parameters(), strict=True):
        assert torch.equal(seen, average)
        assert torch.equal(p, before)
        assert p.requires_grad
    assert all(torch.equal(a, p) for a, p in zip(ema.averages, parameters(seed=1), strict=True))


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=f"EMA decay {decay} is out of range"):
        EMA(parameters(), decay)
