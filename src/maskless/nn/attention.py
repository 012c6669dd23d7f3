"""Attention over packed segments, and rotary positions: query segment i attends to key segment i and to nothing else.

One function with three bodies that give the same numbers; which one runs follows from what the tensors are. Attention
over an empty segment is zero. On stairs a query attends to the first keys of its segment only.

Shapes: S segments, Tq and Tk packed queries and keys, h heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from maskless.problems import Offsets, Seen


def _load() -> Any:
    """The Triton kernels, or None where there are none: they come with torch's builds for CUDA."""
    if torch.version.cuda is None or not find_spec("triton"):
        return None
    from maskless.nn import cuda

    return cuda


KERNELS = _load()  # at once: a compiled layer could not


@dataclass(frozen=True)
class Stairs:
    """How many keys of its segment each query sees, and from where on the queries see each key."""

    seen: Tensor  # (Tq,) int32
    askers: Tensor | None  # (Tk,) int32, the first packed query that sees each key; None: no kernel needs it
    chain: bool  # see `problems.Seen`

    @staticmethod
    def of(seen: Seen, q_offsets: Offsets, k_offsets: Offsets) -> Stairs:
        """The stairs of targets to their contexts, which may have grown at the front."""
        askers = _askers(seen.counts, q_offsets, k_offsets) if has_kernels(seen.counts) else None
        return Stairs(seen.counts, askers, seen.chain)


def _askers(seen: Tensor, q_offsets: Offsets, k_offsets: Offsets) -> Tensor:
    """The first query that sees each key: it has as many before it in its segment as do not see the key.  -> (Tk,)"""
    begin, end = (bounds.long()[q_offsets.owner] for bounds in (k_offsets.bounds[:-1], k_offsets.bounds[1:]))
    last = begin + seen  # the first key that a query does not see
    blind = seen.new_zeros(k_offsets.total + 1).index_add(
        0, last.where(last < end, k_offsets.total), torch.ones_like(seen)
    )
    before = torch.cat([blind.new_zeros(1), blind[:-1].cumsum(0)])  # of the whole array: up to each key
    owner = k_offsets.owner
    found = before[1:] - before[k_offsets.bounds[:-1].long()][owner] + q_offsets.bounds[:-1][owner]
    return found.int()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Offsets,
    k_offsets: Offsets,
    *,
    causal: bool = False,
    stairs: Stairs | None = None,
) -> Tensor:
    """Softmax attention within segments; `causal` needs equal offsets.  (Tq, h, d), (Tk, h, d) x 2 -> (Tq, h, d)"""
    if k.shape[0] == 0 or q.shape[0] == 0:
        return q * 0 + (k.sum() + v.sum())  # zeros that keep the graph: each parameter still gets its gradient, 0
    if q_offsets.equal and k_offsets.equal:
        return _dense(q, k, v, q_offsets, k_offsets, causal, stairs)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and stairs is None:
        return _packed(q, k, v, q_offsets, k_offsets, causal)
    return _padded(q, k, v, q_offsets, k_offsets, causal, stairs)


def rotary_attention(
    x: Tensor,
    memory: Tensor | None,
    ends: tuple[Offsets, Offsets],
    ropes: tuple[Tensor, Tensor],
    *,
    causal: bool = False,
    stairs: Stairs | None = None,
) -> Tensor:
    """`attention` of queries and keys after RoPE. One product gave x, and one the memory; our kernels do not cut them.

    x (T, 3, h, d) queries, keys and values; or (Tq, 1, h, d) queries and memory (Tk, 2, h, d); ends, ropes: of the
    queries and of the keys, (Tq, 2, d/2) and (Tk, 2, d/2) -> (Tq, h, d)
    """
    q, k, v = (*x.unbind(1), *(() if memory is None else memory.unbind(1)))
    regular = ends[0].equal and ends[1].equal and stairs is None
    if not regular and len(q) and len(k) and _fits_kernels(q):
        tables = (rope.contiguous() for rope in ropes)
        steps = (None, None) if stairs is None else (stairs.seen, stairs.askers)
        out = KERNELS.attend_rotated(x, memory, *tables, ends[0].bounds, ends[1].bounds, *steps, causal)[0]
        assert isinstance(out, Tensor)
        return out
    return attention(rotate(q, ropes[0]), rotate(k, ropes[1]), v, *ends, causal=causal, stairs=stairs)


def has_kernels(x: Tensor) -> bool:
    """Whether our kernels can take it from where it is."""
    return x.is_cuda and KERNELS is not None


def _fits_kernels(q: Tensor) -> bool:
    """Wider heads need more shared memory than small GPUs have."""
    return has_kernels(q) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] in (16, 32, 64)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Offsets, k_offsets: Offsets, causal: bool, stairs: Stairs | None
) -> Tensor:
    q_, k_, v_ = (x.unflatten(0, (len(q_offsets), -1)).transpose(1, 2) for x in (q, k, v))  # (S, h, n, d)
    first = k_offsets.longest - q_offsets.longest + 1  # how many keys the first query of a chain sees
    mask, blind = None, 0
    if stairs is not None and stairs.chain and first in (0, 1):
        causal, blind = True, 1 - first
    elif stairs is not None:
        mask = _staircase(stairs.seen.view(len(q_offsets), -1), k_offsets.longest)
    out = F.scaled_dot_product_attention(q_[:, :, blind:], k_, v_, attn_mask=mask, is_causal=causal)
    return F.pad(out, (0, 0, blind, 0)).transpose(1, 2).flatten(0, 1)


def _packed(q: Tensor, k: Tensor, v: Tensor, q_offsets: Offsets, k_offsets: Offsets, causal: bool) -> Tensor:
    """Our kernels, a quarter faster than torch's for segments of this kind (docs/results.md), where they can be."""
    if _fits_kernels(q) and not torch.is_grad_enabled():
        out = KERNELS.attend(q, k, v, q_offsets.bounds, k_offsets.bounds, None, causal)[0]
    else:
        ends = q_offsets.bounds, k_offsets.bounds, q_offsets.longest, k_offsets.longest
        out = varlen_attn(q, k, v, *ends, window_size=(-1, 0) if causal else (-1, -1))
    assert isinstance(out, Tensor)
    return out


def _padded(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Offsets, k_offsets: Offsets, causal: bool, stairs: Stairs | None
) -> Tensor:
    mask = k_offsets.real[:, None, None, :]  # (S, 1, 1, nk); a row without keys gives zeros
    if causal:
        n = k_offsets.longest
        mask = mask & torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    if stairs is not None:
        seen = stairs.seen.new_zeros(len(q_offsets) * q_offsets.longest).index_copy(0, q_offsets.slots, stairs.seen)
        mask = mask & _staircase(seen.view(len(q_offsets), -1), k_offsets.longest)
    q_, k_, v_ = _pad(q, q_offsets), _pad(k, k_offsets), _pad(v, k_offsets)
    out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask).transpose(1, 2)  # (S, nq, h, d)
    return out.flatten(0, 1)[q_offsets.slots]


def _staircase(seen: Tensor, keys: int) -> Tensor:
    """Which keys each query sees.  (S, nq) -> (S, 1, nq, nk) bool"""
    return (torch.arange(keys, device=seen.device) < seen[:, :, None])[:, None]


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
