"""Times, and how much of a sequence is known at each: alpha(t) = 1 - t is the expected share of known tokens.

Shapes: N rows of a global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

EDGE = 1e-3  # times stay this far from 0 and 1, so that no weight 1/t or 1/(1-t) passes 1/EDGE


def stratified(rows: int, *, generator: torch.Generator) -> Tensor:
    """One uniform draw in each of N equal slices of [0, 1), in random order.  -> (N,) float64

    Low-variance times for a global batch (MDLM, App. C; PGM, Sec. 3.1). The slices are dealt out at random, so that no
    process always works at the same times.
    """
    slices = torch.randperm(rows, generator=generator)
    return (slices + torch.rand(rows, generator=generator, dtype=torch.float64)) / rows


def bounded(u: Tensor) -> Tensor:
    """Uniform draws in [0, 1) as times in [EDGE, 1 - EDGE]: the weights of both groups stay below 1/EDGE."""
    return EDGE + (1 - 2 * EDGE) * u


def released(u: Tensor) -> Tensor:
    """Uniform draws in [0, 1) as times in [EDGE, 1), the released code's range: 1/(1-t) is unbounded."""
    return EDGE + (1 - EDGE) * u
