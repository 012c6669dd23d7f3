"""Pictures of pictures: grids with labels, the order of generation as a heat map and as a GIF, and before and after.

Shapes: N images of H x W pixels as bytes, (N, H, W, 3) or (N, H, W, 1); L = h * w cells of a grid of tokens, in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from maskless.files import write_aside
from maskless.how import check_positive

T = TypeVar("T")
PAPER, INK, FAINT, ACCENT = (255, 255, 255), (34, 34, 34), (110, 110, 110), (214, 80, 32)
UNKNOWN = (196, 196, 196)  # a cell that is not decided yet, or was cut out
GAP, MARGIN = 6, 12
SMALLEST = 96  # pixels of the side of a shown image; smaller ones are enlarged by a whole number
MOVING = 192  # the same in a GIF, where cells are looked at
MOST = 16  # heat maps side by side
COLOURS = "viridis"
SHEET = "maskless-sheet"  # what the PNG of a sheet says of itself
Decode = Callable[[Tensor], Tensor]  # tokens (N, L) -> uint8 images (N, H, W, C)


def grid(
    images: Tensor, path: Path, *, labels: Sequence[str] | None = None, columns: int | None = None, title: str = ""
) -> None:
    """A PNG of images in rows, each with its label below it."""
    tiles = _tiles(images)
    if labels is not None and len(labels) != len(tiles):
        raise ValueError(f"{len(labels)} labels for {len(tiles)} images: expected one for each")
    columns = _columns(len(tiles), columns)
    texts = None if labels is None else _rows(labels, columns)
    _save(_sheet(_rows(tiles, columns), texts=texts, title=title), path)


def reconstructions(originals: Tensor, rebuilt: Tensor, path: Path, *, columns: int = 8) -> None:
    """A PNG of originals above what a codec made of them, with the PSNR of each."""
    above, below = _tiles(originals), _tiles(rebuilt)
    if originals.shape != rebuilt.shape:
        raise ValueError(f"originals {tuple(originals.shape)}, rebuilt {tuple(rebuilt.shape)}: expected the same shape")
    ratios = [f"{ratio:.1f} dB" if ratio < np.inf else "equal" for ratio in psnr(originals, rebuilt).tolist()]
    rows, texts, names = [], [], []
    columns = _columns(len(above), min(columns, len(above)))
    for i in range(0, len(above), columns):
        rows += [above[i : i + columns], below[i : i + columns]]
        texts += [[""] * len(rows[-1]), ratios[i : i + columns]]
        names += ["original", "rebuilt"]
    _save(_sheet(rows, texts=texts, names=names), path)


def inpainting(
    before: Tensor, known: Tensor, after: Tensor, path: Path, *, labels: Sequence[str] | None = None
) -> None:
    """A PNG of three rows: images, what was kept of them, and how it was filled in.

    known (N, h, w) or (h, w) bool: the cells that were kept; h and w divide the height and width of the images.
    """
    first, last = _tiles(before), _tiles(after)
    if before.shape != after.shape:
        raise ValueError(f"before {tuple(before.shape)}, after {tuple(after.shape)}: expected the same shape")
    N, H, W, _ = before.shape
    masks = known.bool().cpu().expand(N, -1, -1) if known.ndim == 2 else known.bool().cpu()
    if masks.ndim != 3 or len(masks) != N or 0 in masks.shape or H % masks.shape[1] or W % masks.shape[2]:
        raise ValueError(f"known {tuple(known.shape)}: expected ({N}, h, w) cells that divide images of {H} x {W}")
    if labels is not None and len(labels) != len(first):
        raise ValueError(f"{len(labels)} labels for {len(first)} images: expected one for each")
    kept = [_covered(tile, mask, torch.zeros_like(mask)) for tile, mask in zip(first, masks, strict=True)]
    empty = [""] * len(first)
    texts = [empty, empty, empty if labels is None else list(labels)]
    _save(_sheet([first, kept, last], texts=texts, names=["before", "kept", "after"]), path)


def order_heatmap(
    came: Tensor,
    path: Path,
    *,
    shape: tuple[int, int],
    images: Tensor | None = None,
    labels: Sequence[str] | None = None,
    title: str = "when each cell was decided",
) -> None:
    """A PNG that colours each cell of a grid by the step that decided it; grey where it was given.

    came (N, L) or (L,): the steps, -1 for a given cell. images (N, H, W, 3): shown above their maps.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    maps = _cells(came, shape)
    if len(maps) > MOST:
        raise ValueError(f"{len(maps)} maps in one picture: expected at most {MOST}")
    tiles = None if images is None else _tiles(images)
    for what, values in (("images", tiles), ("labels", labels)):
        if values is not None and len(values) != len(maps):
            raise ValueError(f"{len(values)} {what} for {len(maps)} maps: expected one for each")
    last, rows, N = max(2, int(maps.max()) + 1), 1 + (tiles is not None), len(maps)
    side, room = (4.0 if N == 1 else 2.4), (1.1, 0.5)  # inches: of a panel; of the bar at the right, of the title
    height = side * shape[0] / shape[1]
    size = side * N + room[0], (height + 0.3) * rows + room[1]
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, N, squeeze=False)
    for i in range(N):
        if tiles is not None:
            panels[0, i].imshow(tiles[i])
        shown = np.ma.masked_less(maps[i].numpy() + 1, 1)
        drawn = panels[-1, i].imshow(shown, vmin=1, vmax=last, cmap=COLOURS, interpolation="nearest")
        panels[-1, i].set_facecolor("0.8")
        if labels is not None:
            panels[0, i].set_title(labels[i], fontsize=9)
    for panel in panels.flat:
        panel.set_xticks([])
        panel.set_yticks([])
    ticks = MaxNLocator(integer=True)
    bar = figure.colorbar(drawn, ax=panels[-1, :].tolist(), label="step", shrink=0.9, pad=0.02, ticks=ticks)
    bar.outline.set_visible(False)
    given = " (grey: given)" if bool((maps < 0).any()) else ""
    figure.suptitle(title + given, fontsize=11)
    write_aside(path, lambda aside: figure.savefig(aside, dpi=120, format="png"))


def order_gif(
    tokens: Tensor,
    came: Tensor,
    decode: Decode,
    path: Path,
    *,
    shape: tuple[int, int],
    labels: Sequence[str] | None = None,
    seconds: float = 0.15,
) -> None:
    """A GIF of grids filling in: what is known after each step is decoded, the rest is grey, the newest is outlined.

    tokens and came (N, L) or (L,), as in `Sampled`. Rows are those of `grid`. The last frame stays for two seconds.
    """
    maps = _cells(came, shape)
    tokens = tokens.cpu().reshape(-1, tokens.shape[-1])
    if tokens.shape != (len(maps), shape[0] * shape[1]):
        raise ValueError(f"tokens {tuple(tokens.shape)}, came {tuple(came.shape)}: expected the same shape")
    if labels is not None and len(labels) != len(maps):
        raise ValueError(f"{len(labels)} labels for {len(maps)} images: expected one for each")
    if not seconds > 0:
        raise ValueError(f"seconds {seconds} is out of range: expected more than 0")
    last = int(maps.max())
    titles = [f"step {i} of {last + 1},  {int((maps < i).sum())} of {maps.numel()} cells" for i in range(last + 2)]
    columns, widest = _columns(len(maps), None), max(titles, key=_font(15).getlength)
    texts = None if labels is None else _rows(labels, columns)
    frames = []
    for step in [*range(-1, last + 1), None]:  # at the end all of it, without outlines
        known = maps <= (last if step is None else step)
        new = (maps == step) & (maps >= 0) if step is not None else torch.zeros_like(known)
        seen = [nearest_known(*one).flatten() for one in zip(tokens.view(maps.shape), known, strict=True)]
        tiles = _tiles(decode(torch.stack(seen)), MOVING)
        shown = [_covered(*parts) for parts in zip(tiles, known, new, strict=True)]
        title = titles[-1 if step is None else step + 1]
        frames.append(_sheet(_rows(shown, columns), texts=texts, title=title, room=widest))
    times = [round(1000 * seconds)] * (len(frames) - 1) + [2000]
    first, *rest = (frame.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=3) for frame in frames)
    write_aside(path, lambda aside: first.save(aside, "GIF", save_all=True, append_images=rest, duration=times, loop=0))


def nearest_known(tokens: Tensor, known: Tensor) -> Tensor:
    """The tokens, each unknown one as the nearest that is known: a decoder lets cells bleed into their neighbours.

    (h, w), (h, w) -> (h, w)
    """
    places = known.nonzero()
    if not len(places):
        return tokens
    every = torch.ones_like(known).nonzero()
    nearest = places[torch.cdist(every.double(), places.double()).argmin(1)]
    return tokens[nearest[:, 0], nearest[:, 1]].view_as(tokens)


def order_text(pieces: Sequence[str], came: Sequence[int], path: Path, *, width: int = 900, title: str = "") -> None:
    """A PNG of a text whose pieces are coloured by the step that decided them; grey where they were given."""
    from matplotlib import colormaps

    if len(pieces) != len(came):
        raise ValueError(f"{len(pieces)} pieces of text, {len(came)} steps: expected one for each")
    font, last = _font(18), max(1, *came, 1)
    colours = [
        UNKNOWN if step < 0 else tuple(map(int, colormaps[COLOURS](step / last, bytes=True)[:3])) for step in came
    ]
    places, x, y, line = [], float(MARGIN), MARGIN + (30 if title else 0), 30
    for piece, colour in zip(pieces, colours, strict=True):
        for number, part in enumerate(piece.split("\n")):
            long = font.getlength(part)
            if number or (x + long > width - MARGIN and x > MARGIN):
                x, y = float(MARGIN), y + line
            places.append((x, y, long, part, colour))
            x += long
    sheet = Image.new("RGB", (width, y + 2 * line + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, font)
    for x, y, long, part, colour in places:
        if part:
            draw.rectangle((x, y, x + long - 1, y + line - 6), colour)
            draw.text((x, y), part, INK if sum(colour) > 330 else PAPER, font)
    given = ", grey: given" if min(came, default=0) < 0 else ""
    draw.text((MARGIN, y + line), f"dark: step 1, bright: step {last + 1}{given}", FAINT, _font(13))
    _save(sheet, path)


def psnr(originals: Tensor, rebuilt: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, infinite where they are equal.  uint8 (N, H, W, C) -> (N,)"""
    error = (originals.double() - rebuilt.double()).square().flatten(1).mean(1)
    return 10 * (255**2 / error).log10()


def _tiles(images: Tensor, smallest: int = SMALLEST) -> list[Image.Image]:
    """Images as RGB, small ones enlarged by a whole number without smoothing."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape:
        kind = str(images.dtype).removeprefix("torch.")
        raise ValueError(f"images {tuple(images.shape)} of {kind}: expected uint8 (N, H, W, 3) or (N, H, W, 1)")
    scale = max(1, -(-smallest // max(images.shape[1:3])))
    arrays = images.cpu().expand(-1, -1, -1, 3).numpy()
    return [Image.fromarray(a.repeat(scale, 0).repeat(scale, 1)) for a in arrays]


def _cells(came: Tensor, shape: tuple[int, int]) -> Tensor:
    """(N, L) or (L,) -> (N, h, w)"""
    h, w = shape
    if came.ndim not in (1, 2) or came.shape[-1] != h * w or 0 in came.shape:
        raise ValueError(f"steps {tuple(came.shape)} on a grid of {h} x {w}: expected (N, {h * w})")
    return came.cpu().long().reshape(-1, h, w)


def _covered(tile: Image.Image, known: Tensor, new: Tensor) -> Image.Image:
    """An image with its unknown cells in grey and a line around its new ones."""
    h, w = known.shape
    high, wide = tile.height / h, tile.width / w
    tile = tile.copy()
    draw = ImageDraw.Draw(tile)
    for cells, fill, outline in ((~known, UNKNOWN, None), (new, None, ACCENT)):
        for row, column in cells.nonzero().tolist():
            box = column * wide, row * high, (column + 1) * wide - 1, (row + 1) * high - 1
            draw.rectangle([round(edge) for edge in box], fill, outline)
    return tile


def _sheet(
    rows: list[list[Image.Image]],
    *,
    texts: list[list[str]] | None = None,
    names: list[str] | None = None,
    title: str = "",
    room: str = "",
) -> Image.Image:
    """Rows of tiles of one size on paper, with a title, a name left of each row and a text below each tile.

    room: a longer title that there must be room for, so that the frames of a film are of one size.
    """
    width, height = rows[0][0].size
    font, size = _font(13), 13
    left = MARGIN + (max(round(font.getlength(name)) for name in names) + MARGIN if names else 0)
    lines = [bool(texts and any(texts[i])) for i in range(len(rows))]
    heading = 24 if title else 0
    across = left + max(len(row) for row in rows) * (width + GAP) - GAP + MARGIN
    across = max(across, round(_font(15).getlength(room or title)) + 2 * MARGIN)
    down = MARGIN + heading + sum(height + GAP + (size + 5) * line for line in lines) - GAP + MARGIN
    sheet = Image.new("RGB", (across, down), PAPER)
    draw, y = ImageDraw.Draw(sheet), MARGIN + heading
    draw.text((MARGIN, MARGIN - 2), title, INK, _font(15))
    for i, row in enumerate(rows):
        if names:
            draw.text((MARGIN, y + height / 2), names[i], FAINT, font, anchor="lm")
        for j, tile in enumerate(row):
            x = left + j * (width + GAP)
            sheet.paste(tile, (x, y))
            if texts and texts[i][j]:
                draw.text((x + width / 2, y + height + 2), _shortened(texts[i][j], font, width), INK, font, anchor="ma")
        y += height + GAP + (size + 5) * lines[i]
    return sheet


def _shortened(text: str, font: Any, width: float) -> str:
    """The text, cut where it would run into its neighbour's."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _columns(count: int, columns: int | None) -> int:
    if columns is not None:
        check_positive(columns=columns)
    return columns or min(10, -(-count // max(1, int((count / 1.6) ** 0.5))))


def _rows(things: Sequence[T], columns: int) -> list[list[T]]:
    return [list(things[i : i + columns]) for i in range(0, len(things), columns)]


def _font(size: int) -> Any:
    """The font that comes with matplotlib: it has the letters of most alphabets."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)


def _save(sheet: Image.Image, path: Path) -> None:
    said = PngInfo()
    said.add_text(SHEET, "images laid out for people, with captions")
    write_aside(path, lambda aside: sheet.save(aside, "PNG", pnginfo=said))


def is_sheet(path: Path) -> bool:
    """Whether a file is a sheet that was made here, rather than one image."""
    try:
        with Image.open(path, formats=["PNG"]) as found:
            return SHEET in found.info
    except (OSError, ValueError, SyntaxError):  # not a PNG, or a damaged one
        return False
