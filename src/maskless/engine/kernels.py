"""The element-wise work, attention over a cache and the draw: on CUDA one Triton kernel each, elsewhere plain torch.

Which one runs follows from where the tensors are; both give the same numbers up to rounding.

Shapes: T tokens, U targets, S rows of a batch, D width, h heads, d head width, V vocabulary, N columns of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from maskless import logits as lg
from maskless.draw import Truncation
from maskless.nn.attention import attention, rotate
from maskless.nn.blocks import spread
from maskless.problems import Offsets, computed_once

SMALL = 128  # tokens up to which a linear map is one kernel with what comes before and after it
WITHIN = 64  # new tokens of a row that one program of the attention holds
LARGE = 8192  # tokens from which on cuDNN's attention is taken
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Past:
    """Which keys each row may attend to: lengths[s] of them, in packed keys those from begins[s] on."""

    begins: Tensor  # (S,) int32; of a cache: s * N
    lengths: Tensor  # (S,) int32

    @computed_once
    def longest(self) -> int:
        return int(self.lengths.max())

    @computed_once
    def equal(self) -> bool:
        return bool((self.lengths == self.lengths[0]).all())


class Shifts(NamedTuple):
    """What follows a norm: a scale and a shift, which belong to one of n conditions."""

    shift: Tensor  # (n, D)
    scale: Tensor  # (n, D)
    which: Tensor  # (S,) int32, the condition of each row
    span: Offsets  # the tokens of each row
    centred: bool  # the norm takes the mean away; else it divides by the root mean square alone


class LinearMap(NamedTuple):
    """x -> x @ weight.T + bias"""

    weight: Tensor  # (N, K)
    bias: Tensor | None = None  # (N,)
    sums: Tensor | None = None  # (N,) float32: of each row of the weight, where a norm comes before it


@cache
def triton() -> Any:
    """The Triton kernels, or None where there are none: they come with torch's builds for CUDA."""
    try:
        from maskless.engine import cuda
    except ImportError:
        return None
    return cuda


def on_cuda(x: Tensor) -> bool:
    """Whether the Triton kernels serve this tensor."""
    return x.is_cuda and triton() is not None


def few(x: Tensor) -> bool:
    """Whether so few tokens are computed that a kernel waits longer than it works.  (T, D)"""
    return on_cuda(x) and len(x) <= SMALL


def normalise(x: Tensor, offset: Tensor) -> Tensor:
    """x + offset with mean 0 and variance 1 along the width, computed in float32.  (T, D), (D,) -> (T, D)"""
    if on_cuda(x):
        return triton().normalise(x, offset)
    return F.layer_norm(x.float() + offset, x.shape[-1:]).to(x.dtype)


def modulate(x: Tensor, more: tuple[Tensor, Tensor] | None, how: Shifts) -> Tensor:
    """The norm of x times scale plus shift, each of a token's row, computed in float32.  (T, D) -> (T, D)

    more: a product y (T, D) and its gate (n, D); first gate * y joins x, in place.
    """
    if on_cuda(x):
        return triton().modulate(x, more, how)

    def of(part: Tensor) -> Tensor:
        return spread(part.index_select(0, how.which[: len(how.span)]), how.span)

    if more is not None:
        x.copy_(x + of(more[1]) * more[0])
    norm = F.layer_norm if how.centred else F.rms_norm
    return (norm(x.float(), x.shape[-1:], eps=1e-5) * of(how.scale) + of(how.shift)).to(x.dtype)


def rms_(x: Tensor) -> None:
    """Divide by the root mean square along the width, in place.  (T, G, D) a view"""
    if on_cuda(x):
        triton().rms_(x)
    else:
        x.copy_(F.rms_norm(x.float(), x.shape[-1:], eps=1e-5))


def swiglu(x: Tensor) -> Tensor:
    """The SiLU of the first half times the second.  (T, 2H) -> (T, H)"""
    if on_cuda(x):
        return triton().swiglu(x)
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def linear(x: Tensor, matrix: LinearMap, *, gelu: bool = False) -> Tensor:
    """A linear map, then GELU (tanh form) if asked for.  (T, K) -> (T, N)"""
    weight, bias, _ = matrix
    if not gelu:
        return F.linear(x, weight, bias)
    assert bias is not None
    if x.is_cuda:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # in the product's epilogue
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def norm_linear(x: Tensor, offset: Tensor, matrix: LinearMap, *, gelu: bool = False) -> Tensor:
    """A linear map of the norm of x + offset, then GELU if asked for.  (T, K), (K,) -> (T, N)"""
    if few(x):
        assert matrix.sums is not None
        return triton().norm_linear(x, offset, *matrix, gelu=gelu)
    return linear(normalise(x, offset), matrix, gelu=gelu)


def add_linear(x: Tensor, a: Tensor, weight: Tensor) -> None:
    """x += a @ weight.T, in place.  (T, N), (T, K), (N, K)"""
    if few(x):
        triton().add_linear(x, a, weight)
    else:
        x.addmm_(a, weight.t())


def attend_within(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, *, causal: bool) -> Tensor:
    """Attention of the tokens of each row to one another, rotated before.  (T, h, d) x 3 -> (T, h*d)

    cuDNN's attention is the fastest, but plans every new shape for tens of milliseconds: a small one is not worth it.
    """
    small = q.is_cuda and len(q) < LARGE
    with sdpa_kernel(UNPLANNED) if small else nullcontext():
        return attention(q, k, v, offsets, offsets, causal=causal).flatten(1)


def rotate_(x: Tensor, positions: Tensor, rope: Tensor) -> None:
    """RoPE in place.  (T, G, h, d) a view, (T,)"""
    if on_cuda(x):
        triton().rotate_(x, positions, rope)
    else:
        x.copy_(rotate(x.flatten(1, 2), rope[positions]).view(x.shape))


def store(kv: Tensor, positions: Tensor, rope: Tensor, index: Tensor, cache: Tensor) -> None:
    """Write keys, rotated, and values to their places, s * N + n each.  (T, G, 2, h, d) -> cache (G, 2, S, h, N, d)"""
    if on_cuda(kv):
        triton().store(kv, positions, rope, index, cache)
    else:
        k = rotate(kv[:, :, 0].flatten(1, 2), rope[positions]).view(kv[:, :, 0].shape)
        N = cache.shape[4]
        cache[:, :, index // N, :, index % N] = torch.stack([k, kv[:, :, 1]], 2)


def store_and_attend(
    qkv: Tensor,
    positions: Tensor,
    rope: Tensor,
    index: Tensor,
    cache: Tensor,
    offsets: Offsets,
    past: Past,
    *,
    causal: bool,
) -> Tensor:
    """Store the keys and values of new tokens, the last of the past, and attend to all of it.  -> (T, h*d)

    qkv (T, 3, h, d), cache (2, S, h, N, d)
    """
    if on_cuda(qkv) and offsets.longest <= WITHIN:
        return triton().store_and_attend(qkv, positions, rope, cache, offsets, past, causal)
    store(qkv[:, None, 1:], positions, rope, index, cache[None])
    k, v = cache
    return attend(qkv[:, 0], positions, rope, k, v, offsets, past, causal=causal)


def attend(
    q: Tensor, positions: Tensor, rope: Tensor, k: Tensor, v: Tensor, offsets: Offsets, past: Past, *, causal: bool
) -> Tensor:
    """Attention of the queries of each row, which are rotated here, to the keys of its past.  (U, h, d) -> (U, h*d)

    k, v: of a cache (S, h, N, d), or packed (T, h, d); keys are rotated already. Where a row has no keys the result is
    0. causal: the queries are the last of the past, and each attends to itself and to what came before it.
    """
    if on_cuda(q):
        return triton().attend(q, positions, rope, k, v, offsets, past, causal)
    q = rotate(q, rope[positions])
    if past.longest == 0:
        return torch.zeros_like(q).flatten(1)
    S, n, m = len(offsets), past.longest, offsets.longest
    ragged = not (past.equal and offsets.equal)
    places, mask = torch.arange(n, device=q.device), None
    real = places < past.lengths[:, None]  # (S, n)
    if k.ndim == 4:
        k, v = k[:S, :, :n], v[:S, :, :n]
    else:
        index = (past.begins[:, None] + places).where(real, 0)
        k, v = (x[index].transpose(1, 2) for x in (k, v)) if ragged else (_rows(x, S) for x in (k, v))
    if ragged:
        q = q.new_zeros(S * m, *q.shape[1:]).index_copy(0, offsets.slots, q)
        mask = real[:, None, None]
    if causal and m > 1:
        own = (past.lengths - offsets.lengths)[:, None] + torch.arange(m, device=q.device)  # the column of each query
        sees = places <= own[:, None, :, None]  # (S, 1, m, n)
        mask = sees if mask is None else mask & sees
    out = F.scaled_dot_product_attention(_rows(q, S), k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1)
    return (out[offsets.slots] if ragged else out).flatten(1)


def _rows(x: Tensor, rows: int) -> Tensor:
    return x.unflatten(0, (rows, -1)).transpose(1, 2)  # (S, h, n, d)


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """The product in float32, whatever the inputs.  (U, D), (V, D) -> (U, V)"""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    if x.device.type == "cpu" and x.dtype == torch.float32:  # few rows: the other way round is two to six times faster
        few = x.expand(2, -1) if len(x) == 1 else x
        return torch.mm(weight, few.t()).t()[: len(x)].contiguous()
    return F.linear(x, weight).float()


def digestible(weight: Tensor) -> bool:
    """Whether `digest` reads it."""
    return on_cuda(weight) and weight.is_contiguous() and weight.nbytes > 0 and not weight.nbytes % 4


def digest(weights: Sequence[Tensor]) -> Tensor:
    """Sums of the bits of weights on one GPU, each weighed by its place: some of them differ if any weight does.

    One kernel reads all, where several for each weight would cost more than the reading.
    """
    return triton().digest(weights)


@dataclass(frozen=True)
class Landing:
    """Where drawn tokens go, and what their draws need: everything by place in the flattened batch of N."""

    at: Tensor  # (U,) places of the targets
    tokens: Tensor  # (N,)
    largest: Tensor  # () of all ids so far: V or more where none could be drawn
    vocab: int  # V, of rows of logits that may be filled up
    u: Tensor  # (N,) uniform draws
    sharp: Tensor | None = None  # (N,) factors of the logits
    weight: Tensor | None = None  # (N,) of the guidance; then logits (2U, V) are with labels, and after them without
    fixed: Tensor | None = None  # (N,) bool: the token that stands there stays


def truncates(filter: Truncation) -> bool:
    """Whether it rules out tokens."""
    return filter.top_k is not None or filter.top_p not in (None, 1) or filter.temperature < lg.COLDEST


def fuses(logits: Tensor, filter: object) -> bool:
    """Whether filter and draw are one kernel: on CUDA, where a program can hold what it has to truncate."""
    if not (on_cuda(logits) and isinstance(filter, Truncation)):
        return False
    return not truncates(filter) or logits.shape[1] <= triton().LONGEST


def draw(logits: Tensor, bias: Tensor, filter: Truncation, into: Landing) -> None:
    """One exact categorical sample of each row as `combine` and the filter leave it, in float64, where `fuses`."""
    if truncates(filter):
        triton().draw_rows(logits, bias, filter, into)
    else:
        triton().draw_chunks(logits, bias, filter.temperature, into)


def combine(logits: Tensor, bias: Tensor, sharp: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Logits with their bias, guided and sharpened as asked for.  (U or 2U, V), (V,), (U,), (U,) -> (U, V)

    weight of the guidance: then the logits are those with the labels, and after them those without.
    """
    if weight is not None:
        logits, without = logits.chunk(2)
        logits = logits + weight[:, None] * (logits - without)
    logits = logits + bias
    return logits if sharp is None else logits * sharp[:, None]
