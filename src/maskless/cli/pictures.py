"""What the commands do with pictures: prepare them, draw them into a file, and fill one in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskless import official, pictures
from maskless.checkpoint import Model
from maskless.cli import show
from maskless.cli.checks import check_places, launched_together
from maskless.codec.vq import ImageCodec, PixelCodec, read_codec, to_pixels
from maskless.data.image_pixels import decode, fit
from maskless.data.image_prepare import prepare_images
from maskless.files import write_aside
from maskless.how import check_positive
from maskless.images import Picture, codec_of, fill_image, generate_images, grid_of, pixels_of
from maskless.shards import picture_file, write_pictures
from maskless.terminal import say
from maskless.train.processes import processes


def prepare(
    inputs: list[str],
    to: Path,
    *,
    codec: str | None = None,
    size: int | None = None,
    device: str | None = None,
    **how: Any,
) -> None:
    """Turn pictures into tokens, with a bar."""
    if codec is None or size is None:
        raise ValueError("these are pictures: expected --codec (a folder, or pixels:LEVELS[:CHANNELS]) and --size")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    large, encoder = device.startswith("cuda"), find_codec(codec).to(device)
    with show.bar("encoding") as move:

        def on_progress(done: int, total: int, skipped: int) -> None:
            move(completed=done, total=total, description=f"encoding, {done:,} pictures")

        batch = 256 if large else 64
        made = prepare_images(inputs, to, encoder, size=size, batch=batch, on_progress=on_progress, **how)
    sizes = ", ".join(f"{s.rows:,} rows {name}" for name, s in made.splits.items())
    skipped = f", {made.skipped} broken pictures left out ({made.broken[0]} ...)" if made.skipped else ""
    grid = f"{made.grid[0]} x {made.grid[1]} tokens of {made.codes:,} codes"
    say(f"{to}: {sizes}; {grid}, {len(made.classes)} classes{skipped}")


def find_codec(name: str) -> ImageCodec:
    """A codec by its folder or its released file, or grey levels as tokens: pixels:17, pixels:8:3."""
    if not name.startswith("pixels:"):
        return official.read_codec(name) if Path(name).is_file() else read_codec(name)
    try:
        numbers = [int(part) for part in name.split(":")[1:]]
        return PixelCodec(*numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"codec {name!r}: expected pixels:LEVELS or pixels:LEVELS:CHANNELS ({error})") from None


def give_codec(model: Model, name: str) -> None:
    """Give a codec to an image model that brings none."""
    if model.layout != "image":
        raise ValueError("--codec is for image models: this is a text model")
    codec = find_codec(name)
    if not codec.codes < model.config.vocab <= codec.codes + 2:  # codes, the mask, and perhaps BOS
        raise ValueError(f"the codec {name} has {codec.codes} codes, the model a vocabulary of {model.config.vocab}")
    model.codec = codec


def draw(
    model: Model,
    n: int | None,
    *,
    label: Sequence[str] = (),
    out: Path | None = None,
    gif: Path | None = None,
    heat: Path | None = None,
    sheet: bool = False,
    resume: bool = False,
    **how: Any,
) -> None:
    """Draw n pictures, of labels in turn, into a PNG or one by one into a folder, and how they came.

    sheet: whether a single one gets a margin and its caption too, as several on a PNG do.
    """
    each = out is not None and (out.is_dir() or not (out.suffix or out.exists()))
    if each and sheet:
        raise ValueError(f"--sheet goes into a file: expected --out FILE.png, {out} is a folder")
    shared = each and gif is None and heat is None
    if (resume or launched_together()) and not shared:
        raise ValueError("--resume, and several processes, go with a folder as --out, without --gif and --heat")
    to = check_files(out, folder=each, heat=heat, gif=gif)
    _check_noise(**how)
    names = [_class(model, name) for name in label] or None
    if names and n is not None:
        check_positive(n=n)
        names = list(itertools.islice(itertools.cycle(names), n))
    count = len(names) if names else n
    if heat is not None and (count or 0) > pictures.MOST:
        raise ValueError(f"--heat of {count} pictures: expected {pictures.MOST} or fewer")
    if shared:
        with show.watching("drawing") as on_step:
            number = write_pictures(model, to, names, count, resume=resume, on_step=on_step, **how)
        if processes().is_main_process:
            say(f"{to}: {number} pictures")
        return
    with show.watching("drawing") as on_step:
        drawn = generate_images(model, names, count, on_step=on_step, **how)
    pixels = pixels_of(drawn)
    titles = [one.label or "" for one in drawn] if model.classes else None
    if each:
        to.mkdir(exist_ok=True)
        for number, one in enumerate(drawn):
            write_aside(picture_file(to, number, one.label), partial(one.image.save, format="png"), durable=False)
    elif len(drawn) == 1 and not sheet:
        write_aside(to, partial(drawn[0].image.save, format="png"))
    else:
        pictures.grid(pixels, to, labels=titles)
    if gif is not None:
        with show.waiting(f"writing {gif}"):
            _film(model, drawn, gif, titles)
    if heat is not None:
        steps = torch.stack([one.steps for one in drawn]).flatten(1)
        with show.waiting(f"writing {heat}"):
            pictures.order_heatmap(steps, heat, shape=grid_of(model), images=pixels, labels=titles)
    say(f"{to}: {len(drawn)} picture{'s' * (len(drawn) > 1)}")


def _film(model: Model, drawn: list[Picture], to: Path, titles: list[str] | None) -> None:
    """A GIF of how pictures came."""
    codec, (h, w) = codec_of(model), grid_of(model)
    tokens = torch.stack([one.tokens for one in drawn]).flatten(1)
    steps = torch.stack([one.steps for one in drawn]).flatten(1)

    def decode(cells: torch.Tensor) -> torch.Tensor:
        return to_pixels(codec.decode(cells.unflatten(1, (h, w)).to(model.device)).cpu())

    pictures.order_gif(tokens, steps, decode, to, shape=(h, w), labels=titles)


def fill(
    model: Model,
    picture: Path,
    *,
    known: Path | None = None,
    box: str | None = None,
    label: str | None = None,
    out: Path | None = None,
    compare: Path | None = None,
    **how: Any,
) -> None:
    """Redraw a part of a picture: what a mask does not keep, or a box."""
    to = check_files(out, compare=compare)
    _check_noise(**how)
    pixels = _read(picture)
    if pictures.is_sheet(picture):
        raise ValueError(f"{picture} is a sheet of images with captions: expected the file of a single image")
    keep = _kept(known, box, pixels.shape[:2])
    size, name = side_of(model), None if label is None else _class(model, label)
    square = fit(pixels, size, channels=codec_of(model).channels)
    mask = fit(keep.astype(np.uint8) * 255, size, "box", channels=1)[..., 0] == 255
    _check_seen(keep, mask, f"box {box}" if known is None else f"what {known} does not keep")
    with show.watching("filling") as on_step:
        filled = fill_image(model, square, mask, name, on_step=on_step, **how)
    write_aside(to, lambda aside: filled.image.save(aside, format="png"))
    if compare is not None:
        after = np.array(filled.image).reshape(square.shape)
        before, drawn = (torch.from_numpy(one)[None] for one in (square, after))
        titles = [filled.label] if filled.label else None
        pictures.inpainting(before, torch.from_numpy(mask), drawn, compare, labels=titles)
    count = int((filled.steps >= 0).sum())
    say(f"{to}: {count} of {filled.steps.numel()} cells redrawn")


def side_of(model: Model) -> int:
    """Pixels along a side of what a model draws, which is square."""
    h, w = grid_of(model)
    if h != w:
        raise ValueError(f"this model draws {w} x {h} cells: expected one of squares")
    return h * codec_of(model).factor


def check_files(to: Path | None, *, folder: bool = False, **others: Path | None) -> Path:
    """Raise a ValueError about a file that cannot be written, before anything is computed.

    others: files by their options; a GIF is for gif, a PNG for every other.
    """
    if to is None:
        raise ValueError("pictures go into a file: expected --out FILE.png")
    if not folder and to.suffix.lower() != ".png":
        raise ValueError(f"--out {to}: expected a name that ends in .png")
    named: set[Path] = set()
    for option, path in {"out": to, **others}.items():
        if path is None:
            continue
        check_places(path)
        if path.is_dir() and not (folder and path is to):
            raise ValueError(f"{path} is a folder: expected the name of a file")
        if path.resolve() in named:
            raise ValueError(f"{path} is named twice: expected two files")
        named.add(path.resolve())
        ending = ".gif" if option == "gif" else ".png"
        if path is not to and path.suffix.lower() != ending:
            raise ValueError(f"--{option} {path}: expected a name that ends in {ending}")
    return to


def _class(model: Model, label: str) -> str | int:
    """A class by its name, or by its number; where classes are named by numbers, a number is a name."""
    if not label.isdecimal() or any(name.isdecimal() for name in model.classes):
        return label
    count = model.config.classes
    if count is not None and int(label) >= count:
        names = f"{', '.join(model.classes)}, or " if model.classes else ""
        raise ValueError(f"unknown label {label}: expected {names}0 to {count - 1}")
    return int(label)


def _check_noise(order: str = "halton", noise: float | None = None, **_: Any) -> None:
    if noise is not None and order != "confidence":
        raise ValueError(f"--noise is for --order confidence: the order is {order}")


def _read(path: Path) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: this is an image model, which fills in the file of a picture")
    try:
        return decode(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_seen(keep: np.ndarray, mask: np.ndarray, what: str) -> None:
    """Raise a ValueError where something is to be drawn, but nothing of it in the square that the model sees."""
    if keep.all() or not mask.all():
        return
    short = min(keep.shape)
    top, left = ((side - short) // 2 for side in keep.shape)
    if keep[top : top + short, left : left + short].all():
        square = f"{left},{top},{left + short},{top + short}"
        raise ValueError(f"{what} is outside of the picture's middle square, {square}: the model sees nothing else")
    raise ValueError(f"{what} is too small: the model sees {len(mask)} x {len(mask)} pixels of this picture")


def _kept(known: Path | None, box: str | None, shape: tuple[int, int]) -> np.ndarray:
    """Which pixels stay: the light ones of a mask, or all outside of a box.  -> (H, W) bool"""
    high, wide = shape
    if (known is None) == (box is None):
        raise ValueError("which part? expected either --known MASK.png (white stays) or --box LEFT,TOP,RIGHT,BOTTOM")
    if known is not None:
        mask = _read(known)
        if mask.shape[:2] != shape:
            size = f"{mask.shape[1]} x {mask.shape[0]}"
            raise ValueError(f"{known} has {size} pixels: expected {wide} x {high}, as the picture has")
        return (mask if mask.ndim == 2 else mask.min(2)) >= 128
    assert box is not None
    try:
        left, top, right, bottom = (int(edge) for edge in box.split(","))
    except ValueError:
        raise ValueError(f"box {box!r}: expected LEFT,TOP,RIGHT,BOTTOM in pixels") from None
    if not (0 <= left < right <= wide and 0 <= top < bottom <= high):
        raise ValueError(f"box {box} does not lie in the picture: expected edges from 0,0 to {wide},{high}")
    keep = np.ones(shape, dtype=bool)
    keep[top:bottom, left:right] = False
    return keep
