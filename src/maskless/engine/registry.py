"""The engine of each network, made when it is first needed and again when a weight has changed, in whatever way.

torch counts the changes of a tensor, but not those made through `.data`, as when an adapter is merged into the weights.
So each call adds up the bits of all weights: it takes little longer than reading them, as every step of a sample does.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from maskless.engine import kernels
from maskless.engine.engine import Engine
from maskless.nn.calls import ForkSafeLock
from maskless.nn.threads import READING, threads_for

SPAN = 64  # numbers that are added up
SOME = 8  # every so many stretches are added up by place as well
SMALL = 4096  # weights
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


@dataclass(frozen=True)
class _Made:
    """An engine, and what the weights were like."""

    sums: Tensor
    engine: Engine

    def fits(self, network: nn.Module) -> bool:
        sums = sums_of(network)
        return sums.device == self.sums.device and torch.equal(sums, self.sums)


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()
_making = ForkSafeLock()  # threads that come first wait for one engine


def engine_of(network: nn.Module) -> Engine:
    """The network's engine, with the weights that it has now."""
    made = _made.get(network)
    if made is None or not made.fits(network):
        with _making:
            made = _made.get(network)
            if made is None or not made.fits(network):  # nobody else was faster
                made = _made[network] = _Made(sums_of(network), Engine(network))
    return made.engine


@torch.no_grad()
def sums_of(network: nn.Module) -> Tensor:
    """Sums of the bits of all weights, modulo 2^64: of each stretch of SPAN numbers, and of each place in some of them.

    They are whole numbers, so the order of adding up does not matter. The first differ where a weight does, the others
    where columns have changed places. Of small tensors every number stands for itself.
    """
    small: list[Tensor] = []
    large: list[Tensor] = []
    there: list[Tensor] = []  # on a GPU, where one kernel reads them all
    for weight in (*network.parameters(), *network.buffers()):
        if kernels.digestible(weight):
            there.append(weight)
        else:
            (small if weight.numel() < SMALL and weight.dtype == torch.float32 else large).append(weight)
    parts = [kernels.digest(there)] if there else []
    parts += [torch.cat([weight.flatten() for weight in small]).view(torch.int32).long()] if small else []
    with threads_for(READING * sum(weight.numel() for weight in large)):
        for weight in large:
            bits = _bits(weight)
            whole = len(bits) // SPAN * SPAN
            stretches = bits[:whole].view(-1, SPAN)
            parts += [stretches.sum(1), stretches[::SOME].sum(0), bits[whole:].long()]
        return torch.cat(parts)


def _bits(x: Tensor) -> Tensor:
    """All numbers of a tensor as whole ones, two or more of them as one where that can be."""
    wide = 8 // x.element_size()
    even = x.numel() % wide == 0 and x.storage_offset() % wide == 0
    return x.flatten().view(torch.int64 if even else INTEGERS[x.element_size()])
