"""Exact draws from rows of logits, with temperature, top-k and nucleus.

Few long rows are shared out among programs (`draw_chunks`); where tokens are truncated, a program has a row to itself
(`draw_rows`). Draws write the token into the batch and remember the largest id, so that a step needs no kernels for
that; into: a `kernels.Landing`.

Shapes: U targets, V vocabulary, N flattened batch.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskless.logits import COLDEST

CHUNK = 2048  # vocabulary entries that a program reads at once
LONGEST = 1 << 14  # vocabulary entries that a program can search for a threshold


@triton.jit
def _value(logits, bias, sharp, weight, row, i, V, rows, temperature, SHARP: tl.constexpr, GUIDED: tl.constexpr):
    """Entries i of a row of logits, as they are drawn from; sharp, weight: of this row."""
    value = tl.load(logits + row * V + i, i < V, 0.0)
    if GUIDED:
        without = tl.load(logits + (row + rows) * V + i, i < V, 0.0)
        value += weight * (value - without)
    value += tl.load(bias + i, i < V, float("-inf"))
    if SHARP:
        value *= sharp
    return value / temperature


@triton.jit
def _row_of(at, sharp, weight, row, SHARP: tl.constexpr, GUIDED: tl.constexpr):
    """Place, factor and guidance of a row."""
    place, factor, guidance = tl.load(at + row), 1.0, 0.0
    if SHARP:
        factor = tl.load(sharp + place)
    if GUIDED:
        guidance = tl.load(weight + place)
    return place, factor, guidance


@triton.jit
def _land(tokens, largest, fixed, place, found, vocab, FIXED: tl.constexpr):
    """A token is written into the batch, unless the one there is fixed."""
    open = True
    if FIXED:
        open = tl.load(fixed + place) == 0
    tl.atomic_max(largest, found.to(tl.int64))
    tl.store(tokens + place, tl.minimum(found, vocab - 1).to(tl.int64), open)


@triton.jit
def _weigh(
    logits, bias, sharp, weight, at, tops, sums, V, rows, parts, temperature,
    CHUNK: tl.constexpr, SHARP: tl.constexpr, GUIDED: tl.constexpr,
):  # fmt: skip
    """The greatest logit of a chunk of the vocabulary, and the sum of exponentials below it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, factor, guidance = _row_of(at, sharp, weight, row, SHARP, GUIDED)
    i = part * CHUNK + tl.arange(0, CHUNK)
    value = _value(logits, bias, factor, guidance, row, i, V, rows, temperature, SHARP, GUIDED)
    top = tl.max(value, 0)
    safe = tl.where(top == float("-inf"), 0.0, top).to(tl.float64)
    tl.store(tops + row * parts + part, top)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(value.to(tl.float64) - safe), 0))


@triton.jit
def _pick(
    logits, bias, sharp, weight, at, u, tokens, largest, fixed, tops, sums, vocab, V, rows, parts, temperature,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, SHARP: tl.constexpr, GUIDED: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Where the cumulative sum passes u times the total: first the chunk, then the place in it."""
    row = tl.program_id(0).to(tl.int64)
    place, factor, guidance = _row_of(at, sharp, weight, row, SHARP, GUIDED)
    c = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + c, c < parts, float("-inf"))
    mass = tl.load(sums + row * parts + c, c < parts, 0.0)
    most = tl.max(top, 0).to(tl.float64)
    mass = tl.where(top == float("-inf"), 0.0, mass * tl.exp(top.to(tl.float64) - most))
    whole = tl.sum(mass, 0)  # unlike a maximum it is NaN where a logit is
    running = tl.cumsum(mass, 0)
    total = tl.max(running, 0)
    threshold = tl.load(u + place) * total
    last = tl.max(tl.where(mass > 0, c, 0), 0)
    part = tl.minimum(tl.sum((running <= threshold).to(tl.int32), 0), last)
    before = tl.max(tl.where(c < part, running, 0.0), 0)
    i = part * CHUNK + tl.arange(0, CHUNK)
    value = _value(logits, bias, factor, guidance, row, i, V, rows, temperature, SHARP, GUIDED)
    p = tl.exp(value.to(tl.float64) - most)
    running = before + tl.cumsum(p, 0)
    last = tl.max(tl.where(p > 0, i, 0), 0)
    found = tl.minimum(part * CHUNK + tl.sum((running <= threshold).to(tl.int32), 0), last)
    _land(tokens, largest, fixed, place, tl.where(whole > 0, found, V), vocab, FIXED)


def draw_chunks(logits: Tensor, bias: Tensor, temperature: float, into: Any) -> None:
    U, V = len(into.at), logits.shape[1]
    parts = triton.cdiv(V, CHUNK)
    tops, sums = logits.new_empty(U, parts), logits.new_empty(U, parts, dtype=torch.float64)
    given = logits, bias, into.sharp, into.weight, into.at
    more: dict[str, Any] = {"SHARP": into.sharp is not None, "GUIDED": into.weight is not None, "num_warps": 4}
    _weigh[(U, parts)](*given, tops, sums, V, U, parts, temperature, CHUNK=CHUNK, **more)
    _pick[(U,)](
        *given, into.u, into.tokens, into.largest, into.fixed, tops, sums, into.vocab, V, U, parts,
        temperature, CHUNK=CHUNK, PARTS=triton.next_power_of_2(parts), FIXED=into.fixed is not None, **more,
    )  # fmt: skip


@triton.jit
def mix(x):
    """SplitMix64: the mixing function of `logits.uniforms`."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(key, column, purpose):
    """`logits.uniforms`.  int64 -> float64"""
    bits = mix(mix((key * 8 + purpose).to(tl.uint64)) + column.to(tl.uint64))
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def sortable(value):
    """Whole numbers in the order of these float32."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # there is but one zero
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _level(key, weight, goal):
    """The largest number such that the keys from it on weigh at least the goal."""
    low, high = tl.full((), -(2**31), tl.int64), tl.full((), 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        enough = tl.sum(tl.where(key >= middle, weight, 0.0), 0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _last(key, level, above, weight, goal, i):
    """Of the keys at a level the first ones count, until they weigh the goal together with those above."""
    equal = key == level
    rank = tl.cumsum(equal.to(tl.int32), 0) - 1
    return tl.max(tl.where(equal & (above + rank * weight < goal), i, -1), 0)


@triton.jit
def truncate(value, i, V, k, p, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """Top-k, then nucleus: the smallest key that is kept, and the last place at which that one is.  (BLOCK,)"""
    key, level, last = sortable(value), tl.full((), -(2**31), tl.int32), V
    if TOP_K:
        one = tl.where(i < V, 1.0, 0.0)
        level = _level(key, one, k * 1.0)
        last = _last(key, level, tl.sum(tl.where(key > level, one, 0.0), 0), 1.0, k * 1.0, i)
    if TOP_P:
        kept = (key > level) | ((key == level) & (i <= last))
        top = tl.max(tl.where(kept, value, float("-inf")), 0)
        mass = tl.where(kept & (i < V), tl.exp(value - top), 0.0)
        goal = p * tl.sum(mass, 0)
        level = _level(key, mass, goal)
        above = tl.sum(tl.where(key > level, mass, 0.0), 0)
        each = tl.max(tl.where(key == level, mass, 0.0), 0)
        last = _last(key, level, above, each, goal, tl.where(kept, i, -1))
    return level, last


@triton.jit
def kept(value, i, level, last):
    """Values, and -inf for what truncation leaves out."""
    key = sortable(value)
    return tl.where((key > level) | ((key == level) & (i <= last)), value, float("-inf"))


@triton.jit
def _rows(
    logits, bias, sharp, weight, at, u, tokens, largest, fixed, vocab, V, rows, temperature, k, p,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    SHARP: tl.constexpr, GUIDED: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place, factor, guidance = _row_of(at, sharp, weight, row, SHARP, GUIDED)
    i = tl.arange(0, BLOCK)
    value = _value(logits, bias, factor, guidance, row, i, V, rows, temperature, SHARP, GUIDED)
    level, last = truncate(value, i, V, k, p, TOP_K, TOP_P)
    value = kept(value, i, level, last)
    p_of = tl.exp(value.to(tl.float64) - tl.max(value, 0).to(tl.float64))
    whole, running = tl.sum(p_of, 0), tl.cumsum(p_of, 0)
    threshold = tl.load(u + place) * tl.max(running, 0)
    likely = tl.max(tl.where(p_of > 0, i, 0), 0)
    found = tl.minimum(tl.sum((running <= threshold).to(tl.int32), 0), likely)
    _land(tokens, largest, fixed, place, tl.where(whole > 0, found, V), vocab, FIXED)


def draw_rows(logits: Tensor, bias: Tensor, filter: Any, into: Any) -> None:
    U, V = len(into.at), logits.shape[1]
    block = triton.next_power_of_2(V)
    _rows[(U,)](
        logits, bias, into.sharp, into.weight, into.at, into.u, into.tokens, into.largest, into.fixed,
        into.vocab, V, U, *settings_of(filter, V), BLOCK=block, **switches_of(filter),
        SHARP=into.sharp is not None, GUIDED=into.weight is not None, FIXED=into.fixed is not None,
        num_warps=warps_of(block),
    )  # fmt: skip


def settings_of(filter: Any, V: int) -> tuple[float, int, float]:
    """Temperature, k and p; no temperature at all leaves the likeliest token only."""
    cold = filter.temperature < COLDEST
    k = 1 if cold else min(filter.top_k or 1, V)
    return 1.0 if cold else filter.temperature, k, filter.top_p or 1.0


def switches_of(filter: Any) -> dict[str, bool]:
    top_k = filter.top_k is not None or filter.temperature < COLDEST
    return {"TOP_K": top_k, "TOP_P": filter.top_p is not None and filter.top_p < 1}


def warps_of(block: int) -> int:
    return max(1, min(16, block // 512))
