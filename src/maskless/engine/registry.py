"""The engine of each network, made when it is first needed and again when the weights have changed."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from maskless.engine.engine import Engine
from maskless.nn.calls import ForkSafeLock


@dataclass(frozen=True)
class _Made:
    weights: list[tuple[int, int]]
    engine: Engine


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()
_making = ForkSafeLock()  # threads that come first wait for one engine


def engine_of(network: nn.Module) -> Engine:
    """The network's engine."""
    with _making:
        weights = [(p.data_ptr(), p._version) for p in network.parameters()]
        made = _made.get(network)
        if made is None or made.weights != weights:
            made = _made[network] = _Made(weights, Engine(network))
        return made.engine
