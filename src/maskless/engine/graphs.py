"""Captured steps: the first of a kind is computed, the second captured, the others replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Graphs:
    """The captured steps of one run, which share their memory."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: set[tuple[object, ...]] = set()
        self.captured: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}

    def play(self, kind: tuple[object, ...], step: Callable[[], None]) -> None:
        if kind not in self.seen:
            self.seen.add(kind)
            step()
            return
        if kind not in self.captured:
            self.captured[kind] = self._capture(step)
        self.captured[kind].replay()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """As torch.cuda.graph does it, without the garbage collection that costs more than the capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
        return graph
