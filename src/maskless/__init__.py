"""maskless: partition generative models. Generation in parallel and in any order, without a mask token."""

from maskless.api import Sampled, Text, fill, generate, load, log_likelihood
from maskless.checkpoint import Model
from maskless.version import __version__

__all__ = ["Model", "Sampled", "Text", "__version__", "fill", "generate", "load", "log_likelihood"]
