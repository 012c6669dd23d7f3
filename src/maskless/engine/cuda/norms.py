"""Norms and other element-wise work.

Shapes: T tokens, S rows of a batch, D width, n conditions, H hidden width.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 4096  # tokens below which a norm gives each of them a program of its own


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
