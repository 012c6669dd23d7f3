"""What `generate` and `fill` draw is what was asked for: which classes, how many, and in which way."""

import numpy as np
import pytest
import torch
from PIL import Image

from maskless import images
from maskless.checkpoint import Model
from maskless.codec.vq import PixelCodec
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from tiny_networks import shaken


@pytest.fixture
def model() -> Model:
    """4 x 4 cells of 4 levels, dark or light."""
    torch.manual_seed(0)
    sizes = {"vocab": 6, "length": 17, "grid": (4, 4), "classes": 2, "width": 16, "heads": 2, "condition": 8}
    network = PartitionTransformer(PartitionConfig(**sizes, encoder=1, decoder=1))
    return Model(shaken(network, 0.2), PixelCodec(4), "image", ["dark", "light"])


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (["--label", "light", "--n", 3], ["light"] * 3),
        (["--label", "light", "--label", 0, "--n", 3], ["light", "dark", "light"]),
        (["--label", "light", "--label", 0], ["light", "dark"]),
        (["--n", 3], ["dark", "light", "dark"]),
        ([], ["dark", "light"] * 2),
    ],
)
def test_labels_come_in_turn_up_to_the_number_that_is_asked_for(command, saved, tmp_path, asked, names):
    assert command("generate", saved, *asked, "--steps", 2, "--out", tmp_path / "new").code == 0
    found = sorted(path.stem.split("-") for path in (tmp_path / "new").iterdir())
    assert found == [[f"{i:05}", name] for i, name in enumerate(names)]


def test_a_number_that_names_a_class_is_its_name(command, model, tmp_path):
    model.classes, to = ["2", "1"], tmp_path / "new"
    model.save_pretrained(tmp_path / "digits")
    asked = ["generate", tmp_path / "digits", "--steps", 2, "--out", to]
    assert command(*asked, "--label", 1, "--label", 2).code == 0
    assert sorted(path.name for path in to.iterdir()) == ["00000-1.png", "00001-2.png"]
    for label in ("0", "3", "²"):
        ended = command(*asked, "--label", label)
        assert (ended.code, ended.err) == (2, f"error: unknown label {label!r}: expected one of 2, 1\n")


HOW = {"order": "confidence", "noise": 2.0, "schedule": "constant", "warmup": 3, "guidance": 2.0, "steps": 4}
WORDS = [word for name, value in HOW.items() for word in (f"--{name}", value)]


def test_how_pictures_are_drawn_can_be_chosen(command, model, saved, tmp_path):
    to, heat = tmp_path / "new", tmp_path / "heat.png"
    assert command("generate", saved, "--label", "dark", *WORDS, "--out", to, "--heat", heat).code == 0
    (one,) = images.generate_images(model, ["dark"], **HOW)
    assert np.array_equal(np.asarray(Image.open(to / "00000-dark.png")), np.asarray(one.image))
    assert Image.open(heat).width > 400


def test_one_picture_is_written_alone_and_several_on_a_sheet_which_is_not_filled(command, model, saved, tmp_path):
    one, sheet, several = (tmp_path / f"{name}.png" for name in ("one", "sheet", "several"))
    asked = ["generate", saved, "--label", "light", "--steps", 2]
    for words in (["--out", one], ["--sheet", "--out", sheet], ["--n", 2, "--out", several]):
        assert command(*asked, *words).code == 0
    (drawn,) = images.generate_images(model, ["light"], steps=2)
    assert np.array_equal(np.asarray(Image.open(one)), np.asarray(drawn.image))
    out = tmp_path / "filled.png"
    assert command("fill", saved, one, "--box", "0,0,4,3", "--steps", 2, "--out", out).code == 0
    out.unlink()
    for path in (sheet, several):
        ended = command("fill", saved, path, "--box", "0,0,4,3", "--out", out)
        says = f"error: {path} is a sheet of images with captions: expected the file of a single image\n"
        assert (ended.code, ended.out, ended.err) == (2, "", says)
    assert not out.exists()
    ended = command(*asked, "--sheet", "--out", tmp_path / "folder")
    assert (ended.code, ended.err.count("\n"), "--sheet goes into a file" in ended.err) == (2, 1, True)


def test_how_a_picture_is_filled_can_be_chosen(command, model, saved, tmp_path):
    picture, out = tmp_path / "picture.png", tmp_path / "filled.png"
    Image.new("L", (4, 4), 85).save(picture)
    assert command("fill", saved, picture, "--box", "0,0,4,3", *WORDS, "--out", out).code == 0
    known = np.arange(4)[:, None].repeat(4, 1) == 3
    filled = images.fill_image(model, Image.open(picture), known, **HOW)
    assert np.array_equal(np.asarray(Image.open(out)), np.asarray(filled.image))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--label", 2], "unknown label 2: expected dark, light, or 0 to 1"),
        (["--label", "dark", "--n", 0], "n 0 is out of range: expected 1 or more"),
        (["--noise", 1], "--noise is for --order confidence: the order is halton"),
        (["--schedule", "up"], "unknown schedule 'up': expected one of constant, ramp, cosine, interval"),
        (["--warmup", -1], "warmup -1 is out of range: expected 0 (none) or more steps"),
        (["--heat", "heat.png", "--n", 17], "--heat of 17 pictures: expected 16 or fewer"),
        (["--gif", "new2.png"], "--gif new2.png: expected a name that ends in .gif"),
        (["--heat", "heat.gif"], "--heat heat.gif: expected a name that ends in .png"),
        (["--heat", "heat.png", "--gif", "heat.png"], "heat.png is named twice: expected two files"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(command, saved, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    ended = command("generate", saved, *words, "--out", "new.png")
    assert (ended.code, ended.err) == (2, f"error: {says}\n")
    assert not (tmp_path / "new.png").exists()


def test_what_is_compared_goes_into_a_png(command, saved, tmp_path):
    Image.new("L", (4, 4), 85).save(tmp_path / "a.png")
    out, compare = tmp_path / "out.png", tmp_path / "both.jpg"
    ended = command("fill", saved, tmp_path / "a.png", "--box", "0,0,4,3", "--out", out, "--compare", compare)
    assert (ended.code, ended.err) == (2, f"error: --compare {compare}: expected a name that ends in .png\n")
    assert not out.exists()


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ("0,0,64,256", "box 0,0,64,256 is outside of the picture's middle square, 64,0,320,256: the model sees no"),
        ("70,9,71,10", "box 70,9,71,10 is too small: the model sees 4 x 4 pixels of this picture"),
    ],
)
def test_a_box_of_which_the_model_sees_nothing_is_one_line(command, saved, tmp_path, box, says):
    Image.new("L", (384, 256)).save(tmp_path / "wide.png")
    ended = command("fill", saved, tmp_path / "wide.png", "--box", box, "--out", tmp_path / "out.png")
    assert ended.code == 2
    assert ended.err.startswith(f"error: {says}")
    mask = np.full((256, 384), 255, np.uint8)
    left, top, right, bottom = map(int, box.split(","))
    mask[top:bottom, left:right] = 0
    Image.fromarray(mask).save(tmp_path / "mask.png")
    with_mask = ["--known", tmp_path / "mask.png", "--out", tmp_path / "out.png"]
    said = command("fill", saved, tmp_path / "wide.png", *with_mask).err
    assert said == ended.err.replace(f"box {box}", f"what {tmp_path / 'mask.png'} does not keep")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["generate", "stories", "--label", 0], "--label is for image models: this is a text model"),
        (
            ["generate", "stories", "--out", "a.png"],
            "--out a.png: expected a folder for texts; to write them to a file",
        ),
        (
            ["generate", "stories", "--out", "a.txt"],
            "--out a.txt: expected a folder for texts; to write them to a file",
        ),
        (["fill", "stories", "A [2].", "--label", 0], "--label is for image models: this is a text model"),
        (["fill", "stories", "A [2].", "--out", "a.png"], "--out is for image models: this is a text model"),
        (["fill", "stories", "A [2].", "--guidance", 2], "guidance 2.0 needs a network with class labels: this one"),
    ],
)
def test_what_is_for_pictures_is_refused_for_text(command, line, said):
    assert command(*line).err.startswith(f"error: {said}")
