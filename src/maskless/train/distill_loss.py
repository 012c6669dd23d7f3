"""How far a student is from its teacher, without the logits of either: targets walk through both heads in chunks.

The walk is that of nn/loss.py: the logits of a chunk become their own gradient in place, and the next chunk takes the
same memory. Products are taken in autocast's type and come out in float32 (where the device can); everything after them
is computed in float32.

Shapes: U targets, C targets of a chunk, D width, V vocabulary, P the vocabulary padded to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.nn.blocks import Head
from maskless.nn.loss import chunk_size, exact, multiply, padded, product_type, walked

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
        w, b = padded(weight, bias, dtype, exact(dtype))
        b[len(weight) :] = RULED_OUT
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
        student = Linear.of(weight, bias, head.never, dtype)
        buffers = student.bias.new_empty(2, min(rows, len(own)), len(student.bias))

        def price(part: slice, h: Tensor) -> tuple[Tensor, Tensor]:
            logits = student.logits(h, buffers[0]), teacher.logits(hidden[part], buffers[1])
            for each in logits:
                each.sub_(each.logsumexp(1, keepdim=True))
            costs = kind(*logits) * weights[part]
            return costs, logits[0].mul_(weights[part, None])

        return walked(own, weight, bias, student.weight, price, rows)
