"""The Triton kernels of training; loaded only where Triton is, which comes with torch's builds for CUDA.

Shapes: C targets of a chunk, V vocabulary, P the vocabulary padded; S segments, Tq and Tk packed queries and keys, h
heads, d head width.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, float32

BLOCK, WARPS, STAGES = 2048, 4, 3  # of the costs: ids that a program takes at a time, its warps, and loads under way
LN2 = tl.constexpr(math.log(2))
ROWS, COLUMNS = 16, 256  # that a program sums at a time
TILE = 64  # queries or keys of attention: the best of six measured there, for each of its kernels


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
    return x.new_empty(len(bounds) - 1, x.shape[1])


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


@torch.library.custom_op("maskless::attend_segments", mutates_args=())
def attend_segments(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """As `attention.attention`, and each query's log2 of the sum of weights.  (Tq, h, d), 2 x (Tk, h, d) -> q, (h, Tq)

    Tiles lie on the packed arrays as a whole. One that spans a boundary sees the other side of both segments through a
    mask; within a segment only its end needs one.
    """
    T, h, d = q.shape
    out, sums = q.new_empty(T, h, d), q.new_empty(h, T, dtype=float32)
    ends, strides = (q_bounds, k_bounds, T, len(q_bounds) - 1), _strides(q, k, v)
    meta = _meta(q, q_bounds, causal)
    _attend[(triton.cdiv(T, TILE), h)](q, k, v, out, sums, *ends, d**-0.5 / math.log(2), *strides, **meta, num_stages=3)
    return out, sums


@torch.library.custom_op("maskless::attend_segments_backward", mutates_args=())
def attend_segments_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    (T, h, d), Tk = q.shape, len(k)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dots, scale, strides = torch.empty_like(sums), d**-0.5, _strides(q, k, v, g)
    meta, q_grid, k_grid = _meta(q, q_bounds, causal), (triton.cdiv(T, TILE), h), (triton.cdiv(Tk, TILE), h)
    ends = q_bounds, k_bounds, T, Tk, len(q_bounds) - 1
    rest = *ends, scale / math.log(2), scale, *strides
    _queries[q_grid](q, k, v, g, out, dq, sums, dots, *rest, **meta, num_stages=3)  # finds the dots, which come next
    # With 168 registers three programs share a multiprocessor, which makes them a tenth faster.
    _keys[k_grid](q, k, v, g, dk, dv, sums, dots, *rest, **meta, num_stages=2, maxnreg=168)
    return dq, dk, dv


def _strides(*parts: Tensor) -> list[int]:
    """From token to token and from head to head."""
    assert all(x.stride(2) == 1 for x in parts), "the width of a head must be contiguous"
    return [x.stride(i) for x in parts for i in (0, 1)]


def _meta(q: Tensor, bounds: Tensor, causal: bool) -> dict[str, Any]:
    bits = len(bounds).bit_length()  # how often a bisection halves the segments
    return {"D": q.shape[2], "CAUSAL": causal, "BITS": bits, "TILE": TILE, "num_warps": 4}


@attend_segments.register_fake
def _(q, k, v, q_bounds, k_bounds, causal):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=float32)


@attend_segments_backward.register_fake
def _(g, q, k, v, out, sums, q_bounds, k_bounds, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_bounds, k_bounds, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, q_bounds, k_bounds)


def _gradients(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    g = g if g.stride(2) == 1 else g.contiguous()
    return *attend_segments_backward(g, *ctx.saved_tensors, ctx.causal), None, None, None


attend_segments.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def _window(own, others, at, last, S, KEYS: tl.constexpr, CAUSAL: tl.constexpr, BITS: tl.constexpr):
    """Where begins and ends what each query attends to or, for KEYS, what attends to each key.

    own, others: bounds of the segments on both sides; places beyond the last one count as the last.
    """
    at = tl.minimum(at, last)
    low = tl.zeros_like(at)  # the last segment that begins at or before each place, by bisection
    high = low + S
    for _ in tl.static_range(BITS):
        middle = (low + high) // 2
        far = tl.load(own + middle) <= at
        low = tl.where(far, middle, low)
        high = tl.where(far, high, middle)
    begin, end = tl.load(others + low), tl.load(others + low + 1)
    if CAUSAL:
        if KEYS:
            begin = at
        else:
            end = at + 1
    return begin, end


@triton.jit
def _rows(x, at, stride, stop, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a packed array, zeros from `stop` on."""
    rows = x + at.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(rows, at[:, None] < stop, 0.0) if MASKED else tl.load(rows)


@triton.jit
def _put(x, values, at, stop, h, D: tl.constexpr):
    """Rows of one head into a contiguous array."""
    to = x + (at.to(tl.int64)[:, None] * h + tl.program_id(1)) * D + tl.arange(0, D)[None, :]
    tl.store(to, values.to(x.dtype.element_ty), at[:, None] < stop)


@triton.jit
def _attend(
    q, k, v, out, sums, q_bounds, k_bounds, T, S, scale, qt, qh, kt, kh, vt, vh,
    D: tl.constexpr, CAUSAL: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, end = _window(q_bounds, k_bounds, at, T - 1, S, False, CAUSAL, BITS)
    first, stop, full = _spans(begin, end, TILE)
    queries = _rows(q + head * qh, at, qt, T, D, True)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    state = tl.zeros((TILE, D), tl.float32), tl.zeros((TILE,), tl.float32), top
    state = _seen(state, queries, k + head * kh, v + head * vh, kt, vt, first, full, begin, end, scale, False)
    found, total, top = _seen(state, queries, k + head * kh, v + head * vh, kt, vt, full, stop, begin, end, scale, True)
    some = total > 0
    _put(out, found * tl.where(some, 1 / total, 0.0)[:, None], at, T, tl.num_programs(1), D)
    tl.store(sums + head.to(tl.int64) * T + at, tl.where(some, top + tl.log2(total), 0.0), at < T)


@triton.jit
def _spans(begin, end, TILE: tl.constexpr):
    """From where to where a tile of queries must look, and how far it may do so without a mask."""
    first, stop = tl.min(begin, 0), tl.max(end, 0)
    plain = tl.where(tl.max(begin, 0) == first, tl.maximum(tl.min(end, 0) - first, 0), 0)
    return first, stop, first + plain // TILE * TILE


@triton.jit
def _seen(state, q, k, v, kt, vt, first, stop, begin, end, scale, MASKED: tl.constexpr):
    """Attention to the keys from first to stop, beside what was found before."""
    found, total, top = state
    TILE: tl.constexpr = q.shape[0]
    for start in range(first, stop, TILE):
        at = start + tl.arange(0, TILE)
        score = tl.dot(q, _rows(k, at, kt, stop, q.shape[1], MASKED).T) * scale
        if MASKED:
            score = tl.where((at[None, :] >= begin[:, None]) & (at[None, :] < end[:, None]), score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
        weight, falls = tl.exp2(score - base[:, None]), tl.exp2(top - base)
        values = _rows(v, at, vt, stop, q.shape[1], MASKED)
        found = tl.dot(weight.to(values.dtype), values, found * falls[:, None])
        total = total * falls + tl.sum(weight, 1)
        top = highest
    return found, total, top


@triton.jit
def _keys(
    q, k, v, g, dk, dv, sums, dots, q_bounds, k_bounds, T, Tk, S, scale, natural, qt, qh, kt, kh, vt, vh, gt, gh,
    D: tl.constexpr, CAUSAL: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, h = tl.program_id(1), tl.num_programs(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, end = _window(k_bounds, q_bounds, at, Tk - 1, S, True, CAUSAL, BITS)
    first, stop, latest = tl.min(begin, 0), tl.max(end, 0), tl.max(begin, 0)
    one = tl.min(end, 0) == stop  # all keys are of one segment; the first queries see some of them, if causal
    plain = tl.where(one, tl.minimum(first + tl.cdiv(latest - first, TILE) * TILE, stop), stop)
    full = plain + (stop - plain) // TILE * TILE
    keys, values = _rows(k + head * kh, at, kt, Tk, D, True), _rows(v + head * vh, at, vt, Tk, D, True)
    q, g, sums, dots = q + head * qh, g + head * gh, sums + head.to(tl.int64) * T, dots + head.to(tl.int64) * T
    state = tl.zeros((TILE, D), tl.float32), tl.zeros((TILE, D), tl.float32)
    state = _asked(state, keys, values, q, g, sums, dots, qt, gt, first, plain, begin, end, scale, True)
    state = _asked(state, keys, values, q, g, sums, dots, qt, gt, plain, full, begin, end, scale, False)
    x, y = _asked(state, keys, values, q, g, sums, dots, qt, gt, full, stop, begin, end, scale, True)
    _put(dk, x * natural, at, Tk, h, D)
    _put(dv, y, at, Tk, h, D)


@triton.jit
def _asked(state, k, v, q, g, sums, dots, qt, gt, first, stop, begin, end, scale, MASKED: tl.constexpr):
    """What the queries from first to stop add to the gradients of keys and values."""
    dk, dv = state
    TILE: tl.constexpr = k.shape[0]
    for start in range(first, stop, TILE):
        at = start + tl.arange(0, TILE)
        queries, gradient = _rows(q, at, qt, stop, k.shape[1], MASKED), _rows(g, at, gt, stop, k.shape[1], MASKED)
        if MASKED:
            normal, dot = tl.load(sums + at, at < stop, 0.0), tl.load(dots + at, at < stop, 0.0)
        else:
            normal, dot = tl.load(sums + at), tl.load(dots + at)
        weight = tl.exp2(tl.dot(k, queries.T) * scale - normal[None, :])  # (keys, queries)
        if MASKED:
            weight = tl.where((at[None, :] >= begin[:, None]) & (at[None, :] < end[:, None]), weight, 0.0)
        dv = tl.dot(weight.to(gradient.dtype), gradient, dv)
        slope = weight * (tl.dot(v, gradient.T) - dot[None, :])
        dk = tl.dot(slope.to(queries.dtype), queries, dk)
    return dk, dv


@triton.jit
def _queries(
    q, k, v, g, out, dq, sums, dots, q_bounds, k_bounds, T, Tk, S, scale, natural, qt, qh, kt, kh, vt, vh, gt, gh,
    D: tl.constexpr, CAUSAL: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, h = tl.program_id(1), tl.num_programs(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, end = _window(q_bounds, k_bounds, at, T - 1, S, False, CAUSAL, BITS)
    first, stop, full = _spans(begin, end, TILE)
    queries, gradient = _rows(q + head * qh, at, qt, T, D, True), _rows(g + head * gh, at, gt, T, D, True)
    normal = tl.load(sums + head.to(tl.int64) * T + at, at < T, 0.0)
    found = _rows(out + head * D, at, h * D, T, D, True)
    dot = tl.sum(found.to(tl.float32) * gradient.to(tl.float32), 1)  # of each output with its gradient
    tl.store(dots + head.to(tl.int64) * T + at, dot, at < T)
    k, v = k + head * kh, v + head * vh
    x = tl.zeros((TILE, D), tl.float32)
    x = _looked(x, queries, gradient, normal, dot, k, v, kt, vt, first, full, begin, end, scale, False)
    x = _looked(x, queries, gradient, normal, dot, k, v, kt, vt, full, stop, begin, end, scale, True)
    _put(dq, x * natural, at, T, h, D)


@triton.jit
def _looked(dq, q, g, normal, dot, k, v, kt, vt, first, stop, begin, end, scale, MASKED: tl.constexpr):
    """What the keys from first to stop add to the gradient of queries."""
    TILE: tl.constexpr = q.shape[0]
    for start in range(first, stop, TILE):
        at = start + tl.arange(0, TILE)
        keys, values = _rows(k, at, kt, stop, q.shape[1], MASKED), _rows(v, at, vt, stop, q.shape[1], MASKED)
        weight = tl.exp2(tl.dot(q, keys.T) * scale - normal[:, None])
        if MASKED:
            weight = tl.where((at[None, :] >= begin[:, None]) & (at[None, :] < end[:, None]), weight, 0.0)
        slope = weight * (tl.dot(g, values.T) - dot[:, None])
        dq = tl.dot(slope.to(keys.dtype), keys, dq)
    return dq
