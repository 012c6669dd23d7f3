"""Pictures from a model with classes: drawn by label, or filled in around what is known.

A sequence is a BOS and then the grid of tokens, row by row.

Shapes: B pictures, h x w cells of the grid, L = 1 + h*w, H x W pixels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from maskless.checkpoint import Model, check_ids
from maskless.codec.vq import ImageCodec, to_images, to_pixels
from maskless.decide import decide, drafts_of
from maskless.drafts import Drafts, OnStep, numbered_from
from maskless.how import How, check_positive
from maskless.logits import row_keys


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture that remembers its class, its tokens and how they came."""

    image: Image.Image
    label: str | None
    tokens: Tensor  # (h, w)
    steps: Tensor  # (h, w) the step that decided each cell, -1 where it was given

    def _repr_png_(self) -> Any:
        return self.image._repr_png_()


def generate_images(
    model: Model,
    labels: Sequence[str | int] | str | int | None = None,
    n: int | None = None,
    *,
    first: int = 0,
    batch: int = 64,
    on_step: OnStep | None = None,
    **how: Any,
) -> list[Picture]:
    """A picture for each label, by name or number; without labels n of them, of classes in turn.

    Picture i of a seed is the same whatever is drawn beside it; `first` begins at another picture, so that processes
    can share a seed. The other keywords are those of `How`.
    """
    settings, ids = How(**how), class_ids(model, labels, n, first)
    check_positive(batch=batch)
    pictures: list[Picture] = []
    for begin in range(0, len(ids), batch):
        part = ids[begin : begin + batch]
        watch = None if on_step is None else numbered_from(begin, on_step)
        pictures += draw(model, part, first + begin + torch.arange(len(part)), settings, watch)
    return pictures


def fill_image(
    model: Model,
    image: Image.Image | np.ndarray,
    known: np.ndarray | Tensor | None,
    label: str | int | None = None,
    *,
    on_step: OnStep | None = None,
    **how: Any,
) -> Picture:
    """The picture with everything drawn again that is not known; known (H, W): which pixels stay.

    A cell stays if all its pixels do. Pixels that are known come back as they were. The other keywords are those of
    `How`.
    """
    settings, codec = How(**how), codec_of(model)
    if known is None:
        raise ValueError("known= is missing: expected a mask of the picture's pixels, true for those that stay")
    pixels, (h, w) = _pixels(image, codec.channels), grid_of(model)
    mask = torch.as_tensor(np.asarray(known, dtype=bool))
    H, W = h * codec.factor, w * codec.factor
    if pixels.shape[1:3] != (H, W) or mask.shape != (H, W):
        given = f"a picture of {tuple(pixels.shape[1:3])} pixels with a mask of {tuple(mask.shape)}"
        raise ValueError(f"{given}: expected {H} x {W} of both")
    cells = mask.unflatten(1, (w, -1)).unflatten(0, (h, -1)).all(3).all(1)[None]  # (1, h, w)
    tokens = codec.encode(to_images(pixels)).cpu()
    ids = dropped(model, 1) if label is None else class_ids(model, [label], 1)
    (filled,) = draw(model, ids, torch.zeros(1, dtype=torch.long), settings, on_step, (tokens, cells))
    drawn = _pixels(filled.image, codec.channels)
    kept = np.where(mask.numpy()[None, :, :, None], pixels, drawn)
    return replace(filled, image=_image(kept[0]))


def class_ids(model: Model, labels: Sequence[str | int] | str | int | None, n: int | None, first: int = 0) -> Tensor:
    """Numbers of labels given by name or number; without labels n of them in turn, as from picture `first`.  -> (B,)"""
    count = model.config.classes
    if labels is None:
        if n is None or n < 1:
            raise ValueError(f"n {n} is out of range: expected 1 or more, or labels")
        unnamed = count == 1 and not model.classes  # MaskGIT without classes: only "none" was trained
        return dropped(model, n) if count is None or unnamed else (first + torch.arange(n)) % count
    if count is None:
        raise ValueError("this model knows no classes: expected no labels")
    given: Any = labels.tolist() if isinstance(labels, Tensor | np.ndarray | np.generic) else labels
    labels = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if n is not None and n != len(labels):
        raise ValueError(f"n {n} and {len(labels)} labels: expected one of the two")
    names = {name: i for i, name in enumerate(model.classes)}
    ids = torch.tensor([_class_id(label, names, count) for label in labels], dtype=torch.long)
    check_ids("label", ids, count)
    return ids


def _class_id(label: Any, names: dict[str, int], count: int) -> int:
    if isinstance(label, str):
        if label not in names:
            raise ValueError(f"unknown label {label!r}: expected one of {', '.join(names) or f'0 to {count - 1}'}")
        return names[label]
    try:
        return operator.index(label)  # a whole number of any library
    except TypeError:
        raise ValueError(f"a label is {label!r}: expected a name, or a whole number from 0 to {count - 1}") from None


def dropped(model: Model, n: int) -> Tensor:
    """The label that stands for none, n times."""
    return torch.full((n,), model.config.classes or 0)


def grid_of(model: Model) -> tuple[int, int]:
    """Rows and columns of cells; a ValueError where there are none."""
    if model.frame.grid is None:
        raise ValueError("this is not an image model: its configuration has no grid")
    h, w = model.frame.grid
    return h, w


def codec_of(model: Model) -> ImageCodec:
    if not isinstance(model.codec, ImageCodec):
        raise ValueError("this model brings no codec for pictures")
    return model.codec


Given = tuple[Tensor, Tensor]  # tokens, and which of them are known, (B, h, w) both


def grid_drafts(model: Model, ids: Tensor | None, keys: Tensor, how: How, given: Given) -> Drafts:
    """Drafts of grids of which some cells are given; ids (B,) of classes, keys (B,) from `row_keys`."""
    (tokens, known), lead = given, torch.tensor(model.lead).expand(len(keys), -1)
    rows = torch.cat([lead, tokens.flatten(1)], 1)
    known = torch.cat([torch.ones_like(lead, dtype=torch.bool), known.flatten(1)], 1)
    return drafts_of(model, rows, known, keys, how, labels=ids)


def draw(
    model: Model, ids: Tensor, numbers: Tensor, how: How, on_step: OnStep | None = None, given: Given | None = None
) -> list[Picture]:
    """A picture of each class, ids (B,), as `generate_images` draws it at its number (B,); given: cells that stay."""
    (h, w), codec = grid_of(model), codec_of(model)
    blank = torch.zeros(len(ids), h, w, dtype=torch.bool)
    labels = None if model.frame.dropped is None else ids
    drafts = grid_drafts(model, labels, row_keys(how.seed, numbers), how, given or (blank.long(), blank))
    done = decide(model, drafts, on_step)
    cells, came = (x[:, len(model.lead) :].unflatten(1, (h, w)) for x in (done.tokens, done.steps))
    pixels = to_pixels(codec.decode(cells.to(model.device)).cpu())
    names = [model.classes[i] if i < len(model.classes) else None for i in ids.tolist()]
    parts = zip(pixels.numpy(), names, cells, came, strict=True)
    return [Picture(_image(image), name, token, step) for image, name, token, step in parts]


def _pixels(image: Image.Image | np.ndarray, channels: int) -> np.ndarray:
    """A picture as bytes.  -> (1, H, W, C)"""
    if isinstance(image, Image.Image):
        image = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    if isinstance(image, str | Path):
        raise ValueError(f"a picture is {str(image)!r}: expected a PIL image (Image.open), or bytes (uint8)")
    array = np.array(image)  # a copy: that of a PIL image cannot be written to, which torch does not like
    if array.dtype != np.uint8:
        raise ValueError(f"a picture of {array.dtype}: expected bytes (uint8) or a PIL image")
    return (array[:, :, None] if array.ndim == 2 else array)[None]


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def pixels_of(pictures: Sequence[Picture]) -> Tensor:
    """Pictures of one size as bytes.  -> (N, H, W, C) uint8"""
    return torch.from_numpy(np.stack([np.atleast_3d(np.asarray(one.image)) for one in pictures]))
