"""Attention over packed segments, with rotary positions.

Shapes: S segments, Tq and Tk packed queries and keys, h heads, d head width.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, float32

TILE = 64  # queries or keys: the best of six measured on an H200, for each of the kernels
TOKENS = 4  # that a program rotates


def attend(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: Tensor, k_bounds: Tensor, seen: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """As `attention.attention`, without gradients; and each query's log2 of the sum of weights.

    Tiles lie on the packed arrays as a whole. One that spans a boundary sees the other side of both segments through a
    mask; within a segment only its end needs one. What no query of a tile sees is skipped.

    q (Tq, h, d), k and v (Tk, h, d), seen (Tq,) how many keys of its segment each query sees -> as q, (h, Tq)
    """
    T, h, d = q.shape
    out, sums = q.new_empty(T, h, d), q.new_empty(h, T, dtype=float32)
    ends, strides = (q_bounds, k_bounds, seen, T, len(q_bounds) - 1), _strides(q, k, v)
    meta = _meta(q, q_bounds, causal, seen)
    _attend[(triton.cdiv(T, TILE), h)](q, k, v, out, sums, *ends, d**-0.5 / math.log(2), *strides, **meta, num_stages=3)
    return out, sums


@torch.library.custom_op("maskless::attend_rotated", mutates_args=())
def attend_rotated(
    x: Tensor,
    memory: Tensor | None,
    q_rope: Tensor,
    k_rope: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    seen: Tensor | None,
    askers: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `attention.rotary_attention`; and what its gradient needs: sums, and queries and keys after RoPE.

    seen (Tq,) and askers (Tk,): of stairs.  -> (Tq, h, d), (h, Tq), (Tq, h, d), (Tk, h, d)
    """
    q, k, v = parts(x, memory)
    q, k = _rotated(q, q_rope), _rotated(k, k_rope)
    return *attend(q, k, v, q_bounds, k_bounds, seen, causal), q, k


def parts(x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, of one array or of two: (T, 3, h, d), or (Tq, 1, h, d) and (Tk, 2, h, d)."""
    q, k, v = (*x.unbind(1), *(() if memory is None else memory.unbind(1)))
    return q, k, v


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    (T, h, d), (xt, xh) = x.shape, _strides(x)
    out = x.new_empty(T, h, d)
    _rotate[(triton.cdiv(T, TOKENS),)](x, rope, out, T, xt, xh, h, triton.next_power_of_2(h), d, TOKENS, num_warps=4)
    return out


@torch.library.custom_op("maskless::attend_rotated_backward", mutates_args=())
def attend_rotated_backward(
    g: Tensor,
    x: Tensor,
    memory: Tensor | None,
    q: Tensor,
    k: Tensor,
    out: Tensor,
    sums: Tensor,
    q_rope: Tensor,
    k_rope: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    seen: Tensor | None,
    askers: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, if there is one, of the memory, written where they belong; q and k are after RoPE.

    Gradients of queries and keys are rotated back on the way.
    """
    (T, h, d), Tk, v = q.shape, len(k), parts(x, memory)[2]
    dx = x.new_empty(x.shape)
    d_memory = x.new_empty(0 if memory is None else memory.shape)
    dq, dk, dv = parts(dx, None if memory is None else d_memory)
    dots, scale, strides = torch.empty_like(sums), d**-0.5, _strides(q, k, v, g)
    meta, q_grid, k_grid = _meta(q, q_bounds, causal, seen), (triton.cdiv(T, TILE), h), (triton.cdiv(Tk, TILE), h)
    ends, sizes = (q_bounds, k_bounds), (T, Tk, len(q_bounds) - 1)
    rest = *sizes, scale / math.log(2), scale, *strides
    # It finds the dots of outputs and their gradients, which come next.
    _queries[q_grid](q, k, v, g, out, dq, sums, dots, q_rope, dq.stride(0), *ends, seen, *rest, **meta, num_stages=3)
    # With 168 registers three programs share a multiprocessor, which makes them a tenth faster.
    how = {"num_stages": 2, "maxnreg": 168}
    _keys[k_grid](q, k, v, g, dk, dv, sums, dots, k_rope, dk.stride(0), *ends, askers, *rest, **how, **meta)
    return dx, d_memory


def _strides(*parts: Tensor) -> list[int]:
    """From token to token and from head to head."""
    assert all(x.stride(2) == 1 for x in parts), "the width of a head must be contiguous"
    return [x.stride(i) for x in parts for i in (0, 1)]


def _meta(q: Tensor, bounds: Tensor, causal: bool, seen: Tensor | None) -> dict[str, Any]:
    bits = len(bounds).bit_length()  # how often a bisection halves the segments
    modes = {"CAUSAL": causal, "STAIRS": seen is not None}
    return {"D": q.shape[2], **modes, "BITS": bits, "TILE": TILE, "num_warps": 4}


@attend_rotated.register_fake
def _(x, memory, *_):
    (T, _, h, d), Tk = x.shape, (x if memory is None else memory).shape[0]  # `len` would fix it in what is compiled
    return x.new_empty(T, h, d), x.new_empty(h, T, dtype=float32), x.new_empty(T, h, d), x.new_empty(Tk, h, d)


@attend_rotated_backward.register_fake
def _(g, x, memory, *_):
    return x.new_empty(x.shape), x.new_empty(0 if memory is None else memory.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, memory, *others, ctx.causal = inputs
    out, sums, q, k = output
    ctx.save_for_backward(x, memory, q, k, out, sums, *others)


def _gradients(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    g = g if g.stride(2) == 1 else g.contiguous()
    x, memory, *others = ctx.saved_tensors
    dx, d_memory = attend_rotated_backward(g, x, memory, *others, ctx.causal)
    return dx, None if memory is None else d_memory, *[None] * 7


attend_rotated.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def _window(
    own, others, stairs, at, last, S, KEYS: tl.constexpr, CAUSAL: tl.constexpr, STAIRS: tl.constexpr, BITS: tl.constexpr
):
    """Where begins and ends what each query attends to or, for KEYS, what attends to each key.

    own, others: bounds of the segments on both sides; places beyond the last one count as the last.
    stairs: how many keys each query sees or, for KEYS, the first query that sees each.
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
    if STAIRS:
        if KEYS:
            begin = tl.load(stairs + at)
        else:
            end = begin + tl.load(stairs + at)
    return begin, end


@triton.jit
def _rows(x, at, stride, stop, D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a packed array, zeros from `stop` on."""
    rows = x + at.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(rows, at[:, None] < stop, 0.0) if MASKED else tl.load(rows)


@triton.jit
def _put(x, values, at, stride, stop, D: tl.constexpr):
    """Rows of one head, which lie side by side with those of the others."""
    to = x + at.to(tl.int64)[:, None] * stride + tl.program_id(1) * D + tl.arange(0, D)[None, :]
    tl.store(to, values.to(x.dtype.element_ty), at[:, None] < stop)


@triton.jit
def _put_back(x, values, rope, at, stride, stop, D: tl.constexpr):
    """The same of gradients, rotated back by the angles that what they belong to was rotated by."""
    half: tl.constexpr = D // 2
    real, columns = at[:, None] < stop, tl.arange(0, half)[None, :]
    a, b = tl.split(values.reshape(values.shape[0], 2, half).permute(0, 2, 1))
    angle = rope + at.to(tl.int64)[:, None] * D + columns
    cos, sin = tl.load(angle, real, 0.0), tl.load(angle + half, real, 0.0)
    to = x + at.to(tl.int64)[:, None] * stride + tl.program_id(1) * D + columns
    tl.store(to, (a * cos + b * sin).to(x.dtype.element_ty), real)
    tl.store(to + half, (b * cos - a * sin).to(x.dtype.element_ty), real)


@triton.jit
def _rotate(
    x, rope, out, T, xt, xh, h, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Queries or keys after RoPE, halves of a head paired, into a contiguous array."""
    half: tl.constexpr = D // 2
    at = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]
    head, column = tl.arange(0, HEADS)[None, :, None], tl.arange(0, half)[None, None, :]
    real = (at < T) & (head < h) & (column < half)
    angle = rope + at * D + column
    cos, sin = tl.load(angle, at < T, 0.0), tl.load(angle + half, at < T, 0.0)  # (tokens, 1, half)
    source, to = x + at * xt + head * xh + column, out + (at * h + head) * D + column
    a, b = tl.load(source, real, 0.0).to(tl.float32), tl.load(source + half, real, 0.0).to(tl.float32)
    tl.store(to, (a * cos - b * sin).to(out.dtype.element_ty), real)
    tl.store(to + half, (b * cos + a * sin).to(out.dtype.element_ty), real)


@triton.jit
def _attend(
    q, k, v, out, sums, q_bounds, k_bounds, stairs, T, S, scale, qt, qh, kt, kh, vt, vh,
    D: tl.constexpr, CAUSAL: tl.constexpr, STAIRS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, end = _window(q_bounds, k_bounds, stairs, at, T - 1, S, False, CAUSAL, STAIRS, BITS)
    first, stop, full = _spans(begin, end, TILE)
    queries = _rows(q + head * qh, at, qt, T, D, True)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    state = tl.zeros((TILE, D), tl.float32), tl.zeros((TILE,), tl.float32), top
    state = _seen(state, queries, k + head * kh, v + head * vh, kt, vt, first, full, begin, end, scale, False)
    found, total, top = _seen(state, queries, k + head * kh, v + head * vh, kt, vt, full, stop, begin, end, scale, True)
    some = total > 0
    _put(out, found * tl.where(some, 1 / total, 0.0)[:, None], at, tl.num_programs(1) * D, T, D)
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
    q, k, v, g, dk, dv, sums, dots, rope, stride, q_bounds, k_bounds, stairs, T, Tk, S, scale, natural,
    qt, qh, kt, kh, vt, vh, gt, gh,
    D: tl.constexpr, CAUSAL: tl.constexpr, STAIRS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, end = _window(k_bounds, q_bounds, stairs, at, Tk - 1, S, True, CAUSAL, STAIRS, BITS)
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
    _put_back(dk, x * natural, rope, at, stride, Tk, D)
    _put(dv, y, at, stride, Tk, D)


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
    q, k, v, g, out, dq, sums, dots, rope, stride, q_bounds, k_bounds, stairs, T, Tk, S, scale, natural,
    qt, qh, kt, kh, vt, vh, gt, gh,
    D: tl.constexpr, CAUSAL: tl.constexpr, STAIRS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head, h = tl.program_id(1), tl.num_programs(1)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    begin, end = _window(q_bounds, k_bounds, stairs, at, T - 1, S, False, CAUSAL, STAIRS, BITS)
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
    _put_back(dq, x * natural, rope, at, stride, T, D)


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
