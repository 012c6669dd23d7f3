"""Orders and counts: in which order unknown positions are decided, and how many in each step.

Both are fixed before the first network call. A row's plan depends only on its own randomness, so that a sample does
not change with the batch it is in.

Shapes: B rows, L length, K steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def random(stage: Tensor, u: Tensor) -> Tensor:
    """Positions stage by stage, shuffled within each by uniform draws.  (B, L), (B, L) -> (B, L)

    stage: 0 for known positions, 1 for those to decide, 2 for those that stay undecided.
    """
    return (stage + u).argsort(1)


def raster(stage: Tensor, u: Tensor) -> Tensor:
    """Known positions (shuffled), then those to decide from left to right.  (B, L), (B, L) -> (B, L)"""
    L = stage.shape[1]
    left_to_right = stage * L + torch.arange(L, device=stage.device)
    return torch.where(stage == 0, u, left_to_right.to(u.dtype)).argsort(1)


def uniform(unknown: Tensor, steps: Tensor, u: Tensor) -> Tensor:
    """Counts as equal as whole numbers allow; steps (B,) of each row.  (B,) -> (B, K)  PGM, Alg. 2"""
    done = torch.arange(int(steps.max()) + 1, device=unknown.device).minimum(steps[:, None])
    return (unknown[:, None] * done // steps[:, None]).diff(dim=1)


def mdlm(unknown: Tensor, steps: Tensor, u: Tensor) -> Tensor:
    """Counts of MDLM's posterior, exactly: Binomial(remaining, (a_s - a_t) / (1 - a_t)) in each step.  (B,) -> (B, K)

    With alpha(t) = 1 - t and equal steps each unknown position is decided at an independent uniform time, so the
    counts are a histogram of uniform draws: no loop over rows, and nothing is left over at the end.
    u: (B, L) uniform draws, of which row b uses the first unknown[b].  PGM, Alg. 3
    """
    step = (u * steps[:, None]).long().minimum(steps[:, None] - 1)
    used = torch.arange(u.shape[1], device=u.device) < unknown[:, None]
    counts = torch.zeros(len(u), int(steps.max()), dtype=torch.long, device=u.device)
    return counts.scatter_add_(1, step, used.long())


Order = Callable[[Tensor, Tensor], Tensor]
Counts = Callable[[Tensor, Tensor, Tensor], Tensor]
ORDERS: dict[str, Order] = {"random": random, "raster": raster}
COUNTS: dict[str, Counts] = {"uniform": uniform, "mdlm": mdlm}
