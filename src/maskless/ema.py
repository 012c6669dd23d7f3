"""An exponential moving average of parameters, which is what gets evaluated and shipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class EMA:
    """Averages that start as the parameters and follow them: decay min(decay, (1+n)/(10+n)) after n updates."""

    def __init__(self, parameters: Iterable[Tensor], decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay {decay} is out of range: expected at least 0 and less than 1")
        self.decay, self.updates = decay, 0
        self.averages = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor]) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.averages, [p.detach() for p in parameters], 1 - decay)

    @torch.no_grad()
    def restore(self, averages: list[Tensor], updates: int) -> None:
        """Go on from saved averages, given whole even where the parameters are sharded."""
        for own, saved in zip(self.averages, averages, strict=True):
            if hasattr(own, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                placed = distribute_tensor(saved.to(own.device), own.device_mesh, own.placements)  # type: ignore[attr-defined]
                own.copy_(placed)
            else:
                own.copy_(saved)
        self.updates = updates

    def moved_into(self, parameters: Iterable[Tensor]) -> None:
        """The averages take the place of the parameters for good."""
        self._copy(self.averages, parameters)

    @contextmanager
    def swapped_into(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """The averages stand in the parameters for the time of a with-block."""
        parameters = list(parameters)
        trained = [p.detach().clone() for p in parameters]
        self._copy(self.averages, parameters)
        try:
            yield
        finally:
            self._copy(trained, parameters)

    @staticmethod
    @torch.no_grad()
    def _copy(values: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
        for value, parameter in zip(values, parameters, strict=True):
            parameter.copy_(value)
