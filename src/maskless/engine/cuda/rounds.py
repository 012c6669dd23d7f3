"""Exact rounds: drafts are drawn, and checked as a chain, by a kernel each.

What truncation leaves of a row of logits is told by two whole numbers, the smallest kept value and the last place of
it; a distribution, by its largest value and the sum of exponentials below it. So nothing as wide as the vocabulary is
written.

Shapes: B rows, k drafted tokens of a row, U = B*k targets, V vocabulary, N flattened batch.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskless.draw import DRAW
from maskless.engine.cuda.draw import CHUNK, kept, settings_of, switches_of, truncate, uniform, warps_of
from maskless.speculation import ACCEPT, RESIDUAL


@dataclass(frozen=True)
class Drafting:
    """Rows that draw and check k tokens each, at these places of the flattened batch."""

    at: Tensor  # (U,)
    k: int
    order: Tensor  # (N,) positions
    places: int  # positions before that of the first token
    tokens: Tensor  # (N,)
    keys: Tensor  # (B,)
    taken: Tensor  # (B,) rounds that a row has behind it
    bias: Tensor  # (V,) of the logits
    never: Tensor  # (V,) 0, and -inf for ids that are not drawn
    vocab: int  # V, of rows of logits that may be filled up
    filter: Any


@dataclass(frozen=True)
class Law:
    """Distributions from which tokens are drawn: the logits (U, V), and what was found out about each row of them."""

    logits: Tensor
    levels: Tensor  # (U, 2) int32, what truncation leaves
    sums: Tensor  # (U, 3) float64: largest value, sum of exponentials, and log of the sum of all, untouched

    @staticmethod
    def of(logits: Tensor) -> Law:
        U = len(logits)
        levels = torch.empty(U, 2, dtype=torch.int32, device=logits.device)
        return Law(logits, levels, torch.empty(U, 3, dtype=torch.float64, device=logits.device))


@triton.jit
def _entries(logits, bias, never, row, i, V, temperature, level, last, CUT: tl.constexpr):
    """Entries i of a row: as the network gives them, and as they are drawn from."""
    raw = tl.load(logits + row * V + i, i < V, 0.0) + tl.load(bias + i, i < V, float("-inf"))
    value = (raw + tl.load(never + i, i < V, 0.0)) / temperature
    if CUT:
        value = kept(value, i, level, last)
    return raw, value


@triton.jit
def _joined(top, total, value):
    """A largest value and a sum of exponentials, with some more values."""
    new = tl.maximum(top, tl.max(value, 0))
    safe = tl.where(new == float("-inf"), 0.0, new).to(tl.float64)
    return new, total * tl.exp(top.to(tl.float64) - safe) + tl.sum(tl.exp(value.to(tl.float64) - safe), 0)


@triton.jit
def _draft(
    logits, bias, never, levels, sums, at, order, keys, taken, tokens, largest, vocab, V, k, places,
    temperature, top_k, top_p,
    DRAWS: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """What there is to know of a row; with DRAWS a token is drawn from it too."""
    row = tl.program_id(0).to(tl.int64)
    CUT: tl.constexpr = TOP_K or TOP_P
    level, last = tl.full((), -(2**31), tl.int32), V
    if CUT:
        all_i = tl.arange(0, BLOCK)
        _raw, all_values = _entries(logits, bias, never, row, all_i, V, temperature, level, last, False)
        level, last = truncate(all_values, all_i, V, top_k, top_p, TOP_K, TOP_P)
        tl.store(levels + 2 * row, level)
        tl.store(levels + 2 * row + 1, last)
    top, all_top = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    total, all_total = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for begin in range(0, V, CHUNK):
        raw, value = _entries(logits, bias, never, row, begin + tl.arange(0, CHUNK), V, temperature, level, last, CUT)
        top, total = _joined(top, total, value)
        all_top, all_total = _joined(all_top, all_total, raw)
    tl.store(sums + 3 * row, top.to(tl.float64))
    tl.store(sums + 3 * row + 1, total)
    tl.store(sums + 3 * row + 2, all_top.to(tl.float64) + tl.log(all_total))
    if DRAWS:
        place, owner = tl.load(at + row), row // k
        column = tl.load(order + place) - places + (tl.load(taken + owner) << 32)
        threshold = uniform(tl.load(keys + owner), column, PURPOSE) * total
        running, found, likely = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for begin in range(0, V, CHUNK):
            i = begin + tl.arange(0, CHUNK)
            _, value = _entries(logits, bias, never, row, i, V, temperature, level, last, CUT)
            p = tl.exp(value.to(tl.float64) - top.to(tl.float64))
            found += tl.sum((running + tl.cumsum(p, 0) <= threshold).to(tl.int32), 0)
            running += tl.sum(p, 0)
            likely = tl.maximum(likely, tl.max(tl.where(p > 0, i, 0), 0))
        found = tl.where(total > 0, tl.minimum(found, likely), V)
        tl.atomic_max(largest, found.to(tl.int64))
        tl.store(tokens + place, tl.minimum(found, vocab - 1).to(tl.int64))


def draft(logits: Tensor, largest: Tensor, of: Drafting, *, draws: bool) -> Law:
    """The law of each row of logits (U, V); draws: and a token from it, which is written into the batch."""
    law, V = Law.of(logits), logits.shape[1]
    block = triton.next_power_of_2(V)
    cuts = switches_of(of.filter)
    _draft[(len(logits),)](
        logits, of.bias, of.never, law.levels, law.sums, of.at, of.order, of.keys, of.taken, of.tokens, largest,
        of.vocab, V, of.k, of.places, *settings_of(of.filter, V),
        DRAWS=draws, PURPOSE=DRAW, BLOCK=block, CHUNK=min(block, CHUNK), **cuts,
        num_warps=warps_of(block) if any(cuts.values()) else 4,
    )  # fmt: skip
    return law


@triton.jit
def _chance(logits, bias, never, levels, sums, row, token, V, temperature, real, CUT: tl.constexpr):
    """log p of a token of each row as it is drawn, and as the network gives it.  (KP,) -> (KP,), (KP,) float64"""
    raw = tl.load(logits + row * V + token, real, 0.0) + tl.load(bias + token, real, 0.0)
    value = (raw + tl.load(never + token, real, 0.0)) / temperature
    if CUT:
        value = kept(value, token, tl.load(levels + 2 * row, real, 0), tl.load(levels + 2 * row + 1, real, 0))
    top, total = tl.load(sums + 3 * row, real, 0.0), tl.load(sums + 3 * row + 1, real, 1.0)
    return value.to(tl.float64) - top - tl.log(total), raw.to(tl.float64) - tl.load(sums + 3 * row + 2, real, 0.0)


@triton.jit
def _share(logits, bias, never, levels, sums, row, i, V, temperature, CUT: tl.constexpr):
    """The probabilities of entries i of one row."""
    level, last = tl.full((), -(2**31), tl.int32), V
    if CUT:
        level, last = tl.load(levels + 2 * row), tl.load(levels + 2 * row + 1)
    _, value = _entries(logits, bias, never, row, i, V, temperature, level, last, CUT)
    return tl.exp(value.to(tl.float64) - tl.load(sums + 3 * row)) / tl.load(sums + 3 * row + 1)


@triton.jit
def _accept(
    p, p_levels, p_sums, q, q_levels, q_sums, bias, never, at, order, keys, taken, tokens,
    known, ends, came, chance, figures, largest, vocab, V, k, places, temperature,
    ACCEPT: tl.constexpr, RESIDUAL: tl.constexpr, KP: tl.constexpr, CHUNK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """`speculation.accept` for one row, and its figures."""
    b = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, KP)
    real, later = j < k, (j < k) & (j > 0)
    place = tl.load(at + b * k + j, real, 0)
    rounds, key = tl.load(taken + b), tl.load(keys + b)
    column = tl.load(order + place, real, 0) - places + (rounds << 32)
    start = tl.load(known + b) - (k - 1)
    length = tl.minimum(tl.maximum(tl.load(ends + b).to(tl.int32) - start, 0), k)
    drawn = tl.load(tokens + place, real, 0)
    before, first = _chance(p, bias, never, p_levels, p_sums, b * k + j, drawn, V, temperature, real, CUT)
    of_q = b * (k - 1) + j - 1
    after, _ = _chance(q, bias, never, q_levels, q_sums, of_q, drawn, V, temperature, later, CUT)
    ratio = tl.where(later, tl.exp(after - before), 1.0)
    stands = ((uniform(key, column, ACCEPT) < ratio) | (j == 0)) & (j < length)
    accepted = tl.min(tl.where(stands, KP, j), 0)
    found = tl.full((), 0, tl.int32)
    if accepted < length:  # the first of a draft always stands, so this is not the first
        p_row, q_row = b * k + accepted, b * (k - 1) + accepted - 1
        lacking, whole = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        for begin in range(0, V, CHUNK):
            i = begin + tl.arange(0, CHUNK)
            instead = _share(q, bias, never, q_levels, q_sums, q_row, i, V, temperature, CUT)
            own = _share(p, bias, never, p_levels, p_sums, p_row, i, V, temperature, CUT)
            lacking += tl.sum(tl.maximum(instead - own, 0.0), 0)
            whole += tl.sum(instead, 0)
        own_share = tl.where(lacking > 0, 1.0, 0.0)  # equal but for rounding: then all of q
        total = tl.where(lacking > 0, lacking, whole)
        here = tl.sum(tl.where(j == accepted, column, 0), 0)
        threshold = uniform(key, here, RESIDUAL) * total
        running, likely = tl.full((), 0.0, tl.float64), tl.full((), 0, tl.int32)
        for begin in range(0, V, CHUNK):
            i = begin + tl.arange(0, CHUNK)
            instead = _share(q, bias, never, q_levels, q_sums, q_row, i, V, temperature, CUT)
            own = _share(p, bias, never, p_levels, p_sums, p_row, i, V, temperature, CUT)
            mass = tl.maximum(instead - own_share * own, 0.0)
            found += tl.sum((running + tl.cumsum(mass, 0) <= threshold).to(tl.int32), 0)
            running += tl.sum(mass, 0)
            likely = tl.maximum(likely, tl.max(tl.where(mass > 0, i, 0), 0))
        found = tl.where(total > 0, tl.minimum(found, likely), V)
    decided = tl.minimum(accepted + 1, length)
    token = tl.where(j == accepted, found.to(tl.int64), drawn)
    written = j < decided
    tl.atomic_max(largest, tl.max(tl.where(written, token, 0), 0))
    token = tl.minimum(token, vocab - 1)
    _, instead = _chance(q, bias, never, q_levels, q_sums, of_q, token, V, temperature, later, CUT)
    tl.store(tokens + place, token, written)
    tl.store(came + place, tl.zeros((KP,), tl.int64) + rounds, written)
    tl.store(chance + place, tl.exp(tl.where(j == 0, first, instead)), written)
    tl.store(known + b, start + decided)
    tl.store(taken + b, rounds + (length > 0).to(tl.int64))
    tl.atomic_add(figures, (length > 0).to(tl.float64))
    tl.atomic_add(figures + 1, length.to(tl.float64))
    tl.atomic_add(figures + 2, accepted.to(tl.float64))
    tl.atomic_add(figures + 3, decided.to(tl.float64))
    tl.atomic_add(figures + 4, tl.sum(tl.where(later & (j < length), before - after, 0.0), 0))


def accept(
    p: Law, q: Law | None, of: Drafting, known: Tensor, ends: Tensor, came: Tensor, chance: Tensor, figures: Tensor,
    largest: Tensor,
) -> None:  # fmt: skip
    """Write down what stands of the drafted tokens: p, the laws they were drawn from; q (B * (k - 1), V), of all but
    the first given those before. known (B,): tokens of each row, with the drafted ones but the last."""
    V = p.logits.shape[1]
    q = p if q is None else q
    cut = any(switches_of(of.filter).values())
    _accept[(len(known),)](
        p.logits, p.levels, p.sums, q.logits, q.levels, q.sums, of.bias, of.never, of.at, of.order, of.keys, of.taken,
        of.tokens, known, ends, came, chance, figures, largest, of.vocab, V, of.k, of.places,
        settings_of(of.filter, V)[0], ACCEPT=ACCEPT, RESIDUAL=RESIDUAL, KP=triton.next_power_of_2(of.k), CHUNK=CHUNK,
        CUT=cut, num_warps=4,
    )  # fmt: skip
