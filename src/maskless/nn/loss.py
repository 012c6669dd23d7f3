"""The cost of right answers without the logits: targets walk through the head in chunks, and only sums stay.

The logits of all targets would be the largest tensor of training by far: for 32 sequences of 1,024 tokens and 50,257
ids 3 GiB in bfloat16, and the softmax in float32 needs twice that, more than once. Here the logits of a chunk become
their own gradient in place, its products with the weight and the hidden states give the chunk's part of all gradients,
and the next chunk takes the same memory. Nothing is computed twice: the backward pass only scales.

Shapes: U targets, C targets of a chunk, D width, V vocabulary, P the vocabulary padded to a multiple of 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from maskless.nn import Network, device_of
from maskless.nn.blocks import Head
from maskless.nn.threads import threads_for_pass
from maskless.problems import Problems

CHUNK_BYTES = 600 * 2**20  # the logits of a chunk: large enough for full speed, small beside the activations
ALIGNED = 64  # ids: rows of logits that begin at odd addresses would make the products on a GPU slow
TILE = 128  # targets
# Of a chunk of targets and their hidden states (C, D): what each costs, (C,), and the gradient of its logits, (C, P).
Price = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


def cost(head: Head, x: Tensor, condition: Tensor, *, answers: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of negative log-probabilities that a head gives to the answers, in float32.

    x (U, D) hidden states, condition (1, C) or (U, C), answers (U,), weights (U,) -> ()
    """
    return weighted_cross_entropy(*head.operands(x, condition), answers, weights, head.never)


def costs_each(head: Head, x: Tensor, condition: Tensor, *, answers: Tensor) -> Tensor:
    """The negative log-probability of each answer, in float32, without gradients.  (U, D), (1 or U, C), (U,) -> (U,)"""
    hidden, weight, bias = head.operands(x, condition)
    dtype, ones = product_type(hidden), torch.ones_like(answers, dtype=torch.float32)
    rows = chunk_size(len(hidden), len(weight), dtype)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return walk(hidden, *_cross_entropies(weight, bias, answers, ones, head.never, rows, dtype), rows)


def answer_costs(network: Network, problems: Problems, answers: Tensor) -> Tensor:
    """The cost of each answer to problems, of a network or of a function, in float64 on the CPU.  (U,) -> (U,)"""
    device = device_of(network)
    problems, answers = problems.to(device), answers.to(device)
    with threads_for_pass(network, problems):
        if isinstance(network, nn.Module) and hasattr(network, "head"):  # the logits are never there all at once
            return network(problems, partial(costs_each, answers=answers)).double().cpu()
        return F.cross_entropy(network(problems).float(), answers, reduction="none").double().cpu()


def total_cost(network: Network, problems: Problems, answers: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the costs of answers to problems, of a network or of a function, in float32.  -> ()"""
    if isinstance(network, nn.Module) and hasattr(network, "head"):
        return network(problems, partial(cost, answers=answers, weights=weights))
    return (weights * F.cross_entropy(network(problems).float(), answers, reduction="none")).sum()


def weighted_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    answers: Tensor,
    weights: Tensor,
    never: int | None = None,
    *,
    chunk: int | None = None,
) -> Tensor:
    """The sum of weights * -log p(answer), where p = softmax(hidden weight^T + bias) and p(never) = 0.

    Products are taken in autocast's type, everything else in float32, gradients of weight and bias summed in it. A
    target of weight 0 adds nothing, whatever its answer. chunk: how many targets at a time (by default what fits).

    hidden (U, D), weight (V, D), bias (V,), answers (U,), weights (U,) -> ()
    """
    dtype = product_type(hidden)
    rows = chunk or chunk_size(len(hidden), len(weight), dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        w, price = _cross_entropies(weight, bias, answers, weights, never, rows, dtype)
        return walked(hidden, weight, bias, w, price, rows)


def _cross_entropies(
    weight: Tensor,
    bias: Tensor | None,
    answers: Tensor,
    weights: Tensor,
    never: int | None,
    rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Price]:
    """The padded weight, (P, D), and what chunks of `rows` targets cost."""
    w, b = padded(weight, bias, dtype, dtype)
    logits, costs_of = w.new_empty(min(rows, len(answers)), len(w)), _costs_on(w.device)
    gradients = torch.is_grad_enabled()

    def price(part: slice, h: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.addmm(b, h, w.T, out=logits[: len(h)])
        return costs_of(x, answers[part], weights[part], len(weight), never, gradients=gradients), x

    return w, price


def product_type(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def chunk_size(targets: int, vocab: int, dtype: torch.dtype) -> int:
    """How many targets to take at a time: chunks of about one size, in whole tiles of a matrix product.  U, V -> C"""
    most = max(TILE, CHUNK_BYTES // (round_up(vocab, ALIGNED) * dtype.itemsize) // TILE * TILE)
    chunks = max(1, math.ceil(targets / most))
    return max(TILE, round_up(math.ceil(targets / chunks), TILE))


@torch.no_grad()
def padded(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, bias_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A linear with zeros for ids that do not exist.  (V, D), (V,) -> (P, D), (P,)"""
    (V, D), P = weight.shape, round_up(len(weight), ALIGNED)
    w, b = weight.new_zeros(P, D, dtype=dtype), weight.new_zeros(P, dtype=bias_dtype)
    w[:V] = weight
    if bias is not None:
        b[:V] = bias
    return w, b


def walk(
    hidden: Tensor, w: Tensor, price: Price, rows: int, gradients: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """What all targets cost, (U,), taken `rows` at a time.

    hidden (U, D), w (P, D) the padded weight. gradients: of hidden, to fill, and of w and its bias, to add to.
    """
    parts = []
    for begin in range(0, len(hidden), rows):
        part = slice(begin, begin + rows)
        h = hidden[part].to(w.dtype)
        found, x = price(part, h)
        parts.append(found)
        if gradients is not None:
            d_hidden, d_weight, d_bias = gradients
            d_bias += x.sum(0, dtype=d_bias.dtype)
            x = x.to(w.dtype)
            multiply(x, w, d_hidden[part], add=False)
            multiply(x.T, h, d_weight, add=True)
    return torch.cat(parts) if parts else w.new_zeros(0, dtype=exact(w.dtype))


def walked(hidden: Tensor, weight: Tensor, bias: Tensor | None, w: Tensor, price: Price, rows: int) -> Tensor:
    """The sum of what all targets cost, with gradients of the hidden states and of the linear.  -> ()"""
    if torch.is_grad_enabled():
        return _Walk.apply(hidden, weight, bias, w, price, rows)
    return walk(hidden, w, price, rows).sum()


class _Walk(torch.autograd.Function):
    """`walk`, which finds the gradients on its way, and a backward pass that scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, w: Tensor, price: Price, rows: int
    ) -> Tensor:
        V, dtype = len(weight), exact(weight.dtype)
        gradients = torch.empty_like(hidden), torch.zeros_like(w, dtype=dtype), w.new_zeros(len(w), dtype=dtype)
        d_hidden, d_weight, d_bias = gradients
        loss = walk(hidden, w, price, rows, gradients).sum()
        ctx.save_for_backward(d_hidden, d_weight[:V], None if bias is None else d_bias[:V])
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if g is None else g * scale for g in ctx.saved_tensors), None, None, None


def multiply(a: Tensor, b: Tensor, into: Tensor, *, add: bool) -> None:
    """into = a b (+ into), where `into` may be of a wider type than the factors."""
    if into.dtype == a.dtype:
        into.addmm_(a, b, beta=int(add))
    elif _widens(into.device):
        torch.addmm(into, a, b, out_dtype=into.dtype, beta=int(add), out=into)
    elif add:  # the product is rounded, the sum is not
        into.add_(a @ b)
    else:
        into.copy_(a @ b)


def costs(x: Tensor, answers: Tensor, weights: Tensor, vocab: int, never: int | None, *, gradients: bool) -> Tensor:
    """Weighted costs of the answers; the logits are used up, and become their gradient if that is wanted.

    Columns from `vocab` on are padding, their gradient is 0.  (C, P), (C,), (C,) -> (C,)
    """
    p, answers, weights = x.to(exact(x.dtype)), answers[:, None], weights[:, None]
    p[:, vocab:] = -torch.inf
    if never is not None:
        p[:, never] = -torch.inf
    right, top = p.gather(1, answers), p.amax(1, keepdim=True)
    p.sub_(top).exp_()
    total = p.sum(1, keepdim=True)
    if gradients:
        x.copy_(p.mul_(weights / total).scatter_add_(1, answers, -weights.to(p.dtype)))
    return torch.where(weights == 0, 0, weights * (total.log() + top - right))[:, 0]


@cache
def _costs_on(device: torch.device) -> Callable[..., Tensor]:
    """The kernel on a GPU where Triton is, which comes with torch's builds for CUDA; elsewhere `costs`."""
    if device.type == "cuda" and find_spec("triton"):
        from maskless.nn import cuda

        return cuda.costs
    return costs


@cache
def _widens(device: torch.device) -> bool:
    """Whether the device has products of bfloat16 that come out in float32: NVIDIA's do, from Ampere on."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 8


def exact(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def round_up(number: int, step: int) -> int:
    return math.ceil(number / step) * step
