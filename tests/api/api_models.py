"""Tiny models over bytes and of pictures, decided enough that a change of context shows in their samples."""

from collections.abc import Callable

from torch import nn

from maskless import Model
from maskless.codec.text import byte_codec
from maskless.codec.vq import PixelCodec

L = 20
KINDS = ["position", "mean", "logsumexp", "ordered", "masked"]


def over_bytes(tiny: Callable[..., nn.Module], kind: str) -> Model:
    return Model(tiny(kind, scale=0.25, vocab=257 + (kind == "masked"), length=L), byte_codec())


def of_pictures(tiny: Callable[..., nn.Module]) -> Model:
    """Of 3 x 3 cells in five levels of grey."""
    network = tiny("position", scale=0.3, vocab=7, length=10, classes=2, grid=(3, 3), registers=True)
    return Model(network, PixelCodec(5), "image", ["dog", "cat"])
