"""maskless: partition generative models. Generation in parallel and in any order, without a mask token."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from maskless.version import __version__

if TYPE_CHECKING:
    from maskless.api import Picture, Sampled, Text, fill, generate, load, log_likelihood
    from maskless.checkpoint import Model

__all__ = ["Model", "Picture", "Sampled", "Text", "__version__", "fill", "generate", "load", "log_likelihood"]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: the command line answers --help without loading torch."""
    if name not in __all__:
        raise AttributeError(f"module 'maskless' has no attribute {name!r}")
    return getattr(importlib.import_module("maskless.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
