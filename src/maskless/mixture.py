"""Mixtures of orders: what a chain is trained on. Each row of a batch draws a family, and its order from that family.

An order is data: a model is good at the orders that it has seen. `random` makes it able to begin anywhere, `strands`
to write several parts of a text in step, and `gaps` to fill in between what is known. On grids there are `halton`,
`raster` and `regions` beside `random`.

Shapes: B rows, L length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless import order as od
from maskless.order import Order

SHORTEST = 8  # positions of a strand in training: where they are shorter, most tokens of a text are neighbours
CUTS = 16  # between known and hidden spans, at most
Family = Callable[[Tensor, Tensor], Tensor]  # (B,) and (B, L) uniform draws -> orders (B, L)


@dataclass(frozen=True)
class Mixture:
    """Families of orders, each with its share of the rows: "random=25,strands=50,gaps=25"."""

    shares: tuple[tuple[str, float], ...]

    @staticmethod
    def parse(text: str, *, image: bool = False) -> Mixture:
        """The mixture that a text names; shares need not add up to 100, and a family alone has all."""
        if not isinstance(text, str):
            raise ValueError(f"orders {text!r}: expected shares of families, such as {TEXT_DEFAULT}")
        known, shares = IMAGE_FAMILIES if image else TEXT_FAMILIES, dict[str, float]()
        for part in text.split(","):
            name, _, share = part.strip().partition("=")
            numbered = "regions" if image else "strands"  # regions4, strands8
            if name not in known and not re.fullmatch(numbered + r"[1-9]\d{0,5}", name):
                raise ValueError(f"unknown order {name!r} in orders {text!r}: expected {', '.join(known)}")
            try:
                value = float(share or 100)
            except ValueError:
                value = -1.0
            if not 0 < value < float("inf"):
                raise ValueError(f"share {share!r} of {name} in orders {text!r}: expected a number above 0")
            if name in shares:
                raise ValueError(f"{name} stands twice in orders {text!r}")
            shares[name] = value
        return Mixture(tuple(shares.items()))

    def __str__(self) -> str:
        return ",".join(f"{name}={share:g}" for name, share in self.shares)

    def families(self, length: int, grid: tuple[int, int] | None = None) -> list[tuple[float, Family]]:
        """Each family's share of all rows, and the family for this length or grid."""
        total = sum(share for _, share in self.shares)
        return [(share / total, _family(name, length, grid)) for name, share in self.shares]

    def draw(self, t: Tensor, u: Tensor, *, lead: int = 0, grid: tuple[int, int] | None = None) -> Tensor:
        """An order for each row; the first `lead` positions come first in all of them.  (B,), (B, L) -> (B, L)

        t (stratified) chooses the family and what it has to choose, u shuffles: uniform draws in [0, 1).
        """
        L, low = u.shape[1] - lead, 0.0
        order = torch.arange(u.shape[1]).repeat(len(u), 1)
        families = self.families(L, grid)
        for number, (share, family) in enumerate(families):
            high = 1.0 if number == len(families) - 1 else low + share
            rows = ((t >= low) & (t < high)).nonzero()[:, 0]
            if len(rows):
                own = ((t[rows] - low) / (high - low)).clamp(0, 1 - 2**-53)
                order[rows, lead:] = lead + family(own, u[rows, lead:])
            low = high
        return order

    def has(self, *names: str) -> bool:
        """Whether one of these families is in it."""
        return any(re.sub(r"\d+$", "", name) in names for name, _ in self.shares)

    def strands(self, length: int) -> list[int]:
        """The numbers of strands that are in it, for this many positions."""
        found: set[int] = set()
        for name, _ in self.shares:
            if name == "left":
                found.add(1)
            elif name == "strands":
                found |= set(strand_numbers(length))
            elif name.startswith("strands"):
                found.add(int(name.removeprefix("strands")))
        return sorted(found)

    def regions(self, grid: tuple[int, int]) -> list[int]:
        """The numbers of regions along a side that are in it."""
        found: set[int] = set()
        for name, _ in self.shares:
            if name.startswith("regions"):
                number = name.removeprefix("regions")
                found |= {int(number)} if number else set(region_numbers(grid))
        return sorted(found)


def region_numbers(grid: tuple[int, int]) -> list[int]:
    """1, 2, 4, ...: so many regions along a side that they are at least 2 cells wide and high."""
    return [1 << i for i in range(max(1, (min(grid) // 2).bit_length()))]


def strand_numbers(length: int) -> list[int]:
    """1, 2, 4, ...: so many strands that they have about eight positions each, or more."""
    return [1 << i for i in range(max(1, (-(-length // SHORTEST)).bit_length()))]


def _family(name: str, length: int, grid: tuple[int, int] | None) -> Family:
    if name == "strands":
        return lambda t, u: _strands(_chosen(strand_numbers(length), t), u)
    if name == "gaps":
        return lambda t, u: _gaps(_chosen(strand_numbers(length), t), u)
    if name.startswith("strands"):
        number = torch.tensor(int(name.removeprefix("strands")))
        return lambda t, u: _strands(number.expand(len(t)), u)
    if name == "halton" and grid is not None:
        sequence = od.halton(grid)  # the order in which images are drawn: that from another start is another order
        return lambda t, u: sequence(_all(u), u)
    if name == "regions" and grid is not None:
        return lambda t, u: _regions(grid, t, u)
    if name.startswith("regions") and grid is not None:
        parts = od.regions(grid, int(name.removeprefix("regions")))
        return lambda t, u: parts(_all(u), u)
    order: Order = {"random": od.random, "left": od.left, "raster": od.left}[name]
    return lambda t, u: order(_all(u), u)


def _all(u: Tensor) -> Tensor:
    """Every position is to be decided.  (B, L) -> (B, L)"""
    return torch.ones(u.shape, dtype=torch.long)


def _chosen(numbers: list[int], t: Tensor) -> Tensor:
    """One of the numbers for each row, all equally likely.  (B,) -> (B,)"""
    return torch.tensor(numbers)[(t * len(numbers)).long()]


def _strands(number: Tensor, u: Tensor) -> Tensor:
    """Strands of all positions.  (B,), (B, L) -> (B, L)"""
    longest = -(-u.shape[1] // number)  # rounded up
    return od.strands(longest[:, None])(_all(u), u)


def _gaps(number: Tensor, u: Tensor) -> Tensor:
    """Some spans are known, as they stand; the gaps between them follow as strands.  (B,), (B, L) -> (B, L)

    With several strands (number) a gap that is too long for its share of them is more than one strand.
    """
    hidden = hidden_spans(u)
    longest = (-(-hidden.sum(1) // number)).clamp_min(1)  # rounded up
    return od.in_place(od.strands(longest[:, None]))(hidden.long(), u)


def hidden_spans(u: Tensor) -> Tensor:
    """Which positions of each row are hidden: 1 to 16 cuts at random places part known spans from gaps, alternately.

    Chance decides which comes first, so that prompts, gaps and endings all occur.  (B, L) uniform draws -> (B, L) bool
    """
    L = u.shape[1]
    most = min(CUTS, L - 2)
    if most < 1:
        return torch.ones(u.shape, dtype=torch.bool)
    cuts = 1 + (u[:, 0] * most).long()  # 1 .. most
    place = 1 + (u[:, 2 : 2 + most] * (L - 1)).long()  # (B, most)
    place = place.masked_fill(torch.arange(most) >= cuts[:, None], L)
    passed = (place[:, :, None] <= torch.arange(L)).sum(1)  # cuts up to each position
    return (passed + (u[:, 1:2] < 0.5).long()) % 2 == 1


def _regions(grid: tuple[int, int], t: Tensor, u: Tensor) -> Tensor:
    """Regions of 1 x 1, 2 x 2, 4 x 4, ...: in each row another number.  -> (B, L)"""
    numbers = region_numbers(grid)
    chosen, order = _chosen(numbers, t), torch.empty(u.shape, dtype=torch.long)
    for number in numbers:
        rows = chosen == number
        order[rows] = od.regions(grid, number)(_all(u[rows]), u[rows])
    return order


TEXT_FAMILIES = ("random", "left", "strands", "gaps")
TEXT_DEFAULT = "random=25,strands=50,gaps=25"
IMAGE_FAMILIES = ("random", "halton", "raster", "regions")
IMAGE_DEFAULT = "random=50,halton=25,regions=25"
