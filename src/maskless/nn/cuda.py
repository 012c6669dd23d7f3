"""The Triton kernel of the loss; loaded only where Triton is, which comes with torch's builds for CUDA.

Shapes: C targets of a chunk, V vocabulary, P the vocabulary padded.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32

BLOCK, WARPS = 2048, 4  # ids that a program takes at a time, and its warps: the best of eight measured on an H200


def costs(x: Tensor, answers: Tensor, weights: Tensor, vocab: int, never: int | None, *, gradients: bool) -> Tensor:
    """As `loss.costs`, reading the logits from memory once and writing them once.  (C, P), (C,), (C,) -> (C,)"""
    out, width = x.new_empty(len(x), dtype=float32), x.shape[1]
    block = min(BLOCK, triton.next_power_of_2(width))
    sizes = vocab, -1 if never is None else never, width
    _costs[(len(x),)](x, answers, weights, out, *sizes, gradients, block, num_warps=WARPS)
    return out


@triton.jit
def _costs(
    x,
    answers,
    weights,
    out,
    V: tl.constexpr,
    NEVER: tl.constexpr,
    P: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    answer, weight = tl.load(answers + row), tl.load(weights + row)
    x += row * P
    right = tl.load(x + answer).to(tl.float32)
    if answer == NEVER:
        right = float("-inf")
    top = tl.full((BLOCK,), -1e30, tl.float32)  # each lane keeps a maximum and a sum of its own, and waits for no other
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, P, BLOCK):
        y = _load(x, begin, V, NEVER, P, BLOCK)
        falls = tl.exp(-tl.abs(y - top))  # of the old sum under a new maximum, or of a term under the old one
        total = tl.where(y > top, total * falls + 1, total + falls)
        top = tl.maximum(top, y)
    highest = tl.max(top, 0)
    normal = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(out + row, tl.where(weight == 0, 0.0, weight * (normal - right)))
    if GRADIENTS:
        tl.debug_barrier()  # all have read the right answer's logit before one writes there
        for begin in range(0, P, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            p = tl.exp(_load(x, begin, V, NEVER, P, BLOCK) - normal)
            d = weight * (p - tl.where(ids == answer, 1.0, 0.0))
            tl.store(x + ids, d.to(x.dtype.element_ty), mask=ids < P)


@triton.jit
def _load(x, begin, V: tl.constexpr, NEVER: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """A block of logits, -inf for ids that do not count. The mask is a multiple of 64, so loads stay wide."""
    ids = begin + tl.arange(0, BLOCK)
    y = tl.load(x + ids, mask=ids < P, other=0.0).to(tl.float32)
    return tl.where((ids < V) & (ids != NEVER), y, float("-inf"))
