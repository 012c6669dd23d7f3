"""Orders and counts: in which order unknown positions are decided, and how many in each step.

Both are fixed before the first network call. A row's plan depends only on its own randomness, so that a sample does
not change with the batch it is in. Mixtures of such orders, to train on, are in mixture.py.

Shapes: B rows, L length, K steps; a grid has H rows and W columns of cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def random(stage: Tensor, u: Tensor) -> Tensor:
    """Positions stage by stage, shuffled within each by uniform draws.  (B, L), (B, L) -> (B, L)

    stage: 0 for known positions, 1 for those to decide, 2 for those that stay undecided.
    """
    return (stage + u).argsort(1)


def left(stage: Tensor, u: Tensor) -> Tensor:
    """Known positions (shuffled), then those to decide from left to right.  (B, L), (B, L) -> (B, L)

    On a grid this is raster order.
    """
    L = stage.shape[1]
    left_to_right = stage * L + torch.arange(L, device=stage.device)
    return torch.where(stage == 0, u, left_to_right.to(u.dtype)).argsort(1)


def halton(grid: tuple[int, int]) -> Order:
    """Known cells (shuffled), then those to decide as a Halton sequence visits a grid of H x W cells, row by row.

    For a row that has a BOS before its cells: `after_lead(halton(grid), 1)`.
    """
    H, W = grid
    if H < 1 or W < 1:
        raise ValueError(f"grid {H} x {W} is out of range: expected 1 x 1 or more")
    turn = halton_turns(H, W)

    def order(stage: Tensor, u: Tensor) -> Tensor:
        """(B, H*W), (B, H*W) -> (B, H*W)"""
        n = H * W
        if stage.shape[1] != n:
            raise ValueError(f"{stage.shape[1]} cells do not fit the grid {H} x {W}: expected {n}")
        return torch.where(stage == 0, u, (stage * n + turn.to(stage.device)).to(u.dtype)).argsort(1)

    return order


def strand_steps(wanted: Tensor, longest: Tensor | int) -> Tensor:
    """When strands reach each wanted position: its place in its strand, 0 elsewhere.  (B, L) -> (B, L)

    A run of wanted positions is a strand, or several one after the other if it is longer than `longest` (B, 1).
    """
    places = torch.arange(wanted.shape[1], device=wanted.device)
    begins = wanted & ~torch.cat([torch.zeros_like(wanted[:, :1]), wanted[:, :-1]], 1)
    begun = torch.where(begins, places, 0).cummax(1).values
    return torch.where(wanted, (places - begun) % longest, 0)


def strand_numbers(wanted: Tensor, longest: Tensor | int) -> Tensor:
    """The strand that each wanted position is in, counted from the left, -1 elsewhere.  (B, L) -> (B, L)"""
    first = wanted & (strand_steps(wanted, longest) == 0)
    return torch.where(wanted, first.cumsum(1) - 1, -1)


def strands(longest: Tensor | int) -> Order:
    """Known positions (shuffled), then strands in step: the first position of every strand, then the second, ...

    The positions to decide are cut into strands of at most `longest` (B, 1) each, at known ones and elsewhere, and each
    strand goes from left to right. One strand is left to right; many are many positions in each step.
    """

    def order(stage: Tensor, u: Tensor) -> Tensor:
        """(B, L), (B, L) -> (B, L)"""
        L = stage.shape[1]
        late = (stage * L + strand_steps(stage == 1, longest)) * L + torch.arange(L, device=stage.device)
        return torch.where(stage == 0, u, late.to(u.dtype)).argsort(1)

    return order


def regions(grid: tuple[int, int], parts: int) -> Order:
    """Known cells (shuffled), then parts x parts regions of a grid in step, each row by row: strands in the plane."""
    H, W = grid
    if not 1 <= parts <= min(H, W):
        raise ValueError(f"regions {parts} of a grid of {H} x {W} is out of range: expected 1 to {min(H, W)}")
    turn = region_turns(H, W, parts)

    def order(stage: Tensor, u: Tensor) -> Tensor:
        """(B, H*W), (B, H*W) -> (B, H*W)"""
        turns = stage * (H * W) + turn.to(stage.device)
        return torch.where(stage == 0, u, turns.to(u.dtype)).argsort(1)

    return order


@lru_cache(maxsize=32)
def region_turns(H: int, W: int, parts: int) -> Tensor:
    """When each cell comes: the first cells of all regions, then the second ones, ...  -> (H * W,)"""
    high, wide = math.ceil(H / parts), math.ceil(W / parts)
    row, column = torch.arange(H)[:, None], torch.arange(W)
    step = (row % high) * wide + column % wide  # the place of a cell in its region
    region = row // high * parts + column // wide
    return (step * parts**2 + region).flatten().argsort().argsort()


def in_place(order: Order) -> Order:
    """The same order, with the known positions as they stand instead of shuffled: what chains are trained on."""

    def placed(stage: Tensor, u: Tensor) -> Tensor:
        """(B, L), (B, L) -> (B, L)"""
        places = torch.arange(stage.shape[1], device=u.device, dtype=u.dtype) / stage.shape[1]
        return order(stage, torch.where(stage == 0, places, u))

    return placed


def after_lead(order: Order, lead: int) -> Order:
    """An order of what follows the first `lead` positions, which are known and come first (the BOS of a picture).

    So the lead stands first in the context, as in training, also where other positions are known.
    """
    if lead < 0:
        raise ValueError(f"lead {lead} is out of range: expected 0 or more")

    def led(stage: Tensor, u: Tensor) -> Tensor:
        """(B, L), (B, L) -> (B, L)"""
        if stage[:, :lead].any():
            raise ValueError(f"the first {lead} tokens of a row lead it: expected them to be known")
        first = torch.arange(lead, device=stage.device).expand(len(stage), lead)
        return torch.cat([first, lead + order(stage[:, lead:], u[:, lead:])], 1)

    return led


@lru_cache(maxsize=32)
def halton_turns(H: int, W: int) -> Tensor:
    """When each cell is first visited by the points (v_2(i), v_3(i)), i = 1, 2, ...: its turn.  -> (H * W,)

    v_b(i) are the digits of i in base b, mirrored at the point. A cell holds a whole interval of 2^-j x 3^-k with
    2^j < 4 H and 3^k < 6 W, of which every 2^j 3^k points in a row have one: so 24 H W points visit every cell.
    """
    i = torch.arange(1, 24 * H * W + 1)
    cell = _mirrored(i, 2, H) * W + _mirrored(i, 3, W)
    first = torch.full((H * W,), len(i)).scatter_reduce(0, cell, i, "amin")
    return first.argsort().argsort()


def _mirrored(i: Tensor, base: int, size: int) -> Tensor:
    """floor(size * v_base(i)), in whole numbers: no rounding near the border of a cell."""
    mirrored, scale = torch.zeros_like(i), 1
    while bool(i.any()):
        mirrored, i, scale = mirrored * base + i % base, i // base, scale * base
    return mirrored * size // scale


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


def arccos(unknown: Tensor, steps: Tensor, u: Tensor) -> Tensor:
    """Counts that grow: few positions are decided while little is known, many at the end.  (B,) -> (B, K)

    After s of S steps a share of 1 - arccos(s / S) / (pi / 2) is decided, and s positions at least, so that no step is
    empty. The released Halton sampler's; u is not used.
    """
    return _growing(unknown, steps, _arccos)


def cosine(unknown: Tensor, steps: Tensor, u: Tensor) -> Tensor:
    """Counts that grow: after s of S steps a share of 1 - cos(pi/2 s / S) is decided, and s positions at least.

    MaskGIT's schedule; it begins more slowly than `arccos` and ends more evenly. u is not used.  (B,) -> (B, K)
    """
    return _growing(unknown, steps, _cosine)


def arccos_after_one(unknown: Tensor, steps: Tensor, u: Tensor) -> Tensor:
    """Counts that grow as `arccos` does in S - 1 steps, after a first step of one position.  (B,) -> (B, K)

    The released confidence sampler's: nothing tells the first positions apart, so only one is decided.
    """
    done = torch.arange(int(steps.max()), device=unknown.device).minimum(steps[:, None] - 1)  # (B, K)
    grown = _grown(unknown[:, None], done, (steps[:, None] - 1).clamp_min(1), _arccos)
    total = (1 + grown).minimum(unknown[:, None])
    total = torch.where(done == steps[:, None] - 1, unknown[:, None], total)
    return total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))


def _growing(unknown: Tensor, steps: Tensor, share: Callable[[Tensor], Tensor]) -> Tensor:
    """Counts of each step from the share that is decided after it.  (B,) -> (B, K)"""
    done = torch.arange(int(steps.max()) + 1, device=unknown.device).minimum(steps[:, None])  # (B, K+1)
    return _grown(unknown[:, None], done, steps[:, None], share).minimum(unknown[:, None]).diff(dim=1)


def _grown(unknown: Tensor, step: Tensor, steps: Tensor, share: Callable[[Tensor], Tensor]) -> Tensor:
    """max(s, floor(n * share(s / S))): how many of n positions are decided after s of S steps."""
    decided = unknown * share(step.double() / steps)
    return (decided + 1e-9).long().maximum(step)  # arccos at 1/2 gives exactly n / 3: rounding must not decide


def _arccos(progress: Tensor) -> Tensor:
    """1 - arccos(s / S) / (pi / 2), with arcsin = pi / 2 - arccos."""
    return progress.asin() * (2 / math.pi)


def _cosine(progress: Tensor) -> Tensor:
    return 1 - (progress * (math.pi / 2)).cos()


Order = Callable[[Tensor, Tensor], Tensor]
Counts = Callable[[Tensor, Tensor, Tensor], Tensor]
ORDERS: dict[str, Order] = {"random": random, "left": left}
COUNTS: dict[str, Counts] = {
    "uniform": uniform,
    "mdlm": mdlm,
    "arccos": arccos,
    "arccos-after-one": arccos_after_one,
    "cosine": cosine,
}
