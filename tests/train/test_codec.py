"""A codec's run notes and shows what it does, and stopped or killed it goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from codec_runs import QUICK, TINY, blobs, complete, lines, quick_config
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from maskless.cli.codec import train_codec as command
from maskless.codec.vq import VQ, read_codec, to_images
from maskless.train import codec as module
from maskless.train.codec import CodecRun, configure, read_config, read_pictures, resumed, train_codec
from maskless.train.codec_loop import CodecConfig, CodecStep
from maskless.train.state import saved


def stop_after(folder: Path, config: CodecConfig, last: int) -> None:
    """Take steps up to `last`, saving as a run does, and drop everything that is only in memory."""
    run = CodecRun(folder, config, *read_pictures(config, Console(quiet=True)))
    for step in run:
        run.log(step)
        if step.step % config.save_every == 0:
            run.save(step.step)
        if step.step == last:
            break


def weights(folder: Path) -> bytes:
    return (folder / "codec" / "model.safetensors").read_bytes()


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


# Stopping and going on


def test_a_stopped_and_resumed_run_is_one_never_stopped(quick, straight, tmp_path):
    stop_after(tmp_path, quick(), 2)  # before the first state
    stop_after(tmp_path, quick(), 8)  # after the state of step 6
    stopped = complete(tmp_path, quick())
    assert lines(stopped) == lines(straight)
    assert [line["step"] for line in lines(straight)] == [*range(1, 11), 10]
    assert weights(stopped) == weights(straight)
    one, other = (torch.load(saved(folder / "states")[-1], weights_only=True) for folder in (stopped, straight))
    assert one["step"] == other["step"] == 10
    assert one["trainer"]["use"].equal(other["trainer"]["use"])
    for name in ("codec", "judge"):
        assert all(one["trainer"][name][key].equal(value) for key, value in other["trainer"][name].items())


def test_a_killed_run_leaves_a_codec_that_loads_and_goes_on(start, quick, straight, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(quick())))
    process = start("maskless", "train-codec", "--out", tmp_path, "--resume")
    process.until((tmp_path / "codec").exists)
    process.kill(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert isinstance(read_codec(tmp_path), VQ)
    assert lines(complete(tmp_path, read_config(tmp_path))) == lines(straight)
    assert weights(tmp_path) == weights(straight)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_run_killed_between_its_last_state_and_its_codec_gets_the_codec(quick, straight, tmp_path):
    shutil.copytree(straight, folder := tmp_path / "run")
    shutil.rmtree(folder / "codec")
    complete(folder, read_config(folder))
    assert weights(folder) == weights(straight)


def test_an_interrupted_run_saves_the_step_and_goes_on(quick, straight, ctrl_c, monkeypatch, tmp_path):
    """Also before a state is due."""
    log = CodecRun.log

    def interrupted(run: CodecRun, step: CodecStep) -> float | None:
        if step.step == 5:
            ctrl_c()
        return log(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(CodecRun, "log", interrupted)
        with pytest.raises(KeyboardInterrupt):
            complete(tmp_path, quick(save_every=0))
    (state,) = saved(tmp_path / "states")
    assert torch.load(state, weights_only=True)["step"] == 5
    assert isinstance(read_codec(tmp_path), VQ)
    assert lines(complete(tmp_path, quick(save_every=0))) == lines(straight)
    assert weights(tmp_path) == weights(straight)


def test_a_run_that_cannot_write_leaves_the_state_before(quick, straight, tmp_path, monkeypatch):
    write = module.write_aside

    def full(path, how):
        if path.name == "step-00000006.pt":
            raise OSError(28, "No space left on device")
        write(path, how)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_aside", full)
        with pytest.raises(OSError, match="No space left"):
            complete(tmp_path, quick())
    assert [path.name for path in saved(tmp_path / "states")] == ["step-00000003.pt"]
    assert read_codec(tmp_path).factor == 2
    assert lines(complete(tmp_path, quick())) == lines(straight)


def test_the_codec_of_a_run_is_the_average_of_its_weights(straight):
    last = torch.load(saved(straight / "states")[-1], weights_only=True)["trainer"]
    codec = read_codec(straight)
    for average, parameter in zip(last["averages"], codec.parameters(), strict=True):
        assert average.equal(parameter.data)
    assert not last["codec"]["decoder.conv_out.weight"].equal(codec.state_dict()["decoder.conv_out.weight"])
    assert len(saved(straight / "states")) == 2


def test_looking_does_not_disturb(quick, straight, tmp_path):
    looked = complete(tmp_path, quick(evaluate_every=2, save_every=1))
    assert [line for line in lines(looked) if "loss" in line] == [line for line in lines(straight) if "loss" in line]


def test_a_run_that_ends_before_its_first_log_has_a_speed(quick, tmp_path):
    summary = train_codec(tmp_path, quick(steps=2, log_every=10), Console(file=io.StringIO()))
    assert summary.images_per_second > 0


def test_minutes_end_a_run(quick, tmp_path):
    summary = train_codec(tmp_path, quick(steps=10**6, minutes=0.01), Console(file=io.StringIO()))
    assert 1 <= summary.steps < 1_000
    assert read_codec(tmp_path).encode(to_images(blobs(1))).shape == (1, 4, 4)


def test_a_run_goes_on_as_it_began(quick, straight):
    later = resumed(straight, [], steps=12, save_every=5)
    assert (later.steps, later.save_every) == (12, 5)
    assert dataclasses.replace(later, steps=10, save_every=3) == read_config(straight) == quick()
    for changed in ({"codec": {"codes": 32}}, {"factor": 4}, {"batch": 8}, {"size": 16}):
        with pytest.raises(ValueError, match=r" is .* in .*, not .*: a run goes on as it began"):
            resumed(straight, [], **changed)
    with pytest.raises(ValueError, match=r"images is .*: a run goes on as it began"):
        resumed(straight, ["others"])
    with pytest.raises(ValueError, match="holds a run already: go on with --resume"):
        configure(straight, ["images"])


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_of_no_pixels_is_refused(quick, size):
    with pytest.raises(ValueError, match=f"size is {size}: expected 1 or more pixels a side"):
        quick(size=size)


def test_a_damaged_state_is_named(quick, straight, tmp_path):
    stop_after(tmp_path, quick(), 3)
    state = saved(tmp_path / "states")[-1]
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-00000003.pt does not fit this run or is damaged"):
        complete(tmp_path, quick())


# The command


def test_the_command_trains_and_resumes(images, straight, tmp_path):
    app = typer.Typer()
    app.command()(command)
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    names = {"learning_rate": "lr"}
    settings = [f"--{names.get(k, k).replace('_', '-')}={v}" for k, v in QUICK.items() if k != "warmup"]
    given = [*sizes, *settings, "--factor=2", f"--images={images}", f"--out={tmp_path / 'run'}"]
    ended = CliRunner().invoke(app, [*given, "--steps=4"])
    assert ended.exit_code == 0, ended.output
    assert "PSNR" in ended.output
    assert str(tmp_path / "run" / "codec") in "".join(ended.output.split())
    assert read_config(tmp_path / "run").codec == read_config(straight).codec
    more = CliRunner().invoke(app, [f"--out={tmp_path / 'run'}", "--resume", "--steps=6", "--json"])
    assert more.exit_code == 0, more.output
    told = json.loads(more.stdout.splitlines()[-1])
    assert told["steps"] == 6
    assert told["psnr"] > 0
