"""Passes over rows that also sum them: the costs of right answers, and segments.

Shapes: C targets of a chunk, V vocabulary, P the vocabulary padded; S segments, T rows, E their width.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor, float32

BLOCK, WARPS, STAGES = 2048, 4, 3  # of the costs: ids that a program takes at a time, its warps, and loads under way
ROWS, COLUMNS = 16, 256  # of a segment that a program sums at a time
LN2 = tl.constexpr(math.log(2))


def costs(x: Tensor, answers: Tensor, weights: Tensor, vocab: int, never: int | None, *, gradients: bool) -> Tensor:
    """As `loss.costs`, reading the logits from memory once and writing them once.  (C, P), (C,), (C,) -> (C,)"""
    out, width = x.new_empty(len(x), dtype=float32), x.shape[1]
    block = min(BLOCK, triton.next_power_of_2(width))
    sizes = vocab, -1 if never is None else never, width
    _costs[(len(x),)](x, answers, weights, out, *sizes, gradients, block, STAGES, num_warps=WARPS)
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
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    answer, weight = tl.load(answers + row), tl.load(weights + row)
    x += row * P
    right = tl.load(x + answer).to(tl.float32)
    if answer == NEVER:
        right = float("-inf")
    top, total = -1e30, 0.0
    for begin in tl.range(0, P, BLOCK, num_stages=STAGES):
        y = _load(x, begin, V, NEVER, P, BLOCK)
        highest = tl.maximum(top, tl.max(y, 0))
        total = total * tl.exp2(top - highest) + tl.sum(tl.exp2(y - highest), 0)
        top = highest
    normal = top + tl.log2(total)
    tl.store(out + row, tl.where(weight == 0, 0.0, weight * (LN2 * normal - right)))
    if GRADIENTS:
        tl.debug_barrier()  # all have read the right answer's logit before one writes there
        for past in tl.range(0, P, BLOCK, num_stages=STAGES):
            begin = (P - 1) // BLOCK * BLOCK - past  # backwards: what was read last is still near
            ids = begin + tl.arange(0, BLOCK)
            p = tl.exp2(_load(x, begin, V, NEVER, P, BLOCK) - normal)
            d = weight * (p - tl.where(ids == answer, 1.0, 0.0))
            tl.store(x + ids, d.to(x.dtype.element_ty), mask=ids < P)


@triton.jit
def _load(x, begin, V: tl.constexpr, NEVER: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """A block of logits over ln 2, -inf for ids that do not count. The mask is a multiple of 64, so loads stay wide."""
    ids = begin + tl.arange(0, BLOCK)
    y = tl.load(x + ids, mask=ids < P, other=0.0).to(tl.float32) / LN2
    return tl.where((ids < V) & (ids != NEVER), y, float("-inf"))


@torch.library.custom_op("maskless::sum_segments", mutates_args=())
def sum_segments(x: Tensor, bounds: Tensor) -> Tensor:
    """The sum of the rows of each segment, in float32 and always in the same order.  (T, E), (S+1,) -> (S, E)"""
    x, (S, E) = x.contiguous(), (len(bounds) - 1, x.shape[1])
    out = x.new_empty(S, E)
    _sums[(S, triton.cdiv(E, COLUMNS))](x, bounds, out, E, ROWS, COLUMNS, num_warps=4)
    return out


@sum_segments.register_fake
def _(x: Tensor, bounds: Tensor) -> Tensor:
    return x.new_empty(bounds.shape[0] - 1, x.shape[1])


@triton.jit
def _sums(x, bounds, out, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(bounds + segment), tl.load(bounds + segment + 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        real = (rows < end)[:, None] & (columns < E)[None, :]
        total += tl.load(x + rows.to(tl.int64)[:, None] * E + columns[None, :], mask=real, other=0.0).to(tl.float32)
    tl.store(out + segment * E + columns, tl.sum(total, 0), mask=columns < E)
