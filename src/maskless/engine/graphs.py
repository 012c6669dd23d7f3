"""Captured steps: the first of a kind is computed, the second captured, the others replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SPARE = 1 / 8  # of the GPU's memory: more than that is not kept unused


@dataclass(frozen=True)
class Step:
    """What a step launches, and how many tokens and targets it has."""

    launch: Callable[[], None]
    size: int


class Graphs:
    """The captured steps of one run, which share their memory.

    Steps of a full context grow, and memory that one of them freed never fits the next. So all that were seen are
    captured together, the largest first: the others then find room in what it took.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: dict[tuple[object, ...], Step] = {}
        self.captured: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}

    def play(self, kind: tuple[object, ...], step: Step) -> None:
        if kind in self.captured:
            self.captured[kind].replay()
        elif kind in self.seen:
            self._capture_seen()
            self.captured[kind].replay()
        else:
            step.launch()
            self.seen[kind] = step
            give_back_spare()

    def _capture_seen(self) -> None:
        torch.cuda.empty_cache()  # a capture cannot take what the steps before it left unused
        for kind in sorted(self.seen, key=lambda kind: self.seen[kind].size, reverse=True):
            self.captured[kind] = self._capture(self.seen[kind].launch)
        self.seen.clear()

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """As torch.cuda.graph does it, without the garbage collection that costs more than the capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        return graph


def give_back_spare() -> None:
    """Free what torch keeps of the GPU's memory without using it, if that is much."""
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if unused > SPARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory:
        torch.cuda.empty_cache()
