"""First weights, modulations folded into the linears that follow them, dropout, and the GELU with its bias."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from maskless.nn import blocks
from maskless.nn.blocks import Modulation, Norm, SelfBlock, dropout, fold_in, fold_out, kept, normalise, open_gates
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.problems import dense


def tiny(**kinds: str) -> PartitionTransformer:
    torch.manual_seed(0)
    config = PartitionConfig(vocab=11, length=12, width=16, heads=2, encoder=1, decoder=1, condition=8, **kinds)
    return PartitionTransformer(config).eval()


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor([[1, 2, 3]]), torch.tensor([[0, 4, 7]]), torch.tensor([[1, 5]])


def test_folding_a_norm_and_a_modulation_into_a_linear_changes_nothing():
    torch.manual_seed(0)
    linear, norm, x = nn.Linear(8, 5).double(), Norm(8).double(), torch.randn(7, 8, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    shift, scale, gate = (torch.randn(1, width, dtype=torch.float64) for width in (8, 8, 5))
    y = torch.nn.functional.layer_norm(x, (8,))
    plain = linear(y * norm.weight * (1 + scale) + shift)
    torch.testing.assert_close(nn.functional.linear(y, *fold_in(linear, norm, shift, scale)), plain)
    torch.testing.assert_close(nn.functional.linear(x, *fold_out(nn.Linear(8, 5).double(), gate)).shape, plain.shape)
    torch.testing.assert_close(nn.functional.linear(x, *fold_out(linear, gate)), gate * linear(x))
    assert normalise(x.float()).mean(1).abs().max() < 1e-6


def test_released_first_weights_predict_nothing_and_pass_no_gradient_to_the_encoder():
    network = tiny()
    logits = network(dense(*problem()))
    assert (logits == 0).all()
    logits.square().sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in network.encoder.parameters())


def test_open_first_weights_pass_a_gradient_to_every_layer():
    network = tiny()
    open_gates(network)
    network(dense(*problem())).square().sum().backward()
    for block in [*network.encoder, *network.decoder]:
        for name in ("out.weight", "mlp.down.weight", "mlp.up.weight"):
            assert block.get_parameter(name).grad.abs().sum() > 0, name


def test_open_gates_keep_the_kind_of_function():
    before, after = tiny(), tiny()
    open_gates(after)
    assert [(n, p.shape) for n, p in before.named_parameters()] == [(n, p.shape) for n, p in after.named_parameters()]
    block = next(m for m in after.modules() if isinstance(m, SelfBlock))
    gates = block.modulation(torch.zeros(1, 8))
    assert [bool((g == 1).all()) for g in gates] == [False, False, True, False, False, True]
    assert isinstance(block.modulation, Modulation)


@pytest.mark.parametrize("swap", ["residual", "released"])
def test_a_residual_swap_tells_positions_apart_even_without_a_context(swap):
    network = tiny(swap=swap)
    open_gates(network)
    none = torch.empty(1, 0, dtype=torch.long)
    logits = network(dense(none, none, torch.tensor([[2, 9]])))
    assert torch.equal(logits[0], logits[1]) == (swap == "released")


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


def gelu_gradient(g: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """In place of the kernel that only a GPU has."""
    d = torch.ops.aten.gelu_backward(g.float(), x.float() + bias.float(), approximate="tanh")
    return d.to(x.dtype), d.sum(0).to(bias.dtype)


def test_a_gelu_with_its_bias_is_that_of_the_linear(monkeypatch):
    monkeypatch.setattr(blocks, "KERNELS", SimpleNamespace(gelu_gradient=gelu_gradient))
    torch.manual_seed(0)
    x, bias, weight = torch.randn(9, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(9, 4)
    both = blocks._Gelu.apply(x, bias), blocks.linear_gelu(x, torch.eye(4), bias)
    torch.testing.assert_close(*both)
    mine, theirs = (torch.autograd.grad((out * weight).sum(), (x, bias)) for out in both)
    torch.testing.assert_close(mine, theirs)


def kernel_gives_the_gradient_of_a_gelu(device: torch.device, dtype: torch.dtype, T: int, E: int) -> None:
    cuda = pytest.importorskip("maskless.nn.cuda")
    torch.manual_seed(0)
    g, x, bias = torch.randn(T, E).to(dtype), 3 * torch.randn(T, E).to(dtype), torch.randn(E)
    found = cuda.gelu_gradient(*(one.to(device) for one in (g, x, bias)))
    near = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-4, "atol": 1e-4}
    for one, other in zip(found, gelu_gradient(g, x, bias), strict=True):
        torch.testing.assert_close(one.cpu(), other, **near)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="set TRITON_INTERPRET=1 where Triton is installed")
@pytest.mark.parametrize(("T", "E"), [(5, 24), (300, 300)])
def test_the_kernel_interpreted_gives_the_gradient_of_a_gelu(T, E):
    kernel_gives_the_gradient_of_a_gelu(torch.device("cpu"), torch.float32, T, E)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "E"), [(5, 24), (300, 300), (1000, 3072)])
def test_the_kernel_gives_the_gradient_of_a_gelu(T, E, dtype):
    kernel_gives_the_gradient_of_a_gelu(torch.device("cuda"), dtype, T, E)
