"""Spikes: optimiser steps that are left out because their gradient is far above what it was of late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WINDOW = 64  # gradient norms whose median counts
LEAST = 16  # of them, before anything is a spike
IN_A_ROW = 20  # spikes that end a run: its gradients do not come back


class Spikes:
    """Finds and counts spikes, on the device: no step waits for it. Every process has the same norms, so all agree."""

    def __init__(self, factor: float, device: torch.device):
        """factor: a spike has a norm of more than so many times the median."""
        self.factor = factor
        self.norms = torch.full((WINDOW,), torch.nan, device=device)  # the latest, without those of spikes
        self.total, self.row = torch.zeros(2, device=device)  # how many there were, and how many just now in a row

    def found(self, norm: Tensor) -> Tensor:
        """Whether a step with this gradient norm is a spike.  () -> () float, 1 if it is"""
        known = (~self.norms.isnan()).sum() >= LEAST
        spike = known & (norm > self.factor * self.norms.nanmedian())
        self.norms = torch.where(spike, self.norms, torch.cat([self.norms[1:], norm.detach()[None].float()]))
        self.total, self.row = self.total + spike, (self.row + 1) * spike
        return spike.float()

    def state(self) -> dict[str, Any]:
        return {"norms": self.norms.tolist(), "total": self.total.item(), "row": self.row.item()}

    def restore(self, found: dict[str, Any]) -> None:
        device, names = self.norms.device, ("norms", "total", "row")
        self.norms, self.total, self.row = (torch.as_tensor(found[name], device=device) for name in names)
