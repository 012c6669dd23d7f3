"""Inpaint: redraw part of an image several times, side by side in one PNG.

python examples/inpaint.py cifar10 --label horse
python examples/inpaint.py runs/photos cat.png --box 16,0,48,32 --label cat --out samples.png

Without an image, the model draws one of the label first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

import maskless
from maskless import pictures
from maskless.codec.vq import ImageCodec


def main() -> None:
    parser = argparse.ArgumentParser(description="Redraw part of an image with an image model.")
    parser.add_argument(
        "model", help="a shipped model such as cifar10, or the folder of a run or model (docs/images.md)"
    )
    parser.add_argument(
        "picture", nargs="?", type=Path, help="an image; its middle square is resized to the model's size"
    )
    parser.add_argument(
        "--box", help="LEFT,TOP,RIGHT,BOTTOM in pixels of the model's size: what to redraw (the middle)"
    )
    parser.add_argument("--label", help="its class, by name")
    parser.add_argument("--n", type=int, default=4, help="samples (4)")
    parser.add_argument("--guidance", type=float, help="guidance scale (default: the model's)")
    parser.add_argument("--out", type=Path, default=Path("samples.png"), help="the PNG to write (samples.png)")
    given = parser.parse_args()
    try:
        model = maskless.load(given.model)
        if not isinstance(model.codec, ImageCodec):
            raise ValueError(f"{given.model} has no codec: expected an image model")
        width, height = (cells * model.codec.factor for cells in reversed(model.config.grid))
        before = drawn(model, given.label) if given.picture is None else Image.open(given.picture)
        before = ImageOps.fit(before.convert("L" if model.codec.channels == 1 else "RGB"), (width, height))
        known = outside(given.box, width, height)
        how = {"known": known, "label": given.label} | ({} if given.guidance is None else {"guidance": given.guidance})
        after = []
        for seed in range(given.n):
            after.append(maskless.fill(model, before, seed=seed, **how).image)
            print(f"sample {seed + 1} of {given.n}")
        sheet = torch.from_numpy(np.stack([np.asarray(image.convert("RGB")) for image in (before, *after)]))
        names = ["before", *(f"sample {i + 1}" for i in range(given.n))]
        pictures.grid(sheet, given.out, labels=names, columns=len(names))
        print(f"{given.out}: the image, and {given.n} samples of {int((~known).sum())} of its pixels")
    except (ValueError, OSError) as error:
        parser.error(f"{error.filename}: {error.strerror}" if isinstance(error, FileNotFoundError) else str(error))


def drawn(model: maskless.Model, label: str | None) -> Image.Image:
    """An image of the label, or of the first class."""
    (picture,) = maskless.generate(model, **({"n": 1} if label is None else {"labels": [label]}))
    return picture.image


def outside(box: str | None, width: int, height: int) -> np.ndarray:
    """Which pixels stay: those outside the box.  -> (height, width) bool"""
    if box is None:
        box = f"{width // 4},{height // 4},{width - width // 4},{height - height // 4}"
    try:
        left, top, right, bottom = (int(number) for number in box.split(","))
    except ValueError:
        raise ValueError(f"box {box!r}: expected LEFT,TOP,RIGHT,BOTTOM") from None
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise ValueError(f"box {box!r} does not lie in an image of {width} x {height} pixels")
    known = np.ones((height, width), dtype=bool)
    known[top:bottom, left:right] = False
    return known


if __name__ == "__main__":
    main()
