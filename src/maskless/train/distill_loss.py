"""How far a student is from its teacher, without the logits of either: targets walk through both heads in chunks.

The logits of all targets would be the largest tensors by far: for 32 sequences of 1,024 tokens and 50,257 ids 6 GiB in
float32, of student and teacher alike, and their softmax more than once. As in nn/loss.py the logits of a chunk become
their own gradient in place, and the next chunk takes the same memory. Products are taken in autocast's type and come
out in float32 (where the device can); everything after them is computed in float32.

Shapes: U targets, C targets of a chunk, D width, V vocabulary, P the vocabulary padded to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from maskless.nn.blocks import Head
from maskless.nn.loss import ALIGNED, chunk_size, exact, multiply, product_type, round_up

RULED_OUT = -1e9  # the logit of an id that does not exist or is never predicted: finite, so that differences are 0
Divergence = Callable[[Tensor, Tensor], Tensor]


def kl_backward(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) of log-probabilities, which become the gradient of the student's logits, and scratch.

    The student need not cover what it cannot: it looks for one of the teacher's modes.  (C, P) x 2 -> (C,)  SDTT
    """
    ratio = torch.sub(student, teacher, out=teacher)
    p = student.exp_()
    cost = torch.linalg.vecdot(p, ratio)
    p.mul_(ratio.sub_(cost[:, None]))
    return cost


def kl_forward(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student): its optimum is the mean of all that the teacher says.  (C, P) x 2 -> (C,)"""
    p = teacher.exp()
    cost = torch.linalg.vecdot(p, teacher.sub_(student))
    student.exp_().sub_(p)
    return cost


def total_variation(student: Tensor, teacher: Tensor) -> Tensor:
    """Half the sum of differences of probabilities, the largest by which an event's can differ.  (C, P) x 2 -> (C,)"""
    p = student.exp_()
    difference = torch.sub(p, teacher.exp_(), out=teacher)
    cost = difference.abs().sum(1) / 2
    side = difference.sign_()
    p.mul_(side.sub_(torch.linalg.vecdot(p, side)[:, None])).div_(2)
    return cost


LOSSES: dict[str, Divergence] = {"kl-backward": kl_backward, "kl-forward": kl_forward, "tv": total_variation}


@dataclass(frozen=True)
class Linear:
    """The last linear of a head, ready for products: padded, and with ids that are never predicted ruled out."""

    weight: Tensor  # (P, D)
    bias: Tensor  # (P,) float32

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, never: int | None, dtype: torch.dtype) -> Linear:
        (V, D), P = weight.shape, round_up(len(weight), ALIGNED)
        w, b = weight.new_zeros(P, D, dtype=dtype), weight.new_zeros(P, dtype=exact(dtype))
        w[:V] = weight
        if bias is not None:
            b[:V] = bias
        b[V:] = RULED_OUT
        if never is not None:
            w[never].zero_()  # an assignment would wait for the GPU
            b[never].fill_(RULED_OUT)
        return Linear(w, b)

    def logits(self, hidden: Tensor, into: Tensor) -> Tensor:
        """In float32.  (C, D) -> (C, P)"""
        x = into[: len(hidden)].copy_(self.bias)
        multiply(hidden.to(self.weight.dtype), self.weight.T, x, add=True)
        return x


def divergence(
    head: Head,
    x: Tensor,
    condition: Tensor,
    *,
    hidden: Tensor,
    teacher: Linear,
    weights: Tensor,
    kind: Divergence,
    chunk: int | None = None,
) -> Tensor:
    """The weighted sum over targets of the divergence of what a head predicts from what a teacher does, in float32.

    x (U, D) states and condition (1 or U, C) of the student; hidden (U, D) what the teacher's linear takes; weights
    (U,); chunk: how many targets at a time (by default what fits) -> ()
    """
    own, weight, bias = head.operands(x, condition)
    dtype = product_type(own)
    rows = chunk or chunk_size(len(own), len(weight), exact(dtype))
    with torch.autocast(own.device.type, enabled=False):
        return _Walk.apply(own, weight, bias, head.never, hidden, teacher, weights, kind, rows, dtype)


class _Walk(torch.autograd.Function):
    """The divergence and its gradients, found in one walk over the targets, and a backward pass that scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        never: int | None,
        hidden: Tensor,
        teacher: Linear,
        weights: Tensor,
        kind: Divergence,
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        U, V, student = len(own), len(weight), Linear.of(weight, bias, never, dtype)
        d_own, d_weight = torch.empty_like(own), torch.zeros_like(student.weight, dtype=exact(weight.dtype))
        d_bias, costs = torch.zeros_like(student.bias), student.bias.new_zeros(U)
        buffers = student.bias.new_empty(2, min(rows, U), len(student.bias))
        for begin in range(0, U, rows):
            part = slice(begin, begin + rows)
            h = own[part].to(dtype)
            logits = student.logits(h, buffers[0]), teacher.logits(hidden[part], buffers[1])
            for each in logits:
                each.sub_(each.logsumexp(1, keepdim=True))
            costs[part] = kind(*logits) * weights[part]
            x = logits[0].mul_(weights[part, None])  # the gradient of the student's logits
            d_bias += x.sum(0)
            x = x.to(dtype)
            multiply(x, student.weight, d_own[part], add=False)
            multiply(x.T, h, d_weight, add=True)
        if never is not None:
            d_weight[never].zero_()  # an assignment would wait for the GPU
            d_bias[never].zero_()
        ctx.save_for_backward(d_own, d_weight[:V], None if bias is None else d_bias[:V])
        return costs.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if g is None else g * scale for g in ctx.saved_tensors), *[None] * 7
