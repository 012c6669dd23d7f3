"""Tiny models over bytes, decided enough that a change of context shows in their samples."""

from collections.abc import Callable

from torch import nn

from maskless import Model
from maskless.codec.text import byte_codec

L = 20
KINDS = ["position", "mean", "logsumexp", "ordered", "masked"]


def over_bytes(tiny: Callable[..., nn.Module], kind: str) -> Model:
    return Model(tiny(kind, scale=0.25, vocab=257 + (kind == "masked"), length=L), byte_codec())
