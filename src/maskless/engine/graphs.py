"""Captured steps: the first of a kind is computed, the second captured, the others replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SPARE = 1 / 8  # of the GPU's memory: more than that is not kept unused


@dataclass(frozen=True)
class Equal:
    """A step whose rows all have as many tokens to encode, and as many targets."""

    rows: int
    context: int
    targets: int
    whole: bool  # what is encoded is all that is known

    @property
    def size(self) -> int:
        return self.rows * (self.context + self.targets)


@dataclass(frozen=True)
class Rounded:
    """A ragged step, rounded up: tokens in all, and at most of a row."""

    context: tuple[int, int]
    targets: tuple[int, int]

    @property
    def size(self) -> int:
        return self.context[0] + self.targets[0]


Shape = Equal | Rounded  # what a step is captured for; equal shapes are the same step


class Graphs:
    """The captured steps of one run, which share their memory.

    Steps of a full context grow, and memory that one of them freed never fits the next. So all that were seen are
    captured together, the largest first: the others then find room in what it took.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: set[Shape] = set()
        self.captured: dict[Shape, torch.cuda.CUDAGraph] = {}

    def play(self, shape: Shape, launch: Callable[[Shape], None]) -> None:
        if shape in self.captured:
            self.captured[shape].replay()
        elif shape in self.seen:
            torch.cuda.empty_cache()  # a capture cannot take what the steps before it left unused
            for one in sorted(self.seen, key=lambda one: one.size, reverse=True):
                self.captured[one] = self._capture(one, launch)
            self.seen.clear()
            self.captured[shape].replay()
        else:
            launch(shape)
            self.seen.add(shape)
            give_back_spare()

    def _capture(self, shape: Shape, launch: Callable[[Shape], None]) -> torch.cuda.CUDAGraph:
        """As torch.cuda.graph does it, without the garbage collection that costs more than the capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            launch(shape)
        finally:
            graph.capture_end()
        return graph


def give_back_spare() -> None:
    """Free what torch keeps of the GPU's memory without using it, if that is much."""
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if unused > SPARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory:
        torch.cuda.empty_cache()
