"""What the commands do with pictures: prepare them, and draw them into a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maskless.cli import show

if TYPE_CHECKING:
    from maskless.checkpoint import Model
    from maskless.codec.vq import ImageCodec


def prepare(inputs: list[str], to: Path, codec: str | None, size: int | None, **how: Any) -> None:
    """Turn pictures into tokens, with a bar."""
    from maskless.data.image_prepare import prepare_images

    if codec is None or size is None:
        raise ValueError("these are pictures: expected --codec (a folder, or pixels:LEVELS[:CHANNELS]) and --size")
    with show.progress() as bar:
        task = bar.add_task("encoding", total=None)

        def on_progress(done: int, total: int, skipped: int) -> None:
            bar.update(task, completed=done, total=total, description=f"encoding, {done:,} pictures")

        made = prepare_images(inputs, to, find_codec(codec), size=size, on_progress=on_progress, **how)
    sizes = ", ".join(f"{s.rows:,} rows {name}" for name, s in made.splits.items())
    skipped = f", {made.skipped} broken pictures left out ({made.broken[0]} ...)" if made.skipped else ""
    grid = f"{made.grid[0]} x {made.grid[1]} tokens of {made.codes:,} codes"
    show.out.print(f"{to}: {sizes}; {grid}, {len(made.classes)} classes{skipped}", highlight=False, soft_wrap=True)


def find_codec(name: str) -> ImageCodec:
    """A codec by its folder, or grey levels as tokens: pixels:17, pixels:8:3."""
    from maskless.codec.vq import PixelCodec, read_codec

    if not name.startswith("pixels:"):
        return read_codec(name)
    try:
        numbers = [int(part) for part in name.split(":")[1:]]
        return PixelCodec(*numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"codec {name!r}: expected pixels:LEVELS or pixels:LEVELS:CHANNELS ({error})") from None


def draw(model: Model, to: Path | None, gif: Path | None, labels: list[str] | None, n: int, **how: Any) -> None:
    """Draw pictures of the labels into a PNG, and how they came into a GIF."""
    import torch

    from maskless import pictures
    from maskless.codec.vq import to_pixels
    from maskless.images import codec_of, generate_images, grid_of

    if to is None:
        raise ValueError("pictures go into a file: expected --out FILE.png")
    for path in (to, gif):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: {path.parent} is not a folder")
    names = None if labels is None else [int(label) if label.isdigit() else label for label in labels]
    with show.watching("drawing") as on_step:
        drawn = generate_images(model, names, None if names else n, on_step=on_step, **how)
    pixels = torch.stack([torch.from_numpy(np.atleast_3d(np.array(one.image))) for one in drawn])
    titles = [one.label or "" for one in drawn] if model.classes else None
    pictures.grid(pixels, to, labels=titles)
    if gif is not None:
        codec, (h, w) = codec_of(model), grid_of(model)
        tokens = torch.stack([one.tokens for one in drawn]).flatten(1)
        steps = torch.stack([one.steps for one in drawn]).flatten(1)

        def decode(cells: torch.Tensor) -> torch.Tensor:
            return to_pixels(codec.decode(cells.unflatten(1, (h, w)).to(model.device)).cpu())

        pictures.order_gif(tokens, steps, decode, gif, shape=(h, w), labels=titles)
    show.out.print(f"{to}: {len(drawn)} pictures", highlight=False, soft_wrap=True)
