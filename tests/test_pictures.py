"""Pictures show what they are given: each pixel in its place, each step in its frame, and nothing cut off."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from maskless import pictures
from maskless.pictures import ACCENT, GAP, MARGIN, UNKNOWN, nearest_known, order_gif, order_heatmap, order_text, psnr

SIDE = 32


def images(n: int, height: int = SIDE, width: int = SIDE, channels: int = 3) -> Tensor:
    """Each image in one colour of its own."""
    colours = torch.arange(n * channels).view(n, 1, 1, channels) * 7 % 250
    return colours.to(torch.uint8).expand(n, height, width, channels).contiguous()


def read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def holds(sheet: np.ndarray, colour: tuple[int, ...] | Tensor) -> int:
    """The pixels of a colour."""
    return int((sheet == np.asarray(colour)).all(-1).sum())


def test_a_grid_holds_every_pixel_of_every_image_enlarged_by_a_whole_number(tmp_path):
    x = torch.randint(0, 256, (5, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pictures.grid(x, tmp_path / "grid.png", columns=3)
    sheet = read(tmp_path / "grid.png")
    scale = 12  # 8 pixels are shown as 96
    for i in range(5):
        row, column = divmod(i, 3)
        top, left = MARGIN + row * (96 + GAP), MARGIN + column * (96 + GAP)
        shown = sheet[top : top + 96, left : left + 96]
        np.testing.assert_array_equal(shown[::scale, ::scale], x[i])
        np.testing.assert_array_equal(shown[scale - 1 :: scale, scale - 1 :: scale], x[i])
    assert sheet.shape == (2 * 96 + GAP + 2 * MARGIN, 3 * 96 + 2 * GAP + 2 * MARGIN, 3)


def test_large_images_stay_as_they_are_and_grey_ones_are_grey(tmp_path):
    pictures.grid(images(1, 100, 130, 1) + 77, tmp_path / "grey.png")
    sheet = read(tmp_path / "grey.png")
    assert sheet.shape == (100 + 2 * MARGIN, 130 + 2 * MARGIN, 3)
    assert holds(sheet, (77, 77, 77)) == 100 * 130


def test_labels_and_titles_take_room_and_stay_inside(tmp_path):
    def height(**texts) -> np.ndarray:
        pictures.grid(images(2), tmp_path / "grid.png", **texts)
        return read(tmp_path / "grid.png")

    bare, labelled = height(), height(labels=["cat", "a label that is far too long for its picture"])
    assert labelled.shape[0] > bare.shape[0]
    assert labelled.shape[1] == bare.shape[1]
    below = (labelled[MARGIN + 96 :] < 128).all(-1)
    assert below.any()
    assert not below[:, : MARGIN - 1].any()
    assert not below[:, -MARGIN + 1 :].any()
    middle = MARGIN + 96
    assert not below[:, middle : middle + GAP].any()  # labels do not run into one another
    titled = height(title="a title that is wider than two small pictures beside one another")
    assert titled.shape[1] > bare.shape[1]
    assert not (titled[:, -MARGIN + 1 :] < 128).any()


def test_originals_stand_above_what_was_made_of_them(tmp_path):
    above, below = images(3), images(3) + 100
    pictures.reconstructions(above, below, tmp_path / "rec.png", columns=2)
    sheet = read(tmp_path / "rec.png")
    for i in range(3):
        tops = [np.argwhere((sheet == x[i, 0, 0].numpy()).all(-1)) for x in (above, below)]
        assert [len(at) for at in tops] == [96 * 96] * 2
        (a, left), (b, right) = (at.min(0) for at in tops)
        assert b > a
        assert left == right


def test_psnr_is_that_of_its_definition():
    x = torch.full((2, 4, 4, 3), 100, dtype=torch.uint8)
    y = x.clone()
    y[1] += 10
    assert psnr(x, y).tolist() == [np.inf, pytest.approx(20 * np.log10(255 / 10))]


def test_what_was_cut_out_is_grey_between_before_and_after(tmp_path):
    before, after = images(2), images(2) + 100
    known = torch.ones(2, 4, 8, dtype=torch.bool)
    known[0, 1:3, 2:4] = False
    pictures.inpainting(before, known, after, tmp_path / "inp.png", labels=["a", "b"])
    sheet = read(tmp_path / "inp.png")
    hole = 4 * (96 // 4) * (96 // 8)
    assert holds(sheet, UNKNOWN) == hole
    assert [holds(sheet, before[i, 0, 0]) for i in range(2)] == [2 * 96 * 96 - hole, 2 * 96 * 96]
    assert [holds(sheet, after[i, 0, 0]) for i in range(2)] == [96 * 96] * 2
    pictures.inpainting(before, known[0], after, tmp_path / "one.png")  # one mask for all
    assert holds(read(tmp_path / "one.png"), UNKNOWN) == 2 * hole


def decode(tokens: Tensor) -> Tensor:
    """A grid of 2 x 3 cells of 8 x 8 pixels: token t is a cell of the grey level 40 t."""
    return (tokens * 40).to(torch.uint8).view(-1, 2, 3, 1).repeat_interleave(8, 1).repeat_interleave(8, 2)


def frames(path: Path) -> list[np.ndarray]:
    film = Image.open(path)
    found = []
    for i in range(film.n_frames):
        film.seek(i)
        found.append(np.asarray(film.convert("RGB")).astype(int))
    return found


def near(frame: np.ndarray, colour: tuple[int, ...]) -> int:
    return int((np.abs(frame - np.asarray(colour)) <= 3).all(-1).sum())


def test_what_is_not_known_looks_like_the_nearest_that_is():
    tokens, known = torch.arange(12).view(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    known[0, 0] = known[2, 3] = True
    assert nearest_known(tokens, known).tolist() == [[0, 0, 0, 11], [0, 0, 11, 11], [0, 11, 11, 11]]


def test_a_film_has_a_frame_for_each_step_and_covers_what_is_not_known(tmp_path):
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    came = torch.tensor([[0, 0, 1, 1, 2, 2], [-1, 0, 0, 0, 2, 2]])
    asked = []

    def watched(given: Tensor) -> Tensor:
        asked.append(given.clone())
        return decode(given)

    order_gif(tokens, came, watched, tmp_path / "order.gif", shape=(2, 3), labels=["a", "b"])
    film = frames(tmp_path / "order.gif")
    assert len(film) == 5  # before the first step, three steps, and the end
    for step, given in enumerate(asked[:4]):  # what is not known looks like the nearest cell that is
        known = came < step
        assert given[known].equal(tokens[known])
        for row, some in zip(given, known, strict=True):
            assert not some.any() or set(row[~some].tolist()) <= set(row[some].tolist())
    cell = 64 * 64
    covered = [near(frame, UNKNOWN) / cell for frame in film]
    assert covered == pytest.approx([11, 6, 4, 0, 0], abs=0.05)
    outlines = [near(frame, ACCENT) for frame in film]
    assert outlines[0] == outlines[-1] == 0
    assert min(outlines[1:4]) > 100
    assert outlines[1] > 2 * outlines[2]  # five cells are new, then two
    info = Image.open(tmp_path / "order.gif")
    info.seek(4)
    assert info.info["duration"] == 2000


def test_a_film_of_many_pictures_has_the_rows_of_a_grid(tmp_path):
    names = [chr(97 + i) for i in range(24)]
    order_gif(torch.ones(24, 6), torch.zeros(24, 6), decode, tmp_path / "order.gif", shape=(2, 3), labels=names)
    last = frames(tmp_path / "order.gif")[-1]
    high, wide = 128 + GAP + 18, 192 + GAP  # of a tile with its label
    assert last.shape[:2] == (2 * MARGIN + 24 + 3 * high - GAP, 2 * MARGIN + 8 * wide - GAP)
    dark = (last < 128).all(-1)
    for row in range(3):  # letters below each tile of each row
        below = MARGIN + 24 + row * high + 128
        for column in range(8):
            left = MARGIN + column * wide
            assert dark[below : below + 18, left : left + 192].any()


def test_a_film_of_one_picture_has_room_for_its_longest_title(tmp_path):
    def tall(tokens: Tensor) -> Tensor:
        return (tokens * 10).to(torch.uint8).view(-1, 12, 1, 1).repeat_interleave(4, 1).repeat_interleave(4, 2)

    order_gif(torch.arange(12), torch.arange(12), tall, tmp_path / "order.gif", shape=(12, 1))
    film = frames(tmp_path / "order.gif")
    assert len(film) == 14
    title = film[-1][: MARGIN + 12]
    assert film[0].shape[1] >= pictures._font(15).getlength("step 12 of 12,  12 of 12 cells") + 2 * MARGIN - 1
    assert np.argwhere((title < 128).all(-1))[:, 1].max() < film[0].shape[1] - MARGIN


@pytest.mark.parametrize("count", [1, 3])
def test_a_heat_map_colours_cells_by_their_step_and_given_ones_grey(count, tmp_path):
    came = torch.arange(64).expand(count, 64).clone()
    came[:, :8] = -1
    order_heatmap(came, tmp_path / "heat.png", shape=(8, 8), images=images(count), labels=["x"] * count)
    sheet = read(tmp_path / "heat.png")
    grey, last = (204, 204, 204), (253, 231, 36)  # of the figure, and the end of the scale of colours
    assert holds(sheet, grey) > 0
    assert 0.5 < holds(sheet, grey) / 8 / holds(sheet, last) < 1.5
    assert max(sheet.shape) < 1600
    for i in range(count):
        assert holds(sheet, images(count)[i, 0, 0]) > 10_000


def test_a_text_shows_its_pieces_on_as_many_lines_as_they_need(tmp_path):
    words = [f"word{i} " for i in range(40)]
    order_text(words, list(range(-1, 39)), tmp_path / "long.png", title="order")
    order_text(words[:3], [0, 1, 2], tmp_path / "short.png")
    order_text(["a", "\n", "b"], [0, 1, 2], tmp_path / "lines.png")
    long, short, lines = (read(tmp_path / f"{name}.png") for name in ("long", "short", "lines"))
    assert long.shape[0] > lines.shape[0] > short.shape[0]
    assert holds(long, UNKNOWN) > 100
    assert holds(short, UNKNOWN) == 0
    with pytest.raises(ValueError, match="2 pieces of text, 1 steps"):
        order_text(["a", "b"], [0], tmp_path / "wrong.png")


def test_mistakes_are_one_clear_line(tmp_path):
    out, x = tmp_path / "x.png", images(2)
    for mistake, line in [
        (lambda: pictures.grid(x.float(), out), r"images \(2, 32, 32, 3\) of float32: expected uint8 \(N, H, W, 3\)"),
        (lambda: pictures.grid(x.permute(0, 3, 1, 2), out), r"images \(2, 3, 32, 32\) of uint8: expected"),
        (lambda: pictures.grid(x[:0], out), r"images \(0, 32, 32, 3\)"),
        (lambda: pictures.grid(x, out, columns=0), "columns 0 is out of range"),
        (lambda: pictures.grid(x, out, labels=["a"]), "1 labels for 2 images"),
        (lambda: pictures.reconstructions(x, x[:1], out), "expected the same shape"),
        (lambda: pictures.inpainting(x, torch.ones(2, 4, 4), x[:1], out), "before .*: expected the same shape"),
        (lambda: pictures.inpainting(x, torch.ones(2, 4, 4), x, out, labels=["a"]), "1 labels for 2 images"),
        (lambda: pictures.inpainting(x, torch.ones(2, 5, 5), x, out), r"known \(2, 5, 5\): .* images of 32 x 32"),
        (lambda: pictures.inpainting(x, torch.ones(3, 4, 4), x, out), r"known \(3, 4, 4\): .* images of 32 x 32"),
        (lambda: order_heatmap(torch.zeros(7), out, shape=(2, 3)), r"steps \(7,\) on a grid of 2 x 3: expected \(N, 6"),
        (lambda: order_heatmap(torch.zeros(20, 6), out, shape=(2, 3)), "20 maps in one picture: expected at most 16"),
        (lambda: order_heatmap(torch.zeros(1, 6), out, shape=(2, 3), images=x), "2 images for 1 maps"),
        (lambda: order_gif(torch.zeros(5), torch.zeros(6), decode, out, shape=(2, 3)), r"tokens \(1, 5\), came \(6,\)"),
        (lambda: order_gif(torch.zeros(6), torch.zeros(6), decode, out, shape=(2, 3), seconds=0), "seconds 0"),
    ]:
        with pytest.raises(ValueError, match=line) as error:
            mistake()
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
