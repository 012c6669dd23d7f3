"""One picture at a time: the bytes of a file to pixels, and pixels to a square of a given size.

Shapes: H, W height and width, s the side of a square, C channels: 3, or 1 for grey.
Pixels are uint8: (H, W) grey, or (H, W, 3) red, green and blue.
"""

from __future__ import annotations

import io
import warnings
from contextlib import suppress

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from maskless.terminal import first_line

FILTER = "bilinear"
FILTERS = {name: Image.Resampling[name.upper()] for name in ("bilinear", "bicubic", "lanczos", "box")}
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # by content; others run programs (EPS: Ghostscript)
LARGEST = 1 << 26  # pixels of a picture after resizing: a thread of a picture would grow without bound

# `decode` refuses such a picture itself. Once for all: it runs in threads, which share the list of filters.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def decode(data: bytes) -> np.ndarray:
    """The pixels of a picture file, upright, of the first frame.  (H, W) or (H, W, 3)

    Palettes and CMYK become RGB; 16 bits a channel become 8; what is transparent is laid on white. A damaged file, or
    one above Pillow's limit of 89 million pixels, is a ValueError with the reason.
    """
    if not data:
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            limit = Image.MAX_IMAGE_PIXELS
            if limit and picture.width * picture.height > limit:  # Pillow raises from twice that
                raise ValueError(f"{picture.width}x{picture.height} pixels: above Pillow's limit of {limit:,}")
            picture.load()
            with suppress(Exception):  # the metadata may be damaged where the picture is not
                ImageOps.exif_transpose(picture, in_place=True)
            return eight_bits(picture)
    except UnidentifiedImageError as error:
        raise ValueError("not a picture that Pillow can read") from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise a dozen kinds about damaged files
        raise ValueError(first_line(error)) from error


def eight_bits(picture: Image.Image) -> np.ndarray:
    """The pixels of a picture of any mode.  (H, W) or (H, W, 3)"""
    if picture.mode.startswith("I"):  # 16 bits, which older versions of Pillow keep in 32
        return _narrow(np.asarray(picture))
    if picture.mode == "F":
        values = np.asarray(picture)
        if not (values.min() >= 0 and values.max() <= 1):
            raise ValueError(f"float pixels from {values.min()} to {values.max()}: expected 0 to 1")
        return np.rint(values * 255).astype(np.uint8)
    if picture.mode.lower() in ("rgba", "la", "pa") or "transparency" in picture.info:
        seen = picture.convert("RGBA")
        return np.array(Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB"))
    return np.array(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))


def _narrow(values: np.ndarray) -> np.ndarray:
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"pixels from {values.min()} to {values.max()}: expected at most 16 bits")
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 = 257 * 255, rounded


def as_pixels(values: np.ndarray) -> np.ndarray:
    """An element of an array as pixels: channels first or last, 1, 3 or 4 of them, 8 or 16 bits."""
    if values.dtype == np.uint16:
        values = _narrow(values)
    if values.ndim == 3 and values.shape[-1] not in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[-1] == 4:
        return eight_bits(Image.fromarray(np.ascontiguousarray(values)))
    return values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values


def check_fit(size: int, filter: str, channels: int) -> None:
    """Raises for what `fit` cannot do with any picture."""
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels}: expected 3, or 1 for grey pictures")
    if size < 1:
        raise ValueError(f"size is {size}: expected 1 or more pixels a side")
    if filter not in FILTERS:
        raise ValueError(f"unknown filter {filter!r}: expected {', '.join(FILTERS)}")


def fit(pixels: np.ndarray, size: int, filter: str = FILTER, channels: int = 3) -> np.ndarray:
    """The centre square of a picture: the shorter side resized to `size`, then cropped.  -> (s, s, C)

    As torchvision's Resize(size) and CenterCrop(size) do on Pillow images, with its default filter, which the released
    code took: bilinear over a support that grows with the reduction, that is, antialiased.
    """
    height, width = pixels.shape[:2]
    short = min(height, width)
    if short == 0:
        raise ValueError(f"a picture of {width}x{height} pixels")
    wide, high = size * width // short, size * height // short
    if wide * high > LARGEST:
        raise ValueError(f"{width}x{height} pixels: too narrow to resize its shorter side to {size}")
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if channels == 1:
        image = image.convert("L")
    if (wide, high) != (width, height):
        image = image.resize((wide, high), FILTERS[filter])
    left, top = round((wide - size) / 2), round((high - size) / 2)
    square = np.asarray(image)[top : top + size, left : left + size]
    return np.repeat(square[..., None], channels, axis=2) if square.ndim == 2 else square.copy()
