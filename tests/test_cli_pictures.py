"""The commands with pictures: a folder of them becomes tokens, a model, and new ones in a file."""

import sys

import numpy as np
import pytest
from PIL import Image

from maskless.cli import main


def maskless(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["maskless", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Dark squares and light ones."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 128)):
        (folder / name).mkdir()
        for i in range(24):
            pixels = generator.integers(low, low + 128, (4, 6), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def test_from_a_folder_of_pictures_to_new_ones(photos, tmp_path, monkeypatch, capsys):
    data, run, png, gif = tmp_path / "data", tmp_path / "run", tmp_path / "new.png", tmp_path / "new.gif"
    assert maskless(monkeypatch, "prepare", photos, "--out", data, "--codec", "pixels:4", "--size", 4) == 0
    assert "4 x 4 tokens of 4 codes, 2 classes" in capsys.readouterr().out
    sizes = ("--width", 32, "--layers", 2, "--steps", 30, "--batch", 16, "--lr", 5e-3, "--warmup", 5, "--ema", 0.9)
    assert maskless(monkeypatch, "train", "--data", data, "--out", run, "--tracker", "none", *sizes) == 0
    assert (run / "samples.png").exists()
    capsys.readouterr()
    asked = ("--label", "dark", "--label", 1, "--steps", 4, "--guidance", 1.5, "--out", png, "--gif", gif)
    assert maskless(monkeypatch, "generate", run, *asked) == 0
    assert "2 pictures" in capsys.readouterr().out
    assert Image.open(png).size[0] > 2 * 96
    assert Image.open(gif).n_frames == 6
    for arguments, says in (
        (["fill", run, "The [3]"], "is a model of pictures: this command fills text"),
        (["evaluate", run, "--data", data], "holds pictures: this command measures text"),
        (["generate", run, "--out", png, "--prompt", "a"], "--prompt is for models of text: this is one of pictures"),
        (["generate", run, "--label", "zebra", "--out", png], "unknown label 'zebra': expected one of dark, light"),
        (["generate", run], "pictures go into a file: expected --out FILE.png"),
    ):
        assert maskless(monkeypatch, *arguments) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prepare", "{photos}", "--out", "{tmp}/x"], "these are pictures: expected --codec"),
        (["prepare", "{photos}", "--out", "{tmp}/x", "--codec", "pixels:one", "--size", "4"], "expected pixels:LEVELS"),
        (["prepare", "{photos}", "--out", "{tmp}/x", "--codec", "{tmp}/none", "--size", "4"], "is not a codec folder"),
    ],
)
def test_mistakes_are_one_line(photos, tmp_path, monkeypatch, capsys, arguments, says):
    filled = [one.format(photos=photos, tmp=tmp_path) for one in arguments]
    assert maskless(monkeypatch, *filled) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()
