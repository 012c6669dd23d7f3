"""Picture requests as rows, and rows as answers.

Shapes: h x w cells of the grid, H x W pixels; a row is a BOS and then the grid, row by row.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from maskless.codec.vq import to_images, to_pixels
from maskless.data.image_pixels import decode, fit
from maskless.images import IMAGE_ORDERS, class_ids, grid_of
from maskless.logits import row_keys
from maskless.order import COUNTS, ORDERS, Order, after_lead, halton
from maskless.pictures import nearest_known
from maskless.plans import plan
from maskless.sampling import Guidance, Truncation
from maskless.serve.host import Host
from maskless.serve.rows import Landed, Row
from maskless.serve.texts import rounded

FORMATS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG"}  # by their first bytes
PIXELS = 1 << 22  # of a picture that is sent
NARROWEST = 16  # its longer side by its shorter one, which is scaled to the model's: a line would become gigabytes
GREY = np.uint8(128)  # where nothing is known


@dataclass(frozen=True, kw_only=True)
class PictureSettings:
    """How to draw; the defaults are those of `images.ImageHow`."""

    label: str | int | None = None
    guidance: float = 0.0
    steps: int | None = None
    seed: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    order: str = "halton"
    counts: str = "arccos"
    noise: float = 5.0
    warmup: int = 1


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
    """Tokens of the grid, row by row, with null for what is to be drawn anew."""
    (h, w), codes = grid_of(host.model), host.codec.codes
    if len(tokens) != h or any(len(line) != w for line in tokens):
        raise ValueError(f"tokens: expected {h} rows of {w}, as the model's grid has")
    for token in (token for line in tokens for token in line):
        if token is not None and not 0 <= token < codes:
            raise ValueError(f"a token is {token}: expected 0 to {codes - 1}, or null for a cell to draw")
    known = torch.tensor([[token is not None for token in line] for line in tokens])
    return Canvas(torch.tensor([[token or 0 for token in line] for line in tokens]), known)


def from_image(host: Host, image: str, mask: Sequence[Sequence[bool]]) -> Canvas:
    """A picture as base64 of a PNG or JPEG file, and a mask of cells or pixels that are drawn anew."""
    (h, w), codec = grid_of(host.model), host.codec
    H, W = h * codec.factor, w * codec.factor
    if h != w:
        raise ValueError(f"{host.name} draws {w} x {h} cells: pictures can be sent to models of squares only")
    if len({len(line) for line in mask}) != 1 or (len(mask), len(mask[0])) not in ((h, w), (H, W)):
        raise ValueError(f"mask: expected {h} rows of {w} cells, or {H} rows of {W} pixels")
    anew = np.array(mask, dtype=bool)
    pixels = fit(read_image(image), H, channels=codec.channels)
    cells = anew.reshape(h, anew.shape[0] // h, w, anew.shape[1] // w).any((1, 3))
    with torch.no_grad():
        tokens = codec.encode(to_images(pixels[None]))[0].cpu()
    kept = ~anew.repeat(H // anew.shape[0], 0).repeat(W // anew.shape[1], 1)
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
        raise ValueError(f"image: {size[0]} x {size[1]} pixels, expected sides that differ {NARROWEST} times at most")
    try:
        return decode(data)
    except ValueError as error:
        raise ValueError(f"image: {error}") from None


def rows_of(host: Host, canvas: Canvas, settings: PictureSettings) -> list[Row]:
    """The one row of a picture, as `generate_images` and `fill_image` would draw it."""
    (h, w), classes = grid_of(host.model), host.model.config.classes
    known = torch.cat([torch.ones(1, dtype=torch.bool), canvas.known.flatten()])[None]
    unknown = int((~known).sum())
    if not unknown:
        raise ValueError("nothing to draw: every cell is known")
    if settings.order not in IMAGE_ORDERS:
        raise ValueError(f"unknown order {settings.order!r}: expected one of {', '.join(IMAGE_ORDERS)}")
    asked = min(32, host.limits.steps) if settings.steps is None else settings.steps
    if asked > host.limits.steps:
        raise ValueError(f"{asked} steps are more than the server allows: {host.limits.steps}")
    key = row_keys(settings.seed, torch.zeros(1, dtype=torch.long))
    inner: Order = {"halton": halton((h, w)), "raster": ORDERS["left"]}.get(settings.order, ORDERS["random"])
    made = plan(
        known, ~known, key, steps=min(asked, unknown), order=after_lead(inner, 1), counts=COUNTS[settings.counts]
    )
    confident = settings.order == "confidence"
    label = None if settings.label is None else int(class_ids(host.model, [settings.label], 1)[0])
    guidance = Guidance(weight=settings.guidance if label is not None else 0.0, dropped=classes)
    bos = torch.tensor([host.codec.codes + 1])
    row = Row(
        tokens=torch.cat([bos, canvas.tokens.flatten()]),
        plan=made,
        key=key[0],
        truncation=Truncation(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
        confident=confident,
        noise=settings.noise if confident else 0.0,
        warmup=settings.warmup,
        label=label,
        weights=guidance.weights(made)[0].tolist() if guidance.weight else (),
    )
    return [row]


def opening(host: Host, canvas: Canvas, row: Row) -> dict[str, Any]:
    """What a client can show before anything is drawn."""
    h, w = grid_of(host.model)
    about = {"model": host.name, "steps": row.steps, "grid": [h, w], "unknown": row.left()}
    return about | {"known": canvas.known.tolist(), "image": frame(host, canvas, canvas.tokens, canvas.known)}


def landing(host: Host, image: str | None, steps: list[tuple[int, Landed]]) -> dict[str, Any]:
    """What a step decided, perhaps with a picture of what is known by now."""
    _, w = grid_of(host.model)
    (_, landed) = steps[0]
    decided = [
        {"row": (place - 1) // w, "column": (place - 1) % w, "token": token, "probability": rounded(chance)}
        for place, token, chance in zip(landed.positions, landed.tokens, landed.probabilities, strict=True)
    ]
    return {"step": landed.step, "decided": decided} | ({} if image is None else {"image": image})


def answer(host: Host, canvas: Canvas, row: Row, seconds: float) -> dict[str, Any]:
    """The finished picture, its tokens, and the step of each."""
    h, w = grid_of(host.model)
    tokens, came = row.tokens[1:].unflatten(0, (h, w)), torch.tensor(row.came[1:]).unflatten(0, (h, w))
    names = host.model.classes
    return {
        "model": host.name,
        "label": None if row.label is None else names[row.label] if row.label < len(names) else str(row.label),
        "steps": row.steps,
        "seconds": round(seconds, 4),
        "image": _png(_pixels(host, canvas, tokens)),
        "tokens": tokens.tolist(),
        "came": came.tolist(),
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
