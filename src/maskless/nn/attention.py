"""Attention over packed segments, and rotary positions: query segment i attends to key segment i and to nothing else.

One function with three bodies that give the same numbers; which one runs follows from what the tensors are. Attention
over an empty segment is zero.

Shapes: S segments, Tq and Tk packed queries and keys, h heads, d head width.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from maskless.problems import Offsets


def _load() -> Any:
    """The Triton kernels, or None where there are none: they come with torch's builds for CUDA."""
    if torch.version.cuda is None or not find_spec("triton"):
        return None
    from maskless.nn import cuda

    return cuda


KERNELS = _load()  # at once: a compiled layer could not


def attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Offsets, k_offsets: Offsets, *, causal: bool) -> Tensor:
    """Softmax attention within segments; `causal` needs equal offsets.  (Tq, h, d), (Tk, h, d) x 2 -> (Tq, h, d)"""
    if k.shape[0] == 0 or q.shape[0] == 0:
        return q * 0 + (k.sum() + v.sum())  # zeros that keep the graph: each parameter still gets its gradient, 0
    if q_offsets.equal and k_offsets.equal:
        return _dense(q, k, v, len(q_offsets), causal)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _packed(q, k, v, q_offsets, k_offsets, causal)
    return _padded(q, k, v, q_offsets, k_offsets, causal)


def turned_attention(
    x: Tensor, memory: Tensor | None, ends: tuple[Offsets, Offsets], ropes: tuple[Tensor, Tensor], *, causal: bool
) -> Tensor:
    """`attention` of queries and keys after RoPE. One product gave x, and one the memory; our kernels do not cut them.

    x (T, 3, h, d) queries, keys and values; or (Tq, 1, h, d) queries and memory (Tk, 2, h, d); ends, ropes: of the
    queries and of the keys, (Tq, 2, d/2) and (Tk, 2, d/2) -> (Tq, h, d)
    """
    q, k, v = (*x.unbind(1), *(() if memory is None else memory.unbind(1)))
    if not (ends[0].equal and ends[1].equal) and len(q) and len(k) and _fits_kernels(q):
        turns = (rope.contiguous() for rope in ropes)
        out = KERNELS.attend_turned(x, memory, *turns, ends[0].bounds, ends[1].bounds, causal)[0]
        assert isinstance(out, Tensor)
        return out
    return attention(rotate(q, ropes[0]), rotate(k, ropes[1]), v, *ends, causal=causal)


def has_kernels(x: Tensor) -> bool:
    """Whether our kernels can take it from where it is."""
    return x.is_cuda and KERNELS is not None


def _fits_kernels(q: Tensor) -> bool:
    """Wider heads need more shared memory than small GPUs have."""
    return has_kernels(q) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (16, 32, 64)


def _dense(q: Tensor, k: Tensor, v: Tensor, segments: int, causal: bool) -> Tensor:
    q_, k_, v_ = (x.unflatten(0, (segments, -1)).transpose(1, 2) for x in (q, k, v))  # (S, h, n, d)
    return F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal).transpose(1, 2).flatten(0, 1)


def _packed(q: Tensor, k: Tensor, v: Tensor, q_offsets: Offsets, k_offsets: Offsets, causal: bool) -> Tensor:
    """Our kernels, a quarter faster than torch's for segments of this kind (docs/results.md), where they can be."""
    if _fits_kernels(q) and not torch.is_grad_enabled():
        out = KERNELS.attend(q, k, v, q_offsets.bounds, k_offsets.bounds, causal)[0]
    else:
        ends = q_offsets.bounds, k_offsets.bounds, q_offsets.longest, k_offsets.longest
        out = varlen_attn(q, k, v, *ends, window_size=(-1, 0) if causal else (-1, -1))
    assert isinstance(out, Tensor)
    return out


def _padded(q: Tensor, k: Tensor, v: Tensor, q_offsets: Offsets, k_offsets: Offsets, causal: bool) -> Tensor:
    mask = k_offsets.real[:, None, None, :]  # (S, 1, 1, nk); a row without keys gives zeros
    if causal:
        n = k_offsets.longest
        mask = mask & torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    q_, k_, v_ = _pad(q, q_offsets), _pad(k, k_offsets), _pad(v, k_offsets)
    out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask).transpose(1, 2)  # (S, nq, h, d)
    return out.flatten(0, 1)[q_offsets.slots]


def _pad(x: Tensor, offsets: Offsets) -> Tensor:
    padded = x.new_zeros(len(offsets) * offsets.longest, *x.shape[1:]).index_copy(0, offsets.slots, x)
    return padded.unflatten(0, (len(offsets), offsets.longest)).transpose(1, 2)  # (S, h, n, d)


def rotary_table(length: int, width: int, base: float = 10_000.0) -> Tensor:
    """Cosines and sines of RoPE for each position.  -> (L, 2, d/2) float32"""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], 1).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """RoPE in float32, halves of the head paired.  (T, h, d), (T, 2, d/2) -> (T, h, d)"""
    cos, sin = table[:, 0, None], table[:, 1, None]  # (T, 1, d/2)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
