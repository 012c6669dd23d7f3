"""What a sequence of a model looks like: what leads it, what is never drawn, and the grid and classes of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.codec.text import TextCodec, starts_with_space
from maskless.codec.vq import ImageCodec


@dataclass(frozen=True, eq=False)
class Frame:
    """What holds for every sequence of a model. Text and images part ways here."""

    lead: tuple[int, ...] = ()  # ids that begin every sequence
    never: tuple[int, ...] = ()  # ids that are not drawn: a mask, a BOS, ids without a text
    grid: tuple[int, int] | None = None  # rows and columns of an image; None: text
    dropped: int | None = None  # the label that stands for none, where there are labels
    begins: Tensor | None = None  # (V,) bool: tokens that begin with a space

    @staticmethod
    def of(codec: TextCodec | ImageCodec | None, layout: str, config: object) -> Frame:
        """Of a model; config: its network's."""
        vocab, dropped = int(config.vocab), getattr(config, "classes", None)  # type: ignore[attr-defined]
        if layout == "image":
            if codec is None or isinstance(codec, TextCodec):
                return Frame(grid=getattr(config, "grid", None), dropped=dropped)
            mask, bos = codec.codes, codec.codes + 1
            never = tuple(i for i in (mask, bos) if i < vocab)
            return Frame(lead=(bos,), never=never, grid=getattr(config, "grid", None), dropped=dropped)
        if not isinstance(codec, TextCodec):
            return Frame()
        begins = None
        if codec.byte_level:
            begins = torch.zeros(vocab, dtype=torch.bool)
            begins[: codec.vocab] = torch.tensor(starts_with_space(codec))
        lead = () if layout == "packed" or codec.bos is None else (codec.bos,)
        return Frame(lead=lead, never=tuple(range(codec.vocab, vocab)), begins=begins)
