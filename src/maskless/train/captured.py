"""The forward and backward pass of a step as one CUDA graph: thousands of kernels, and none waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maskless.problems import Problems


class Piece(Protocol):
    """What a pass is over: problems, and what is asked about them."""

    @property
    def problems(self) -> Problems: ...

    def map(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The same with every tensor changed: moved, copied."""


Pass = Callable[[Any, Tensor], Tensor]  # of a piece and a scale


class Captured:
    """A pass over tasks that, on CUDA, is computed once, then captured, and replayed from then on.

    step: gives the loss of a task times a scale (), and its gradients to the parameters, which have none before. A task
    of other shapes than the first is computed as it comes. (The first pass compiles what the graph needs.)
    """

    def __init__(self, step: Pass, parameters: Iterable[nn.Parameter], device: torch.device, *, enabled: bool):
        self.step, self.parameters, self.device = step, list(parameters), device
        self.enabled = enabled and device.type == "cuda"
        self.kind: tuple[object, ...] = ()  # of the first task
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, task: Piece, scale: float) -> Tensor:
        """The scaled loss of a task that lies on the CPU or on the device."""
        if not self.enabled:
            return self._plain(task, scale)
        kind, self.kind = self.kind, self.kind or _kind(task)
        if kind != _kind(task):
            return self._plain(task, scale)
        if self.graph is None:
            self._capture(task)
        assert self.graph is not None
        for own, new in zip(_tensors(self.task), _tensors(task), strict=True):
            own.copy_(new, non_blocking=True)
        self.scale.fill_(scale)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.loss.clone()

    def _plain(self, task: Piece, scale: float) -> Tensor:
        task = task.map(lambda x: x.to(self.device, non_blocking=True))
        return self.step(task, torch.full((), scale, device=self.device)).detach()

    def _capture(self, task: Piece) -> None:
        self.task = task.map(lambda x: x.to(self.device, copy=True))
        self.scale = torch.ones((), device=self.device)
        for parameter in self.parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        # The thread that reads ahead may pin memory meanwhile; unused memory is given back first.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.loss = self.step(self.task, self.scale).detach()
        self.graph = graph
        self.gradients = [parameter.grad for parameter in self.parameters]


def _tensors(task: Piece) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    task.map(note)
    return found


def _kind(task: Piece) -> tuple[object, ...]:
    """What a captured step depends on besides the values of its tensors."""
    spans = task.problems.offsets, task.problems.target_offsets
    shapes = (tuple(x.shape) for x in _tensors(task))
    return (*shapes, *((span.total, span.longest, span.equal) for span in spans))
