"""Sizes that nobody gave: tokenizer, network and steps derived from how much text there is and what computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from maskless.checkpoint import NETWORKS
from maskless.codec.text import TextCodec
from maskless.data.image_tokens import PreparedImages
from maskless.train.config import IMAGE_MODELS, MODELS, TEXT_MODELS


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A whole set of sizes for a text."""

    vocab: int | None  # of a BPE trained on the text; None: bytes
    length: int
    width: int
    layers: int
    batch: int
    steps: int
    learning_rate: float


def plan(characters: int, device: torch.device, minutes: float | None = None) -> Sizes:
    """Sizes for this much text on this kind of device.

    One dial, the text's size, sets the vocabulary; the device sets how large a network it can train in minutes. The
    steps pass the text at most 40 times (a small text is learned by heart long before) unless minutes are given.
    """
    large = device.type == "cuda"
    vocab = None if characters < 50_000 else 2 ** min(13, max(9, round(math.log2(characters / 400))))
    length = 256 if large else 64
    while length > 16 and characters < 400 * length:
        length //= 2
    width, layers, batch = (512, 12, 256) if large else (128, 4, 32)
    tokens = characters if vocab is None else characters / 3.5
    most = 1_500_000_000 if large else 4_000_000
    steps = max(50, int(min(40 * tokens, most) / (batch * length)))
    if minutes is not None:
        steps = 10_000_000  # the clock decides
    rate = 1e-3 if large else 2e-3
    return Sizes(vocab=vocab, length=length, width=width, layers=layers, batch=batch, steps=steps, learning_rate=rate)


# The parts of a Partition Transformer, unless others are asked for.
PLAIN = {"context": "full", "queries": "position", "swap": "released", "neighbours": 0, "rope": "1d"}


def network_config(model: str, codec: TextCodec, length: int, *, rope: str = "1d", **sizes: Any) -> Any:
    """The configuration of the network that `--model` names, for a tokenizer; sizes: as `_sizes` takes them."""
    if model not in TEXT_MODELS:
        raise ValueError(f"unknown model {model!r}: expected one of {', '.join(TEXT_MODELS)}")
    if rope != "1d":
        raise ValueError(f"rope {rope!r} is for pictures: a text has one dimension")
    make, found = _sizes(model, length, **sizes)
    if MODELS[model][0] != "masked":
        return make(vocab=codec.vocab, **found)
    mask = codec.vocab if codec.mask is None else codec.mask
    return make(vocab=max(codec.vocab, mask + 1), mask=mask, **found)


def image_network_config(model: str, data: PreparedImages, *, width: int, **sizes: Any) -> Any:
    """The configuration of the network that `--model` names, for prepared pictures; as the released ones are built."""
    if model not in IMAGE_MODELS:
        raise ValueError(f"model {model!r} for pictures: expected one of {', '.join(IMAGE_MODELS)}")
    make, found = _sizes(model, data.length, width=width, **sizes)
    if model == "maskgit":
        classes = max(1, len(data.classes))
        return make(vocab=data.mask + 1, mask=data.mask, classes=classes, grid=data.grid, **found)
    condition = width if data.classes else 128
    given = {"classes": len(data.classes) or None, "condition": condition, "registers": True, "grid": data.grid}
    return make(vocab=data.vocab, never=data.mask, **given, **found)


def _sizes(
    model: str,
    length: int,
    *,
    width: int,
    layers: int,
    encoder: int | None = None,
    heads: int | None = None,
    dropout: float = 0.1,
    **kinds: Any,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes the configuration of a network, and the sizes that networks of text and of pictures share.

    layers: in all; a Partition Transformer has half of them in its encoder unless `encoder` says otherwise. kinds: of
    its parts, as in `PLAIN`.
    """
    kind = MODELS[model][0]
    if kind != "partition" and (PLAIN | kinds != PLAIN or encoder is not None):
        names = "context, queries, swap, neighbours" + ", rope" * (model in IMAGE_MODELS)
        raise ValueError(f"{names} and encoder belong to pgm: the model is {model}")
    least = 2 if kind == "partition" else 1
    if layers < least:
        raise ValueError(f"layers {layers} is out of range: expected {least} or more for {model}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout} is out of range: expected at least 0 and less than 1")
    heads = heads or max(1, width // (64 if width >= 256 else 32))
    sizes: dict[str, Any] = {"length": length, "width": width, "heads": heads, "dropout": dropout}
    if kind != "partition":
        return NETWORKS[kind][0], sizes | {"layers": layers}
    encoder = layers // 2 if encoder is None else encoder
    if not 0 < encoder < layers:
        raise ValueError(f"encoder {encoder} of {layers} layers: expected 1 to {layers - 1}")
    return NETWORKS[kind][0], sizes | {"encoder": encoder, "decoder": layers - encoder} | kinds
