"""The fast path of sampling: the same distribution as the plain loop, for a fraction of the time."""

from maskless.engine.run import Engine, serves

__all__ = ["Engine", "serves"]
