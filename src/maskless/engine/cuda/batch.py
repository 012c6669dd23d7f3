"""Where in a batch the tokens of a step stand.

Shapes: B rows, N columns of a row, T tokens.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # tokens that a program looks up


@triton.jit
def _places(order, tokens, known, index, positions, ids, N, length, total, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, row = i < total, i // length
    at = row.to(tl.int64) * N + tl.load(known + row, real, 0) + shift + i % length
    tl.store(index + i, at, real)
    tl.store(positions + i, tl.load(order + at, real, 0), real)
    tl.store(ids + i, tl.load(tokens + at, real, 0), real)


def places(order: Tensor, tokens: Tensor, known: Tensor, length: int, total: int, shift: int) -> list[Tensor]:
    """Index, positions and tokens of `length` places of each row, from `shift` behind its known tokens.  (T,) x 3"""
    found = [order.new_empty(total) for _ in range(3)]
    _places[(triton.cdiv(total, BLOCK),)](
        order, tokens, known, *found, order.shape[1], max(1, length), total, shift, BLOCK=BLOCK
    )
    return found
