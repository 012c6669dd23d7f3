"""Rows of modulation are spread over the tokens of their problems, and gradients are summed over each segment."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from maskless.nn import blocks
from maskless.nn.blocks import Norm, gated, modulated, spread
from maskless.problems import Offsets


def test_a_linear_with_a_row_of_modulation_for_each_token_or_one_for_all():
    torch.manual_seed(0)
    linear, norm, y = torch.nn.Linear(8, 5).double(), Norm(8).double(), torch.randn(7, 8).double()
    torch.nn.init.normal_(norm.weight)
    for rows in (1, 7):
        shift, scale, gate = (torch.randn(rows, width).double() for width in (8, 8, 5))
        plain = linear(y * norm.weight * (1 + scale) + shift)
        torch.testing.assert_close(torch.nn.functional.linear(*modulated(y, linear, norm, shift, scale)), plain)
        torch.testing.assert_close(gated(y, linear, gate), gate * linear(y))


@pytest.mark.parametrize("lengths", [[2, 2, 2], [1, 0, 4]])
def test_rows_of_problems_are_spread_over_their_tokens(lengths):
    rows = torch.randn(3, 4, requires_grad=True)
    out = spread(rows, Offsets.from_lengths(torch.tensor(lengths)))
    assert torch.equal(out, rows.repeat_interleave(torch.tensor(lengths), 0))
    (grad,) = torch.autograd.grad(out.sum(), rows)
    assert grad[:, 0].tolist() == lengths
    assert spread(rows[:1], Offsets.from_lengths(torch.tensor(lengths))).shape == (1, 4)


def sum_segments(x: Tensor, bounds: Tensor) -> Tensor:
    """In place of the kernel that only a GPU has."""
    return torch.stack([x[begin:end].float().sum(0).to(x.dtype) for begin, end in itertools.pairwise(bounds.tolist())])


def test_the_gradient_of_spread_rows_is_the_sum_over_each_segment(monkeypatch):
    monkeypatch.setattr(blocks, "KERNELS", SimpleNamespace(sum_segments=sum_segments))
    offsets, weight = Offsets.from_lengths(torch.tensor([1, 0, 4])), torch.randn(5, 4)
    rows = torch.randn(3, 4, requires_grad=True)
    both = blocks._Spread.apply(rows, offsets.owner, offsets.bounds), spread(rows, offsets)
    assert torch.equal(*both)
    mine, theirs = (torch.autograd.grad((out * weight).sum(), rows)[0] for out in both)
    torch.testing.assert_close(mine, theirs)
    assert (mine[1] == 0).all()


def kernel_sums_segments(device: torch.device, dtype: torch.dtype, width: int) -> None:
    cuda = pytest.importorskip("maskless.nn.cuda")
    bounds = torch.tensor([0, 1, 1, 40, 300], dtype=torch.int32)
    x = torch.randn(300, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = cuda.sum_segments(x.to(device), bounds.to(device)).cpu()
    torch.testing.assert_close(
        found, sum_segments(x, bounds), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
    )


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="set TRITON_INTERPRET=1 where Triton is installed")
@pytest.mark.parametrize("width", [24, 300])
def test_the_kernel_interpreted_sums_segments(width):
    kernel_sums_segments(torch.device("cpu"), torch.float32, width)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 300, 2304])
def test_the_kernel_sums_segments(dtype, width):
    kernel_sums_segments(torch.device("cuda"), dtype, width)
