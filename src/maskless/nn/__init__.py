"""The networks: each answers prediction problems with logits at the targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from maskless.problems import Problems

Network = Callable[[Problems], Tensor]


def device_of(network: Network) -> torch.device:
    """Where a network computes; a plain function computes on the CPU."""
    parameters = network.parameters() if isinstance(network, torch.nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))


def autocast(device: torch.device, *, enabled: bool = True) -> torch.autocast:
    """The one place that decides precision: matrix products in bfloat16 on CUDA, float32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and device.type == "cuda")
