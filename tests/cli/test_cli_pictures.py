"""The commands with pictures: a folder of them becomes tokens, a model, new ones in a file, and figures of these."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from command_inputs import INPUTS
from in_process import done, exit_code_of, one_line
from maskless import api, images
from maskless.evaluate.images import Statistics
from maskless.evaluate.sets import drawn
from nn.reference import random_maskgit


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


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """The options that name a feature network."""
    path = tmp_path_factory.mktemp("features") / "means.pt"
    INPUTS["inception.pt"](path)
    return ["--features", path, "--feature-input", "pixels"]


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    """The folder of a run that knows dark from light."""
    folder = tmp_path_factory.mktemp("run")
    data, to = folder / "data", folder / "run"
    assert exit_code_of("prepare", photos, "--out", data, "--codec", "pixels:4", "--size", 4) == 0
    sizes = ("--width", 32, "--layers", 2, "--steps", 30, "--batch", 16, "--lr", 5e-3, "--warmup", 5, "--ema", 0.9)
    assert exit_code_of("train", "--data", data, "--out", to, "--tracker", "none", *sizes) == 0
    return to


def test_from_a_folder_of_pictures_to_new_ones(run, tmp_path, command):
    png, gif = tmp_path / "new.png", tmp_path / "new.gif"
    assert (run / "samples.png").exists()
    assert (run.parent / "data" / "codec").is_dir()
    asked = ("--label", "dark", "--label", 1, "--steps", 4, "--guidance", 1.5, "--out", png, "--gif", gif)
    assert "2 pictures" in done(command("generate", run, *asked)).out
    assert Image.open(png).size[0] > 2 * 96
    assert Image.open(gif).n_frames == 6


def test_into_a_folder_go_the_pictures_as_they_are(run, tmp_path, command):
    new, old = tmp_path / "new", tmp_path / "v1.0"
    old.mkdir()
    for to in (new, old):
        drawn = done(command("generate", run, "--label", "dark", "--label", 1, "--steps", 4, "--out", to))
        assert drawn.out == f"{to}: 2 pictures\n"
        assert sorted(path.name for path in to.iterdir()) == ["00000-dark.png", "00001-light.png"]
        for path, one in zip(
            sorted(to.iterdir()), images.generate_images(api.load(run), ["dark", 1], steps=4), strict=True
        ):
            assert np.array_equal(np.asarray(Image.open(path)), np.asarray(one.image))


def test_what_is_to_be_tried_after_distilling_draws_pictures(run, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = ("--rounds", 1, "--steps-per-round", 2, "--batch", 4, "--tracker", "none")
    shown = done(command("distill", run, "--data", run.parent / "data", "--out", "fast", *how)).out
    said, _, tried = shown.splitlines()[-1].partition("   try: maskless ")
    assert said == "student: fast/round-1"
    done(command(*tried.split()))
    assert Image.open(tmp_path / "new.png").width > 0


def test_a_released_network_is_given_the_codec_of_its_tokens(tmp_path, command):
    state = random_maskgit(vocab=13, width=64, places=16, classes=4, blocks=2, hidden=40)
    file, to = tmp_path / "released.pth", tmp_path / "model"
    torch.save({"iter": 5, "model_state_dict": state}, file)
    said = one_line(command("convert", file, to, "--codec", "pixels:8"))
    assert said == "the codec pixels:8 has 8 codes, the model a vocabulary of 13"
    done(command("convert", file, to, "--codec", "pixels:12"))
    assert "1 picture\n" in done(command("generate", to, "--label", 3, "--steps", 2, "--out", tmp_path / "new.png")).out


# Filling in


@pytest.mark.parametrize("how", ["known", "box"])
def test_a_part_of_a_picture_is_drawn_anew(run, photos, tmp_path, command, how):
    """Of a picture 4 high and 6 wide the middle square counts; its right half is drawn, the left one stays."""
    picture, mask, out, both = photos / "light" / "0.png", *(tmp_path / name for name in ("m.png", "o.png", "b.png"))
    keep = np.full((4, 6), 255, np.uint8)
    keep[:, 3:5] = 0
    Image.fromarray(keep).save(mask)
    asked = ["--known", mask] if how == "known" else ["--box", "3,0,5,4"]
    more = ["--label", "light", "--guidance", 1, "--steps", 4, "--out", out, "--compare", both]
    assert "8 of 16 cells redrawn" in done(command("fill", run, picture, *asked, *more)).out
    whole, filled = np.asarray(Image.open(picture))[:, 1:5], np.asarray(Image.open(out))
    assert np.array_equal(filled[:, :2], whole[:, :2])
    assert set(filled[:, 2:].flatten().tolist()) <= {0, 85, 170, 255}  # levels of the codec
    loaded, known = api.load(run, device="cpu"), np.repeat([[True, True, False, False]], 4, 0)
    again = api.fill(loaded, whole, known=known, label="light", guidance=1.0, steps=4)
    assert np.array_equal(np.asarray(again.image), filled)
    assert Image.open(both).size[1] > 3 * 96


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{picture}"], "which part? expected either --known MASK.png (white stays) or --box"),
        (["{picture}", "--box", "0,0,2,2", "--known", "{picture}"], "which part? expected either"),
        (["{picture}", "--box", "0,0,7,2"], "box 0,0,7,2 does not lie in the picture: expected edges from 0,0 to 6,4"),
        (["{picture}", "--box", "0,0,2"], "box '0,0,2': expected LEFT,TOP,RIGHT,BOTTOM in pixels"),
        (["{picture}", "--box", "0,0,1,4"], "box 0,0,1,4 is outside of the picture's middle square, 1,0,5,4"),
        (["{picture}", "--known", "{small}"], "small.png has 4 x 4 pixels: expected 6 x 4, as the picture has"),
        (["{picture}", "--known", "{words}"], "words.png: not a picture that Pillow can read"),
        (["The [3]", "--box", "0,0,2,2"], "The [3] is not a file: this is an image model"),
        (["{picture}", "--box", "1,0,5,4", "--label", "zebra"], "unknown label 'zebra': expected one of dark, light"),
        (["{picture}", "--box", "1,0,5,4", "--steps", "99"], "steps 99 is out of range: expected 1 to 16"),
        (["{picture}", "--box", "1,0,5,4", "--json"], "--json is for text models: this is an image model"),
    ],
)
def test_what_cannot_be_filled_is_one_line(run, photos, tmp_path, command, arguments, says):
    Image.new("L", (4, 4)).save(tmp_path / "small.png")
    (tmp_path / "words.png").write_text("words")
    names = {"picture": photos / "dark" / "0.png", "small": tmp_path / "small.png", "words": tmp_path / "words.png"}
    filled = [one.format(**names) for one in arguments]
    assert says in one_line(command("fill", run, *filled, "--out", tmp_path / "out.png"))
    assert not (tmp_path / "out.png").exists()


# Chains


def test_a_chain_of_pictures_is_trained_measured_drawn_and_filled_in(run, photos, tmp_path, command):
    data, to = run.parent / "data", tmp_path / "chain"
    sizes = ("--width", 32, "--layers", 2, "--steps", 3, "--batch", 8, "--tracker", "none")
    done(
        command("train", "--data", data, "--out", to, "--objective", "chain", "--orders", "raster=1,regions2=1", *sizes)
    )
    about = json.loads((to / "model" / "config.json").read_text())
    assert about["orders"] == "raster=1,regions2=1"
    assert (about["network"]["rope"], about["network"]["context"]) == ("2d", "ordered")
    asked = ["evaluate", to, "--what", "bound", "--data", data, "--sequences", 2, "--samples", 1]
    found = json.loads(done(command(*asked, "--json")).out)
    assert [*found] == ["any order (bound)", "raster", "raster, 16 steps", "regions 2", "regions 2, 4 steps"]
    assert all(one["tokens"] == 2 * 16 for one in found.values())
    assert "bits per image" in done(command(*asked)).out
    png = tmp_path / "new.png"
    done(command("generate", to, "--label", "dark", "--guidance", 2, "--schedule", "interval", "--out", png))
    done(command("fill", to, photos / "dark" / "0.png", "--box", "1,0,5,4", "--label", "dark", "--out", png))
    assert "expected --data DIR, a prepared folder" in one_line(command("evaluate", to, "--what", "bound"))
    wrong = one_line(command(*asked, "--guidance", 2))
    assert "--guidance does not go with --what bound of an image model" in wrong
    wrong = one_line(command("train", "--data", data, "--out", tmp_path / "no", "--orders", "regions9", *sizes))
    assert "regions 9 of a grid of 4 x 4 is out of range: expected 1 to 4" in wrong


# Figures


def test_a_model_of_pictures_is_measured(run, photos, features, tmp_path, command, monkeypatch):
    to, kept = tmp_path / "quality.json", tmp_path / "real.npz"
    asked = ["evaluate", run, "--reference", photos, *features, "--steps", 4, "--samples", 20, "--out", to]
    shown = done(command(*asked, "--guidance", "0,2", "--save-statistics", kept)).out.splitlines()
    assert shown[0] == "| guidance | FID | Inception Score | precision | recall | images/s |"
    assert len(shown) == 6
    assert "20 images against 48; features of means.pt" in shown[-1]
    found = json.loads(to.read_text())
    assert [point["guidance"] for point in found["points"]] == [0, 2]
    assert all(point["images_per_second"] > 0 for point in found["points"])
    assert found["conditions"]["settings"]["order"] == "halton"
    assert Image.open(tmp_path / "quality.png").size[0] > 500
    assert Statistics.load(kept).n == 48
    # The same again draws nothing; a third weight draws only its own. Without a model: the same pictures, the same FID.
    monkeypatch.setattr("maskless.evaluate.sets.draw", None)
    assert json.loads(done(command(*asked, "--guidance", "2,0", "--json")).out) == found
    monkeypatch.undo()
    folder = tmp_path / "drawn"
    folder.mkdir()
    for i, one in enumerate(api.generate(api.load(run, device="cpu"), 20, steps=4)):
        one.image.save(folder / f"{i}.png")
    for real in (photos, kept):
        alone = json.loads(done(command("fid", real, folder, *features, "--size", 4, "--json")).out)
        assert alone["fid"] == pytest.approx(found["points"][0]["quality"]["fid"])
        assert (alone["precision"] is None) == (real == kept)


def test_two_sides_of_a_set_of_pictures_are_compared(photos, features, command):
    shown = done(command("fid", f"{photos}:train", photos, *features)).out
    assert "48 images against 45; features of means.pt" in " ".join(shown.split())
    same = json.loads(done(command("fid", photos, photos, *features, "--json")).out)
    assert same["fid"] == pytest.approx(0, abs=1e-6)
    assert (same["precision"], same["recall"], same["images"]) == (1, 1, 48)


def test_broken_pictures_are_counted_and_the_first_is_named(run, photos, features, tmp_path, command, monkeypatch):
    folder = shutil.copytree(photos, tmp_path / "photos")
    for name in ("a", "b"):
        (folder / "dark" / f"{name}.png").write_text("words")
    told = f"{folder}: 2 broken pictures left out ({folder}/dark/a.png: not a picture that Pillow can read ...)\n"
    shown = done(command("fid", photos, folder, *features, "--json"))
    assert (json.loads(shown.out)["images"], shown.err) == (48, told)
    asked = ["evaluate", run, "--reference", folder, *features, "--steps", 4, "--samples", 20]
    assert done(command(*asked, "--out", tmp_path / "quality.json")).err.startswith(told)
    monkeypatch.setattr("maskless.evaluate.sets.gather_object", lambda own: own * 2)  # another process has two more
    assert f"{folder}: 4 broken pictures" in done(command("fid", photos, folder, *features)).err
    monkeypatch.setattr("maskless.evaluate.sets.PartialState", lambda: Share(1))
    assert done(command("fid", photos, folder, *features)).err == ""


def test_processes_draw_shares_of_the_same_pictures(run, monkeypatch):
    model, shares = api.load(run, device="cpu"), []
    whole = torch.cat(list(drawn(model, 11, 3, steps=4)(1.0)))
    for rank in (0, 1):
        monkeypatch.setattr("maskless.evaluate.sets.PartialState", lambda rank=rank: Share(rank))
        shares.append(torch.cat(list(drawn(model, 11, 2, steps=4)(1.0))))
    assert torch.equal(shares[0], whole[0::2])
    assert torch.equal(shares[1], whole[1::2])
    listed = images.generate_images(model, n=11, steps=4, guidance=1.0)
    assert whole.squeeze(3).tolist() == [np.asarray(one.image).tolist() for one in listed]


class Share:
    num_processes = 2

    def __init__(self, rank: int):
        self.process_index = rank
        self.is_main_process = rank == 0


MEASURED = "evaluate {run} {features} --reference {photos} --out {out}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("evaluate {run} --data {data}", "--data is for text models: this is an image model"),
        ("evaluate {run} --sequences 8", "--sequences is for text models"),
        ("evaluate {run} --out {out}", "this is an image model: expected --reference PATH (real ones) and --out"),
        ("evaluate {run} --reference {photos} --out {out} --features {tmp}/none.pt", "no feature network at"),
        ("evaluate {run} --reference {photos} --out {out} --features {tmp}/words", "words is not a feature network"),
        ("evaluate {run} {features} --reference {tmp}/none --out {out}", "none: no such file or folder"),
        ("evaluate {run} {features} --reference {data} --out {out}", "holds tokens, not pictures"),
        (f"{MEASURED.replace('os}', 'os}:valid')}", "valid has 3 pictures: expected 10 or more"),
        ("evaluate {run} {features} --reference {photos} --out {tmp}/no/q.json", "no is not a folder"),
        (f"{MEASURED} --valid 0.2", "--valid 0.2 is for PATH:train or PATH:valid where the data has no split"),
        (f"{MEASURED} --guidance x", "--guidance 'x': expected a number, or several"),
        (f"{MEASURED} --guidance -1", "guidance -1.0 is out of range"),
        (f"{MEASURED} --steps 17", "steps 17 is out of range: expected 1 to 16"),
        (f"{MEASURED} --steps 2,4", "--steps 2,4: expected one number for pictures"),
        (f"{MEASURED} --order up", "unknown order 'up': expected one of halton"),
        (f"{MEASURED} --samples 9", "samples 9 is out of range: expected 10 or more"),
        ("fid {tmp}/other.npz {photos} {features}", "other.npz holds statistics of another network (sha256 ffffff"),
        ("generate {run} --out {out} --prompt a", "--prompt is for text models: this is an image model"),
        ("generate {run}", "pictures go into a file: expected --out FILE.png"),
        ("generate {run} --out {out}", "out.json: expected a name that ends in .png"),
        ("generate {run} --out {tmp}/new.png --gif {tmp}", "is a folder: expected the name of a file"),
        ("generate {run} --out {tmp}/new.png --gif {tmp}/../{tmp.name}/new.png", "new.png is named twice"),
        ("generate {run} --out {tmp}/no/new", "no is not a folder"),
        ("fill {run} {photos}/dark/0.png --box 0,0,2,2 --out {tmp}", "expected a name that ends in .png"),
        ("train --out {out} --data {data} --weights exact", "weights 'exact' are for text: expected arccos"),
        ("train-codec --out {out} --recipe cifar10-pgm", "recipe 'cifar10-pgm' is for train: expected"),
        ("prepare {photos} --out {out}", "these are pictures: expected --codec"),
        ("prepare {photos} --out {out} --length 9", "--length is for text: these are pictures"),
        ("prepare {photos} --out {out} --codec pixels:one --size 4", "expected pixels:LEVELS"),
        ("prepare {photos} --out {out} --codec {tmp}/none --size 4", "is not a codec folder"),
    ],
)
def test_what_cannot_be_measured_is_one_line(run, photos, features, tmp_path, command, line, says):
    (tmp_path / "words").write_text("words")
    Statistics.of(torch.rand(20, 6), "f" * 64).save(tmp_path / "other.npz")
    names = {"run": run, "data": run.parent / "data", "photos": photos, "tmp": tmp_path, "out": tmp_path / "out.json"}
    given = line.format(**names, features=" ".join(map(str, features))).split()
    assert says in one_line(command(*given))
    assert not (tmp_path / "out.json").exists()
