"""Sums of the bits of all weights, by one kernel."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # whole numbers that one program of the digest reads


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
