"""Triton kernels of the engine; loaded only where Triton is, which comes with torch's builds for CUDA.

Shapes: T tokens, U targets, S rows of a batch, D width, h heads, d head width, V vocabulary, N columns of a cache.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskless.problems import Offsets

CHUNK = 2048  # vocabulary entries that one program of the draw reads
FEW = 4096  # tokens below which a norm gives each of them a program of its own
BLOCK = 4096  # whole numbers that one program of the digest reads
WARPS, STAGES = 4, 3  # of a program of the attention, the best of nine that were measured on an H200


@triton.jit
def _normalise(x, offset, out, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < D
    value = tl.load(x + row * D + i, real, 0.0).to(tl.float32)
    value += tl.load(offset + i, real, 0.0)
    mean = tl.sum(value, 0) / D
    centred = tl.where(real, value - mean, 0.0)
    value = centred * (1 / tl.sqrt(tl.sum(centred * centred, 0) / D + 1e-5))
    tl.store(out + row * D + i, value, real)


def normalise(x: Tensor, offset: Tensor) -> Tensor:
    T, D = x.shape
    out, block = torch.empty_like(x), triton.next_power_of_2(D)
    _normalise[(T,)](x, offset, out, D, BLOCK=block, num_warps=4 if block > 512 else 2)
    return out


@triton.jit
def _modulate(
    x, y, gate, shift, scale, which, bounds, out, D, gate_stride, stride,
    JOIN: tl.constexpr, CENTRED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """R tokens of one row of the batch, which share their modulation."""
    row = tl.program_id(1)
    last = tl.load(bounds + row + 1)
    begin = tl.load(bounds + row) + tl.program_id(0) * R
    if begin < last:
        token, i = begin + tl.arange(0, R), tl.arange(0, BLOCK)
        inside = i < D
        real = (token < last)[:, None] & inside[None, :]
        at = token[:, None].to(tl.int64) * D + i[None, :]
        place = tl.load(which + row).to(tl.int64)
        value = tl.load(x + at, real, 0.0).to(tl.float32)
        if JOIN:
            share = tl.load(gate + place * gate_stride + i, inside, 0.0)
            value += share[None, :] * tl.load(y + at, real, 0.0).to(tl.float32)
            tl.store(x + at, value, real)
        if CENTRED:
            value = tl.where(real, value - (tl.sum(value, 1) / D)[:, None], 0.0)
        size = 1 / tl.sqrt(tl.sum(value * value, 1) / D + 1e-5)
        factor = tl.load(scale + place * stride + i, inside, 0.0)[None, :]
        term = tl.load(shift + place * stride + i, inside, 0.0)[None, :]
        value = value * size[:, None] * factor + term
        tl.store(out + at, value, real)


def modulate(x: Tensor, more: tuple[Tensor, Tensor] | None, how: Any) -> Tensor:
    D, (shift, scale, which, span, centred) = x.shape[1], how
    y, gate = more or (x, scale)
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert shift.stride() == scale.stride()
    assert shift.stride(1) == gate.stride(1) == 1
    out, R = torch.empty_like(x), 4 if span.total >= FEW else 1
    _modulate[(triton.cdiv(span.longest, R), len(span))](
        x, y, gate, shift, scale, which, span.bounds, out, D, gate.stride(0), shift.stride(0),
        JOIN=more is not None, CENTRED=centred, R=R, BLOCK=triton.next_power_of_2(D), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rms(x, token_stride, group_stride, D, BLOCK: tl.constexpr):
    base = x + tl.program_id(0).to(tl.int64) * token_stride + tl.program_id(1) * group_stride
    i = tl.arange(0, BLOCK)
    value = tl.load(base + i, i < D, 0.0).to(tl.float32)
    tl.store(base + i, value / tl.sqrt(tl.sum(value * value, 0) / D + 1e-5), i < D)


def rms_(x: Tensor) -> None:
    T, groups, D = x.shape
    assert x.stride(2) == 1
    _rms[(T, groups)](x, x.stride(0), x.stride(1), D, BLOCK=triton.next_power_of_2(D), num_warps=4)


@triton.jit
def _swiglu(x, out, H, BLOCK: tl.constexpr):
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + token * (2 * H) + i, i < H, 0.0).to(tl.float32)
    value = tl.load(x + token * (2 * H) + H + i, i < H, 0.0).to(tl.float32)
    tl.store(out + token * H + i, gate * tl.sigmoid(gate) * value, i < H)


def swiglu(x: Tensor) -> Tensor:
    T, H = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    out = x.new_empty(T, H)
    _swiglu[(T, triton.cdiv(H, 1024))](x, out, H, BLOCK=1024, num_warps=4)
    return out


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
def _attend(
    q, positions, table, k, v, out, q_bounds, begins, lengths, scale, heads,
    q_stride, row_stride, head_stride, k_stride,
    HALF: tl.constexpr, W: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
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
        angle = table + place[:, None] * (2 * HALF) + (c % HALF)[None, :]
        cos, sin = tl.load(angle, real, 0.0), tl.load(angle + HALF, real, 0.0)
        q_at = q + token[:, None] * q_stride + head * (2 * HALF)
        own = tl.load(q_at + c[None, :], real, 0.0).to(tl.float32)
        partner = tl.load(q_at + tl.where(c < HALF, c + HALF, c - HALF)[None, :], real, 0.0).to(tl.float32)
        rotated = own * cos + tl.where(c < HALF, -1.0, 1.0)[None, :] * partner * sin
        rotated = rotated.to(q.dtype.element_ty)
        bound = tl.where(mine, n, 0)  # each query sees the keys before this one
        if CAUSAL:
            bound = tl.minimum(bound, n - (last - first) + i + 1)
        base = tl.load(begins + row).to(tl.int64) * row_stride + head * head_stride
        most = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        found = tl.zeros((M, W), tl.float32)
        for j in range(0, n, N):
            key = j + tl.arange(0, N)
            there = (key < n)[:, None] & inside[None, :]
            at = base + key[:, None].to(tl.int64) * k_stride + c[None, :]
            score = tl.dot(rotated, tl.load(k + at, there, 0.0).T, input_precision="ieee") * scale
            score = tl.where(key[None, :] < bound[:, None], score, float("-inf"))
            new = tl.maximum(most, tl.max(score, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            shrink = tl.exp2(most - safe)
            p = tl.exp2(score - safe[:, None])
            total = total * shrink + tl.sum(p, 1)
            weight = p.to(q.dtype.element_ty)
            found = found * shrink[:, None] + tl.dot(weight, tl.load(v + at, there, 0.0), input_precision="ieee")
            most = new
        total = tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + token[:, None] * (heads * 2 * HALF) + head * (2 * HALF) + c[None, :], found / total, real)


def attend(
    q: Tensor, positions: Tensor, rope: Tensor, k: Tensor, v: Tensor, offsets: Offsets, past: Any, causal: bool
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
        HALF=d // 2, W=W, CAUSAL=causal, M=M, N=N, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


@triton.jit
def _value(logits, bias, sharp, weight, row, i, V, rows, temperature, SHARP: tl.constexpr, GUIDED: tl.constexpr):
    """Entries i of a row of logits, as they are drawn from."""
    value = tl.load(logits + row * V + i, i < V, 0.0)
    if GUIDED:
        without = tl.load(logits + (row + rows) * V + i, i < V, 0.0)
        value += tl.load(weight + row) * (value - without)
    value += tl.load(bias + i, i < V, float("-inf"))
    if SHARP:
        value *= tl.load(sharp + row)
    return value / temperature


@triton.jit
def _weigh(
    logits, bias, sharp, weight, tops, sums, V, rows, parts, temperature,
    CHUNK: tl.constexpr, SHARP: tl.constexpr, GUIDED: tl.constexpr,
):  # fmt: skip
    """The greatest logit of a chunk of the vocabulary, and the sum of exponentials below it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * CHUNK + tl.arange(0, CHUNK)
    value = _value(logits, bias, sharp, weight, row, i, V, rows, temperature, SHARP, GUIDED)
    top = tl.max(value, 0)
    safe = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
    tl.store(tops + row * parts + part, top)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(value.to(tl.float64) - safe), 0))


@triton.jit
def _pick(
    logits, bias, sharp, weight, tops, sums, u, drawn, V, rows, parts, temperature,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, SHARP: tl.constexpr, GUIDED: tl.constexpr,
):  # fmt: skip
    """Where the cumulative sum passes u times the total: first the chunk, then the place in it."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + c, c < parts, float("-inf"))
    mass = tl.load(sums + row * parts + c, c < parts, 0.0)
    most = tl.max(top, 0).to(tl.float64)
    mass = tl.where(top == float("-inf"), 0.0, mass * tl.exp(top.to(tl.float64) - most))
    whole = tl.sum(mass, 0)  # unlike a maximum it is NaN where a logit is
    running = tl.cumsum(mass, 0)
    total = tl.max(running, 0)
    threshold = tl.load(u + row) * total
    last = tl.max(tl.where(mass > 0, c, 0), 0)
    part = tl.minimum(tl.sum((running <= threshold).to(tl.int32), 0), last)
    before = tl.max(tl.where(c < part, running, 0.0), 0)
    i = part * CHUNK + tl.arange(0, CHUNK)
    value = _value(logits, bias, sharp, weight, row, i, V, rows, temperature, SHARP, GUIDED)
    p = tl.exp(value.to(tl.float64) - most)
    running = before + tl.cumsum(p, 0)
    last = tl.max(tl.where(p > 0, i, 0), 0)
    found = tl.minimum(part * CHUNK + tl.sum((running <= threshold).to(tl.int32), 0), last)
    tl.store(drawn + row, tl.where(whole > 0, found, V).to(tl.int64))


def draw(
    logits: Tensor, bias: Tensor, temperature: float, u: Tensor, sharp: Tensor | None, weight: Tensor | None
) -> Tensor:
    U, V = len(u), logits.shape[1]
    parts = triton.cdiv(V, CHUNK)
    tops, sums = logits.new_empty(U, parts), logits.new_empty(U, parts, dtype=torch.float64)
    drawn = torch.empty(U, dtype=torch.int64, device=logits.device)
    given = logits, bias, sharp, weight, tops, sums
    more: dict[str, Any] = {"CHUNK": CHUNK, "SHARP": sharp is not None, "GUIDED": weight is not None, "num_warps": 4}
    _weigh[(U, parts)](*given, V, U, parts, temperature, **more)
    PARTS = triton.next_power_of_2(parts)
    _pick[(U,)](*given, u, drawn, V, U, parts, temperature, PARTS=PARTS, **more)
    return drawn


@triton.jit
def _digest(starts, lengths, out, BLOCK: tl.constexpr):
    """The sum of a block of whole numbers, each times an odd number that tells its place, modulo 2^64."""
    block, i = tl.program_id(0), tl.arange(0, BLOCK)
    numbers = tl.load(starts + block).to(tl.pointer_type(tl.int32))
    value = tl.load(numbers + i, i < tl.load(lengths + block), 0).to(tl.int64)
    tl.store(out + block, tl.sum(value * (2 * i + 1), 0))


def digest(weights: Sequence[Tensor]) -> Tensor:
    starts, lengths = _blocks(tuple((weight.data_ptr(), weight.nbytes) for weight in weights), weights[0].device)
    out = torch.empty_like(starts)
    _digest[(len(starts),)](starts, lengths, out, BLOCK=BLOCK, num_warps=4)
    return out


@lru_cache(maxsize=8)
def _blocks(weights: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each block of weights (address, bytes) begins, and how many whole numbers it has."""
    begins = [(start + 4 * begin, size // 4 - begin) for start, size in weights for begin in range(0, size // 4, BLOCK)]
    starts, lengths = torch.tensor(begins, dtype=torch.long).view(-1, 2).T.contiguous()
    return starts.to(device), lengths.clamp_max(BLOCK).to(device)
