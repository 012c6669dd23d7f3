"""LinearMap maps of few tokens, each with what comes before and after it in one kernel.

A step of sampling has few tokens, and every kernel costs microseconds however little it does. So the norm before a
product, and the GELU or the addition to the stream after it, are parts of the product. With many tokens cuBLAS is
faster, and the norm is not worth saving.

Shapes: T tokens, K inputs, N outputs.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _linear(
    x, offset, weight, bias, sums, out, T, N, K,
    NORM: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """With NORM, the norm of x + offset goes in: its scale and mean are found on the way and applied to the product."""
    n, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    rows, columns = (m < T)[:, None], (n < N)[None, :]
    x_at, weight_at = x + m[:, None].to(tl.int64) * K, weight + n[None, :].to(tl.int64) * K
    product = tl.zeros((BM, BN), tl.float32)
    total, square = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    for begin in range(0, K, BK):
        k = begin + tl.arange(0, BK)
        a = tl.load(x_at + k[None, :], rows & (k < K)[None, :], 0.0)
        w = tl.load(weight_at + k[:, None], columns & (k < K)[:, None], 0.0)
        if NORM:
            a = (a.to(tl.float32) + tl.load(offset + k, k < K, 0.0)[None, :]).to(x.dtype.element_ty)
            value = a.to(tl.float32)
            total += tl.sum(value, 1)
            square += tl.sum(value * value, 1)
        product = tl.dot(a, w, product, input_precision="ieee")
    if NORM:
        mean = total / K
        size = 1 / tl.sqrt(square / K - mean * mean + 1e-5)
        product = (product - mean[:, None] * tl.load(sums + n, n < N, 0.0)[None, :]) * size[:, None]
    if BIAS:
        product += tl.load(bias + n, n < N, 0.0).to(tl.float32)[None, :]
    if GELU:  # tanh(y) = 2 sigmoid(2y) - 1
        product *= tl.sigmoid(1.5957691216057308 * (product + 0.044715 * product * product * product))
    at = out + m[:, None].to(tl.int64) * N + n[None, :]
    if ADD:
        product += tl.load(at, rows & columns, 0.0).to(tl.float32)
    tl.store(at, product, rows & columns)


def norm_linear(
    x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, sums: Tensor, *, gelu: bool = False
) -> Tensor:
    """A linear map of the norm of x + offset, then GELU if asked for.  -> (T, N)

    sums (N,): of each row of the weight.
    """
    out = x.new_empty(len(x), len(weight))
    _launch(x, weight, out, offset=offset, bias=bias, sums=sums, gelu=gelu)
    return out


def add_linear(x: Tensor, a: Tensor, weight: Tensor) -> None:
    """x += a @ weight.T, in place.  (T, N), (T, K), (N, K)"""
    _launch(a, weight, x, add=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    sums: Tensor | None = None,
    gelu: bool = False,
    add: bool = False,
) -> None:
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    (T, K), N = x.shape, len(weight)
    how = _tiles(T, N, K)
    grid = triton.cdiv(N, how["BN"]), triton.cdiv(T, how["BM"])
    _linear[grid](
        x, offset, weight, bias, sums, out, T, N, K,
        NORM=offset is not None, BIAS=bias is not None, GELU=gelu, ADD=add, **how,
    )  # fmt: skip


def _tiles(T: int, N: int, K: int) -> dict[str, Any]:
    """Sizes of the tiles of a product: small enough that all processors have some."""
    if T <= 32:
        return {"BM": 16, "BN": 16, "BK": 128, "num_warps": 4, "num_stages": 4}
    if T <= 128:
        return {"BM": 32, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4}
    return {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4}
