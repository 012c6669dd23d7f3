"""The images that a codec is trained on, and the picture that shows what it makes of them.

Shapes: N images, H x W pixels, C channels (3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from maskless.codec.vq import to_pixels
from maskless.files import write_aside

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
FOLDER_SIZE = 64  # of images from a folder, if nobody says
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what pillow raises on damaged files


def read_images(
    sources: Sequence[str | Path],
    size: int | None = None,
    *,
    on_image: Callable[[int], object] = lambda done: None,
    on_skip: Callable[[Path, str], object] = lambda path, reason: None,
) -> np.ndarray:
    """Images of folders and .npy files, cut to squares of `size` if it is given.  (N, H, W, 3) uint8

    A .npy file holds uint8, (N, H, W, 3) or (N, H, W). on_image: told how many are read. on_skip: told of files that
    hold no image.
    """
    if size is not None and size < 1:
        raise ValueError(f"size {size} is out of range: expected 1 or more")
    parts, done = [], 0
    for source in map(Path, sources):
        if not source.exists():
            raise ValueError(f"{source} does not exist: expected a folder of images or a .npy file")
        if source.is_dir():
            rows = []
            for image in _folder(source, size or FOLDER_SIZE, on_skip):
                rows.append(image)
                on_image(done := done + 1)
            if not rows:
                raise ValueError(f"{source} holds no images: expected files such as .png and .jpg, in it or below")
            parts.append(np.stack(rows))
        else:
            parts.append(_array(source, size))
            on_image(done := done + len(parts[-1]))
    if not parts:
        raise ValueError("no images: expected a folder of images or a .npy file")
    if shapes := {part.shape[1:] for part in parts if part.shape[1:] != parts[0].shape[1:]}:
        raise ValueError(f"images of {_by(parts[0].shape[1:])} and {_by(min(shapes))} pixels: give one size for all")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _folder(folder: Path, size: int, on_skip: Callable[[Path, str], object]) -> Iterator[np.ndarray]:
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
        try:
            with Image.open(path) as image:
                yield _square(image, size)
        except UNREADABLE as error:
            on_skip(path, str(error).splitlines()[0])


def _array(path: Path, size: int | None) -> np.ndarray:
    try:
        images = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is neither a folder of images nor a .npy file: {error}") from None
    grey = images.ndim == 3
    if images.dtype != np.uint8 or not (grey or (images.ndim == 4 and images.shape[3] == 3)) or not images.size:
        found = f"{images.dtype} of shape {images.shape}"
        raise ValueError(f"{path} holds {found}: expected uint8 of shape (N, H, W, 3) or (N, H, W)")
    if size is not None and images.shape[1:3] != (size, size):
        return np.stack([_square(Image.fromarray(image), size) for image in images])
    return np.repeat(images[..., None], 3, axis=3) if grey else images


def _square(image: Image.Image, size: int) -> np.ndarray:
    """The middle of an image, its shorter side resized to `size`."""
    return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BICUBIC))


def _by(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} x {shape[1]}"


def picture(images: Tensor, reconstructions: Tensor, path: Path, *, least: int = 96) -> None:
    """Write a PNG: the originals in a row, their reconstructions below; small ones are enlarged pixel by pixel."""
    rows = [np.concatenate([*to_pixels(row).cpu().numpy()], axis=1) for row in (images, reconstructions)]
    whole = Image.fromarray(np.concatenate(rows).repeat(3 // rows[0].shape[-1], axis=2))
    scale = max(1, -(-least // images.shape[2]))
    whole = whole.resize((whole.width * scale, whole.height * scale), Image.Resampling.NEAREST)
    write_aside(path, lambda aside: whole.save(aside, format="png"))
