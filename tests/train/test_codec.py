"""A codec's run notes and shows what it does, is judged by a feature network, and goes on as it began."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from codec_runs import QUICK, TINY, blobs, complete, lines, quick_config
from PIL import Image
from typer.testing import CliRunner

from command_inputs import INPUTS
from maskless.cli.train import train_codec as command
from maskless.codec.vq import to_images, to_pixels
from maskless.evaluate.images import fid, look
from maskless.evaluate.inception import features
from maskless.train import codec as module
from maskless.train.codec import CodecRun, configure, read_config, resumed


@pytest.fixture(scope="module")
def straight(images, tmp_path_factory) -> Path:
    """A run that nothing stopped."""
    return complete(tmp_path_factory.mktemp("straight"), quick_config(images))


# What it notes and shows


def test_the_adversarial_loss_begins_after_its_share_of_the_run(straight):
    judged = {line["step"] for line in lines(straight) if "discriminator" in line}
    assert judged == {line["step"] for line in lines(straight) if "adversarial" in line} == set(range(4, 11))


def test_the_picture_shows_originals_and_reconstructions(straight):
    with Image.open(straight / "reconstructions.png") as shown:
        assert shown.width > 2 * 96  # both that are held out
        assert shown.height > 2 * 96


def test_the_picture_shows_all_that_is_held_out_evenly(quick, tmp_path, monkeypatch):
    """A folder is sorted by class, so the first pictures would be of one class."""
    shades = np.repeat(np.arange(16, dtype=np.uint8), 2) * 10
    images = np.broadcast_to(shades[:, None, None, None], (32, 8, 8, 3)).copy()
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(module.pictures, "reconstructions", lambda shown, rebuilt, path: drawn.extend((shown, rebuilt)))
    this = CodecRun(tmp_path, quick(), images, np.arange(32) >= 16)
    this.evaluate(0)
    this.close()
    shown, rebuilt = drawn
    assert shown.shape == rebuilt.shape
    assert shown[:, 0, 0, 0].tolist() == [80, 90, 100, 110, 120, 130, 140, 150]


def test_the_error_of_one_picture_is_unknown(quick, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    pictures = blobs(2)
    run = CodecRun(tmp_path / "run", quick(), pictures, np.array([False, True]))
    found = run.evaluate(10)
    assert math.isnan(found.psnr_error)
    assert f"PSNR {found.psnr:.2f} ± ? dB on 1 images held out" in module.described(found)
    assert lines(tmp_path / "run")[-1]["psnr_error"] is None


def test_a_codec_whose_pictures_are_no_numbers_is_an_error(quick, monkeypatch, tmp_path):
    """Also where all that was learned is: from such weights the pictures may pass every number."""
    rebuilt = CodecRun._rebuilt

    def spoiled(this: CodecRun, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        images, out = rebuilt(this, numbers)
        return images, out * math.nan

    monkeypatch.setattr(CodecRun, "_rebuilt", spoiled)
    with pytest.raises(ValueError, match=r"the PSNR is nan at step 2: .*try a lower learning rate"):
        complete(tmp_path, quick(steps=2))
    assert not (tmp_path / "reconstructions.png").exists()


# What a feature network says


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("features") / "means.pt"
    INPUTS["inception.pt"](path)
    return path


def test_reconstructions_are_judged_as_fid_judges_two_sets(quick, judge, tmp_path, monkeypatch):
    network, pictures = features(judge, input="pixels", device="cpu"), blobs(40)
    run = CodecRun(tmp_path / "run", quick(), pictures, np.arange(40) % 2 == 1, network)
    found = run.finish(0, lambda text: None)
    numbers = torch.from_numpy(pictures[1::2])
    with run.averaged(), torch.no_grad():
        rebuilt = to_pixels(run.trainer.codec(to_images(numbers))[0])
    expected = fid(look([numbers], network).statistics, look([rebuilt], network).statistics)
    assert found.rfid == pytest.approx(expected, rel=1e-6)
    assert (found.rfid_images, found.features) == (20, "means.pt")
    assert f"rFID {found.rfid:.2f} of 20, means.pt" in module.described(found)
    assert lines(tmp_path / "run")[-1]["rfid"] == found.rfid
    monkeypatch.setattr(CodecRun, "_rebuilt", lambda this, some: (to_images(pictures[some]),) * 2)
    assert run.reconstruction_fid(network) < 1e-9  # of the images themselves
    run.close()
    with pytest.raises(ValueError, match=r"rFID of 1 image\(s\) to test on: expected 2 or more"):
        CodecRun(tmp_path / "one", quick(), blobs(1), np.zeros(1, dtype=bool), network)


def test_the_entropy_is_one_of_the_parts_of_the_loss(straight):
    noted = [line for line in lines(straight) if "loss" in line]
    assert all(-math.log(24) <= line["entropy"] <= 1e-4 for line in noted)


# Stopping and going on


def test_a_run_goes_on_as_it_began(quick, straight):
    later = resumed(straight, [], steps=12, save_every=5)
    assert (later.steps, later.save_every) == (12, 5)
    assert dataclasses.replace(later, steps=10, save_every=3) == read_config(straight) == quick()
    for changed in ({"codec": {"codes": 32}}, {"factor": 4}, {"batch": 8}, {"size": 16}):
        with pytest.raises(ValueError, match=r" is .* in .*, not .*: a run goes on as it began"):
            resumed(straight, [], **changed)
    with pytest.raises(ValueError, match=r"images is .*: a run goes on as it began"):
        resumed(straight, ["others"])
    with pytest.raises(ValueError, match="holds a run already: resume it with --resume"):
        configure(straight, ["images"])


# The command


def test_the_command_trains_and_resumes(images, straight, judge, tmp_path):
    app = typer.Typer()
    app.command()(command)
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    names = {"learning_rate": "lr"}
    settings = [f"--{names.get(k, k).replace('_', '-')}={v}" for k, v in QUICK.items() if k != "warmup"]
    given = [*sizes, *settings, "--factor=2", f"--images={images}", f"--out={tmp_path / 'run'}"]
    ended = CliRunner().invoke(app, [*given, "--steps=4"])
    assert ended.exit_code == 0, ended.output
    assert "PSNR" in ended.output
    assert "train-codec --resume --features FILE" in ended.output
    assert str(tmp_path / "run" / "codec") in "".join(ended.output.split())
    assert read_config(tmp_path / "run").codec == read_config(straight).codec
    judged = [f"--features={judge}", "--feature-input=pixels"]
    more = CliRunner().invoke(app, [f"--out={tmp_path / 'run'}", "--resume", "--steps=6", "--json", *judged])
    assert more.exit_code == 0, more.output
    told = json.loads(more.stdout.splitlines()[-1])
    assert told["steps"] == 6
    assert told["psnr"] > 0
    assert told["rfid"] >= 0
