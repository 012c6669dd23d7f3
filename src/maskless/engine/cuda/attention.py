"""Rotary positions, storing of keys and values, and attention to what is stored.

Shapes: T tokens, U targets, S rows of a batch, h heads, d head width, N columns of a cache.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from maskless.problems import Offsets

WARPS, STAGES = 4, 3  # of a program of the attention, the best of nine that were measured on an H200


@triton.jit
def _rotated_halves(x, table, position, head, half, heads, HALF: tl.constexpr):
    """Both halves of the rotated heads of one token."""
    real = (head[:, None] < heads) & (half[None, :] < HALF)
    at = head[:, None] * (2 * HALF) + half[None, :]
    a = tl.load(x + at, real, 0.0).to(tl.float32)
    b = tl.load(x + at + HALF, real, 0.0).to(tl.float32)
    cos = tl.load(table + position * (2 * HALF) + half, half < HALF, 0.0)[None, :]
    sin = tl.load(table + position * (2 * HALF) + HALF + half, half < HALF, 0.0)[None, :]
    return at, real, a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate(
    x, positions, table, token_stride, group_stride, heads, HALF: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = x + token * token_stride + group * group_stride
    position = tl.load(positions + token)
    at, real, a, b = _rotated_halves(base, table, position, tl.arange(0, HEADS), tl.arange(0, W), heads, HALF)
    tl.store(base + at, a, real)
    tl.store(base + at + HALF, b, real)


def rotate_(x: Tensor, positions: Tensor, rope: Tensor) -> None:
    T, groups, heads, d = x.shape
    assert x.stride()[2:] == (d, 1)
    _rotate[(T, groups)](
        x, positions, rope, x.stride(0), x.stride(1), heads,
        HALF=d // 2, HEADS=triton.next_power_of_2(heads), W=triton.next_power_of_2(d // 2), num_warps=2,
    )  # fmt: skip


@triton.jit
def _store(
    kv, positions, table, index, cache, token_stride, group_stride, rows, heads, N,
    HALF: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = kv + token * token_stride + group * group_stride
    place, position = tl.load(index + token), tl.load(positions + token)
    head, half = tl.arange(0, HEADS), tl.arange(0, W)
    at, real, a, b = _rotated_halves(base, table, position, head, half, heads, HALF)
    row, n = place // N, place % N
    side = heads.to(tl.int64) * N * (2 * HALF)  # all columns of a row
    to = cache + (group * 2 * rows + row) * side + (head[:, None] * N + n) * (2 * HALF) + half[None, :]
    tl.store(to, a, real)
    tl.store(to + HALF, b, real)
    values = base + heads * (2 * HALF) + at
    tl.store(to + rows * side, tl.load(values, real), real)
    tl.store(to + rows * side + HALF, tl.load(values + HALF, real), real)


def store(kv: Tensor, positions: Tensor, rope: Tensor, index: Tensor, cache: Tensor) -> None:
    T, groups, _, heads, d = kv.shape
    assert kv.stride()[2:] == (heads * d, d, 1)
    assert cache.is_contiguous()
    _store[(T, groups)](
        kv, positions, rope, index, cache, kv.stride(0), kv.stride(1), cache.shape[2], heads, cache.shape[4],
        HALF=d // 2, HEADS=triton.next_power_of_2(heads), W=triton.next_power_of_2(d // 2), num_warps=2,
    )  # fmt: skip


@triton.jit
def _rotated(x, table, place, real, c, HALF: tl.constexpr):
    """One head of some tokens, rotated.  x (M, 1) pointers -> (M, W)"""
    angle = table + place[:, None] * (2 * HALF) + (c % HALF)[None, :]
    cos, sin = tl.load(angle, real, 0.0), tl.load(angle + HALF, real, 0.0)
    own = tl.load(x + c[None, :], real, 0.0).to(tl.float32)
    partner = tl.load(x + tl.where(c < HALF, c + HALF, c - HALF)[None, :], real, 0.0).to(tl.float32)
    return own * cos + tl.where(c < HALF, -1.0, 1.0)[None, :] * partner * sin


@triton.jit
def _seen(rotated, k, v, visible, scale, most, total, found):
    """What queries gather from some more keys (W, N) and values (N, W), of which they see the visible ones (M, N)."""
    score = tl.where(visible, tl.dot(rotated, k, input_precision="ieee") * scale, float("-inf"))
    new = tl.maximum(most, tl.max(score, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(most - safe)
    p = tl.exp2(score - safe[:, None])
    found = found * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new, total * shrink + tl.sum(p, 1), found


@triton.jit
def _attend(
    q, positions, table, k, v, out, q_bounds, begins, lengths, scale, heads,
    q_stride, row_stride, head_stride, k_stride,
    HALF: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr, FRESH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """FRESH: q is followed by keys and values of its own, which are rotated and stored here, the last of the past."""
    row, head, block = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    first, last = tl.load(q_bounds + row), tl.load(q_bounds + row + 1)
    n = tl.load(lengths + row)
    i = block * M + tl.arange(0, M)
    mine = i < last - first
    if block * M < last - first:
        c, token = tl.arange(0, W), (first + i).to(tl.int64)
        inside = c < 2 * HALF
        real = mine[:, None] & inside[None, :]
        place = tl.load(positions + token, mine, 0)
        q_at = q + token[:, None] * q_stride + head * (2 * HALF)
        rotated = _rotated(q_at, table, place, real, c, HALF).to(q.dtype.element_ty)
        old = n
        if FRESH:
            old = n - (last - first)
        bound = tl.where(mine, old, 0)  # each query sees the keys before this one
        if CAUSAL and not FRESH:
            bound = tl.minimum(bound, n - (last - first) + i + 1)
        base = tl.load(begins + row).to(tl.int64) * row_stride + head * head_stride
        most = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        found = tl.zeros((M, W), tl.float32)
        for j in range(0, old, N):
            key = j + tl.arange(0, N)
            there = (key < old)[:, None] & inside[None, :]
            at = base + key[:, None].to(tl.int64) * k_stride + c[None, :]
            visible = key[None, :] < bound[:, None]
            keys, values = tl.load(k + at, there, 0.0), tl.load(v + at, there, 0.0)
            most, total, found = _seen(rotated, keys.T, values, visible, scale, most, total, found)
        if FRESH:
            own = _rotated(q_at + heads * (2 * HALF), table, place, real, c, HALF).to(q.dtype.element_ty)
            value = tl.load(q_at + 2 * heads * (2 * HALF) + c[None, :], real, 0.0)
            at = base + (old + i)[:, None].to(tl.int64) * k_stride + c[None, :]
            tl.store(k + at, own, real)
            tl.store(v + at, value, real)
            visible = mine[:, None] & mine[None, :]
            if CAUSAL:
                visible = visible & (i[None, :] <= i[:, None])
            most, total, found = _seen(rotated, own.T, value, visible, scale, most, total, found)
        total = tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + token[:, None] * (heads * 2 * HALF) + head * (2 * HALF) + c[None, :], found / total, real)


def attend(
    q: Tensor, positions: Tensor, rope: Tensor, k: Tensor, v: Tensor, offsets: Offsets, past: Any, causal: bool
) -> Tensor:
    return _launch(q, positions, rope, k, v, offsets, past, causal, fresh=False)


def store_and_attend(
    qkv: Tensor, positions: Tensor, rope: Tensor, cache: Tensor, offsets: Offsets, past: Any, causal: bool
) -> Tensor:
    assert qkv.is_contiguous()
    assert cache[0].is_contiguous()
    return _launch(qkv[:, 0], positions, rope, cache[0], cache[1], offsets, past, causal, fresh=True)


def _launch(
    q: Tensor,
    positions: Tensor,
    rope: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Offsets,
    past: Any,
    causal: bool,
    *,
    fresh: bool,
) -> Tensor:
    U, heads, d = q.shape
    assert q.stride()[1:] == (d, 1)
    assert k.stride() == v.stride()
    if k.ndim == 4:  # of a cache (S, h, N, d)
        row_stride, head_stride, k_stride = heads * d, k.stride(1), d
    else:
        row_stride, head_stride, k_stride = k.stride(0), d, k.stride(0)
    out = q.new_empty(U, heads * d)
    M = min(64, max(16, triton.next_power_of_2(offsets.longest)))
    W = max(16, triton.next_power_of_2(d))
    N = max(16, min(128 if M == 16 else 64, 2**14 // (W * q.element_size())))  # keys at a time: what fits on chip
    _attend[(triton.cdiv(offsets.longest, M), heads, len(offsets))](
        q, positions, rope, k, v, out, offsets.bounds, past.begins, past.lengths, d**-0.5 * 1.4426950408889634, heads,
        q.stride(0), row_stride, head_stride, k_stride,
        HALF=d // 2, W=W, CAUSAL=causal, FRESH=fresh, M=M, N=N, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
