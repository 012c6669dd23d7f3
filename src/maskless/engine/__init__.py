"""The fast path of sampling: the same distribution as the plain loop, for a fraction of the time."""

from maskless.engine.engine import Engine, engine_of
from maskless.engine.networks import serves

__all__ = ["Engine", "engine_of", "serves"]
