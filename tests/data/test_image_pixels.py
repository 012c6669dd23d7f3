"""One picture: whatever its kind and shape, it becomes the square that it shows."""

import subprocess
import sys

import numpy as np
import pytest
from pictures_made import encoded, png
from PIL import EpsImagePlugin, Image

from command_inputs import noise
from maskless.data.image_pixels import decode, fit


@pytest.mark.parametrize(("filter", "resample"), [("bilinear", Image.BILINEAR), ("bicubic", Image.BICUBIC)])
@pytest.mark.parametrize(
    ("shape", "resized", "left", "top"),
    [((30, 50), (26, 16), 5, 0), ((12, 10), (16, 19), 0, 2), ((10, 12), (19, 16), 2, 0), ((9, 12), (21, 16), 2, 0)],
)
def test_fit_is_a_resize_of_the_shorter_side_and_a_centre_crop(filter, resample, shape, resized, left, top):
    pixels = noise(*shape, 3)
    reference = Image.fromarray(pixels).resize(resized, resample).crop((left, top, left + 16, top + 16))
    assert np.array_equal(fit(pixels, 16, filter), np.asarray(reference))
    grey = Image.fromarray(pixels[..., 0]).resize(resized, resample).crop((left, top, left + 16, top + 16))
    assert np.array_equal(fit(pixels[..., 0], 16, filter), np.stack([np.asarray(grey)] * 3, -1))
    assert np.array_equal(fit(pixels[..., 0], 16, filter, channels=1)[..., 0], np.asarray(grey))


def test_no_program_is_run_for_a_picture(tmp_path, monkeypatch):
    """Whatever its name, an EPS file would be handed to Ghostscript."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(ValueError, match="not a picture"):
        decode(drawing)
    assert not (tmp_path / "ran").exists()


def test_reducing_averages_all_pixels():
    """Antialiased: a fine checkerboard becomes grey, where taking every fourth pixel would give black."""
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    assert np.abs(fit(board, 16).astype(int) - 127).max() <= 8
    assert np.array_equal(fit(noise(16, 16, 3), 16), noise(16, 16, 3))  # of the right size it is left as it is


def test_all_modes_become_what_they_show():
    rgb, grey = noise(6, 5, 3), noise(6, 5)
    assert np.array_equal(decode(png(rgb)), rgb)
    assert np.array_equal(decode(png(grey)), grey)
    bits = Image.fromarray(grey).convert("1")
    assert np.array_equal(decode(encoded(bits)), np.asarray(bits) * 255)
    palette = Image.fromarray(rgb).quantize(16)
    assert np.array_equal(decode(encoded(palette)), np.asarray(palette.convert("RGB")))
    cmyk = encoded(Image.fromarray(np.full((8, 8, 3), (200, 30, 60), np.uint8)).convert("CMYK"), "jpeg", quality=100)
    assert np.abs(decode(cmyk).astype(int) - (200, 30, 60)).max() <= 6
    alpha = np.dstack([rgb, np.full((6, 5), 255, np.uint8)])
    alpha[0, :, 3] = 0
    assert np.array_equal(decode(png(alpha))[1:], rgb[1:])
    assert (decode(png(alpha))[0] == 255).all()  # nothing there: white
    assert (decode(png(np.stack([grey, np.zeros_like(grey)], -1))) == 255).all()

    levels = np.array([[0, 128, 129, 257, 65535 - 129, 65535]], np.uint16)  # sixteen bits are rounded to eight
    for kind in ("png", "tiff"):
        assert decode(encoded(Image.fromarray(levels), kind)).tolist() == [[0, 0, 1, 1, 254, 255]]


def test_a_picture_is_turned_upright():
    pixels = noise(4, 6, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held on its side
    assert np.array_equal(decode(encoded(Image.fromarray(pixels), exif=exif)), np.rot90(pixels, -1))


def test_of_a_picture_that_is_too_large_we_alone_speak():
    """In a process of its own: pytest has a list of filters for each test."""
    lines = """
import io
from PIL import Image
from maskless.data.image_pixels import decode
file = io.BytesIO()
Image.new("L", (40, 40)).save(file, "png")
Image.MAX_IMAGE_PIXELS = 1000
try:
    decode(file.getvalue())
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("40x40 pixels: above Pillow's limit of 1,000\n", "")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_broken_pictures_say_why(monkeypatch):
    whole = encoded(Image.fromarray(noise(64, 64, 3)), "jpeg")
    for data, why in ((b"", "empty"), (b"words", "not a picture"), (whole[:700], "truncated|broken")):
        with pytest.raises(ValueError, match=why):
            decode(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for side, why in ((40, "40x40 pixels: above"), (60, "exceeds limit")):  # a warning and an error of Pillow's
        with pytest.raises(ValueError, match=why):
            decode(png(noise(side, side, 3)))
    with pytest.raises(ValueError, match="too narrow"):
        fit(np.zeros((1, 60_000), np.uint8), 256)
