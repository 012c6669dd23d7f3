"""First weights, swaps that keep their query, and dropout by a hash."""

import math

import pytest
import torch

from maskless.nn.blocks import dropout, kept, open_gates
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.problems import dense


def tiny(**kinds: str) -> PartitionTransformer:
    torch.manual_seed(0)
    config = PartitionConfig(vocab=11, length=12, width=16, heads=2, encoder=1, decoder=1, condition=8, **kinds)
    return PartitionTransformer(config).eval()


PROBLEM = dense(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 4, 7]]), torch.tensor([[1, 5]]))


def test_released_first_weights_predict_nothing_and_pass_no_gradient_to_the_encoder():
    network = tiny()
    logits = network(PROBLEM)
    assert (logits == 0).all()
    logits.square().sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in network.encoder.parameters())


def test_open_first_weights_pass_a_gradient_to_every_layer():
    network = tiny()
    open_gates(network)
    network(PROBLEM).square().sum().backward()
    for block in [*network.encoder, *network.decoder]:
        for name in ("out.weight", "mlp.down.weight", "mlp.up.weight"):
            assert block.get_parameter(name).grad.abs().sum() > 0, name


@pytest.mark.parametrize("swap", ["residual", "gated", "released"])
def test_a_swap_that_keeps_its_query_tells_positions_apart_even_without_a_context(swap):
    network = tiny(swap=swap)
    open_gates(network)
    none = torch.empty(1, 0, dtype=torch.long)
    problems = dense(none, none, torch.tensor([[2, 9]]))
    logits = network(problems)
    assert torch.equal(logits[0], logits[1]) == (swap != "residual")  # a gate begins with nothing
    if swap == "gated":
        with torch.no_grad():
            network.swap.gain += 0.1
        logits = network(problems)
        assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_hashed_dropout_drops_its_share_without_a_pattern(rate):
    """Share, neighbours along both axes, and other seeds, each within five standard errors of independent draws."""
    shape = torch.Size([512, 768])
    dropped = [~kept(shape, rate, torch.tensor([seed], dtype=torch.int32)) for seed in (0, 1, 2**31 - 1)]
    for one, other in zip(dropped, dropped[1:] + dropped[:1], strict=True):
        pairs = one[1:] & one[:-1], one[:, 1:] & one[:, :-1], one & other
        for found, p in ((one, rate), *((pair, rate**2) for pair in pairs)):
            assert abs(float(found.double().mean()) - p) < 5 * math.sqrt(p / shape.numel())


@pytest.mark.gpu
def test_dropout_on_a_gpu_is_the_same_compiled_and_not_and_keeps_the_mean():
    x = torch.ones(512, 768, device="cuda", requires_grad=True)
    seed = torch.tensor([77], dtype=torch.int32, device="cuda")
    assert torch.equal(torch.compile(kept)(x.shape, 0.1, seed), kept(x.shape, 0.1, seed))
    assert torch.equal(kept(x.shape, 0.1, seed).cpu(), kept(x.shape, 0.1, seed.cpu()))
    out = torch.compile(dropout)(x, 0.1, True)
    assert abs(float(out.detach().mean()) - 1) < 0.01
    (slope,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(slope, out)  # the backward pass drops the same elements
