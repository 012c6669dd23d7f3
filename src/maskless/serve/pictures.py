"""Picture requests as drafts, and drafts as answers.

Shapes: h x w cells of the grid, H x W pixels; a row is a BOS and then the grid, row by row.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from maskless.codec.vq import to_images, to_pixels
from maskless.data.image_pixels import decode, fit
from maskless.drafts import Drafts, Step
from maskless.how import How
from maskless.images import class_ids, grid_drafts, grid_of
from maskless.logits import row_keys
from maskless.pictures import nearest_known
from maskless.serve.host import Host
from maskless.serve.texts import sampled

FORMATS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG"}  # by their first bytes
PIXELS = 1 << 22  # of a picture that is sent
NARROWEST = 16  # its longer side by its shorter one, which is scaled to the model's: a line would become gigabytes
GREY = np.uint8(128)  # where nothing is known


@dataclass(frozen=True)
class Canvas:
    """What is known of a picture."""

    tokens: Tensor  # (h, w)
    known: Tensor  # (h, w) bool
    pixels: np.ndarray | None = None  # (H, W, C) bytes of the picture that was sent
    kept: np.ndarray | None = None  # (H, W) bool: pixels of it that come back as they were


def empty(host: Host) -> Canvas:
    """A canvas on which nothing is known."""
    h, w = grid_of(host.model)
    return Canvas(torch.zeros(h, w, dtype=torch.long), torch.zeros(h, w, dtype=torch.bool))


def from_cells(host: Host, tokens: Sequence[Sequence[int | None]]) -> Canvas:
    """Tokens of the grid, row by row, with null for what is to be redrawn."""
    (h, w), codes = grid_of(host.model), host.codec.codes
    if len(tokens) != h or any(len(line) != w for line in tokens):
        raise ValueError(f"tokens: expected {h} rows of {w}, as the model's grid has")
    for token in (token for line in tokens for token in line):
        if token is not None and not 0 <= token < codes:
            raise ValueError(f"a token is {token}: expected 0 to {codes - 1}, or null for a cell to draw")
    known = torch.tensor([[token is not None for token in line] for line in tokens])
    return Canvas(torch.tensor([[token or 0 for token in line] for line in tokens]), known)


def from_image(host: Host, image: str, mask: Sequence[Sequence[bool]]) -> Canvas:
    """A picture as base64 of a PNG or JPEG file, and a mask of cells or pixels that are redrawn."""
    (h, w), codec = grid_of(host.model), host.codec
    H, W = h * codec.factor, w * codec.factor
    if h != w:
        raise ValueError(f"{host.name} draws {w} x {h} cells: images can only be sent to models with a square grid")
    if len({len(line) for line in mask}) != 1 or (len(mask), len(mask[0])) not in ((h, w), (H, W)):
        raise ValueError(f"mask: expected {h} rows of {w} cells, or {H} rows of {W} pixels")
    redrawn = np.array(mask, dtype=bool)
    pixels = fit(read_image(image), H, channels=codec.channels)
    cells = redrawn.reshape(h, redrawn.shape[0] // h, w, redrawn.shape[1] // w).any((1, 3))
    with torch.no_grad():
        tokens = codec.encode(to_images(pixels[None]))[0].cpu()
    kept = ~redrawn.repeat(H // redrawn.shape[0], 0).repeat(W // redrawn.shape[1], 1)
    return Canvas(tokens, torch.from_numpy(~cells), pixels, kept)


def read_image(text: str) -> np.ndarray:
    """The pixels of a PNG or JPEG file in base64, of at most so many pixels."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("image: expected the base64 of a PNG or JPEG file") from None
    format = next((name for start, name in FORMATS.items() if data.startswith(start)), None)
    if format is None:
        raise ValueError("image: expected the base64 of a PNG or JPEG file")
    try:
        with Image.open(io.BytesIO(data), formats=(format,)) as picture:
            size = picture.size
    except Exception as error:  # Pillow raises many kinds about a damaged header
        raise ValueError(f"image: a damaged {format} file ({type(error).__name__})") from None
    if size[0] * size[1] > PIXELS:
        raise ValueError(f"image: {size[0]} x {size[1]} pixels, expected at most {PIXELS:,} in all")
    if max(size) > NARROWEST * min(size):
        raise ValueError(f"image: {size[0]} x {size[1]} pixels, expected an aspect ratio of at most {NARROWEST}")
    try:
        return decode(data)
    except ValueError as error:
        raise ValueError(f"image: {error}") from None


def drafts_of(host: Host, canvas: Canvas, how: How, label: str | int | None) -> Drafts:
    """The one draft of a picture, as `generate_images` and `fill_image` would draw it."""
    dropped = host.model.frame.dropped
    if not (unknown := int((~canvas.known).sum())):
        raise ValueError("nothing to draw: every cell is known")
    ids = None if dropped is None else torch.tensor([dropped])
    if label is not None:
        ids = class_ids(host.model, [label], 1)
    else:
        how = replace(how, guidance=0.0)  # towards no class
    key, how = row_keys(how.seed, torch.zeros(1, dtype=torch.long)), host.within(how, unknown)
    return host.checked(grid_drafts(host.model, ids, key, how, (canvas.tokens[None], canvas.known[None])))


def opening(host: Host, canvas: Canvas, drafts: Drafts) -> dict[str, Any]:
    """What a client can show before anything is drawn."""
    h, w = grid_of(host.model)
    about = {"model": host.name, "steps": drafts.steps, "grid": [h, w], "unknown": int(drafts.wanted.sum())}
    return about | {"known": canvas.known.tolist(), "image": frame(host, canvas, canvas.tokens, canvas.known)}


def landing(host: Host, image: str | None, step: Step) -> dict[str, Any]:
    """What a step sampled, perhaps with a picture of what is known by now."""
    _, w = grid_of(host.model)
    cells = [
        {"row": (place - 1) // w, "column": (place - 1) % w, "token": token, "probability": p}
        for _, place, token, p in sampled(step)
    ]
    return {"step": step.number, "sampled": cells} | ({} if image is None else {"image": image})


def answer(host: Host, canvas: Canvas, drafts: Drafts, seconds: float) -> dict[str, Any]:
    """The finished picture, its tokens, and the step of each."""
    h, w = grid_of(host.model)
    tokens, came = (x[0, len(host.lead) :].unflatten(0, (h, w)) for x in (drafts.tokens, drafts.came))
    names, label = host.model.classes, None if drafts.labels is None else int(drafts.labels[0])
    label = None if label == host.model.frame.dropped else label
    return {
        "model": host.name,
        "label": None if label is None else names[label] if label < len(names) else str(label),
        "steps": drafts.steps,
        "seconds": round(seconds, 4),
        "image": _png(_pixels(host, canvas, tokens)),
        "tokens": tokens.tolist(),
        "cell_steps": came.tolist(),
    }


def frame(host: Host, canvas: Canvas, tokens: Tensor, known: Tensor) -> str:
    """The base64 of a PNG of what is known, grey elsewhere.  (h, w), (h, w)

    A codec lets neighbours mix: what is not known is decoded as the nearest cell that is, so that it does not show.
    """
    factor = host.codec.factor
    shown = known.repeat_interleave(factor, 0).repeat_interleave(factor, 1).numpy()
    return _png(np.where(shown[:, :, None], _pixels(host, canvas, nearest_known(tokens, known)), GREY))


def _pixels(host: Host, canvas: Canvas, tokens: Tensor) -> np.ndarray:
    """Decoded tokens (h, w); pixels that were sent and kept are as they were.  -> (H, W, C) bytes"""
    pixels: np.ndarray = to_pixels(host.codec.decode(tokens[None].to(host.model.device)).cpu())[0].numpy()
    if canvas.pixels is None or canvas.kept is None:
        return pixels
    return np.where(canvas.kept[:, :, None], canvas.pixels, pixels)


def _png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")
