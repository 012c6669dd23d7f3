"""Training a codec: it learns, it keeps its codes in use, and stopped or killed it goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from maskless.cli.codec import train_codec as command
from maskless.codec.vq import VQ, read_codec, to_images
from maskless.train import codec as module
from maskless.train.codec import CodecRun, configure, read_config, read_pictures, resumed, train_codec
from maskless.train.codec_loop import CodecConfig, CodecStep, Trainer, learning_rate, train_steps
from maskless.train.report import read_metrics
from maskless.train.state import saved

TINY = {"codes": 24, "code_width": 4, "latent": 8, "width": 32, "blocks": 1}
CPU = torch.device("cpu")
QUICK = {
    "steps": 10,
    "batch": 4,
    "learning_rate": 2e-3,
    "warmup": 2,
    "ema": 0.5,
    "revive_after": 4,
    "adversarial_start": 0.3,
    "evaluate_every": 0,
    "save_every": 3,
    "log_every": 1,
    "seed": 5,
}


def blobs(count: int, height: int = 8, width: int = 8) -> np.ndarray:
    """A disc of one grey on another, anywhere."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    images = np.empty((count, height, width, 3), np.uint8)
    for image in images:
        inside = (y - random.uniform(0, height)) ** 2 + (x - random.uniform(0, width)) ** 2 < 9
        image[:] = np.where(inside, random.integers(0, 256), random.integers(0, 256))[..., None]
    return images


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("images") / "blobs.npy"
    np.save(path, blobs(40))
    return str(path)


@pytest.fixture
def quick(images):
    def make(**changed) -> CodecConfig:
        return configure(Path("absent"), [images], factor=2, codec=TINY, **QUICK | changed)

    return make


def complete(folder: Path, config: CodecConfig) -> Path:
    train_codec(folder, config, Console(file=io.StringIO()))
    return folder


def stop_after(folder: Path, config: CodecConfig, last: int) -> None:
    """Take steps up to `last`, saving as a run does, and drop everything that is only in memory."""
    run = CodecRun(folder, config, *read_pictures(config, Console(quiet=True)))
    for step in run:
        run.log(step)
        if step.step % config.save_every == 0:
            run.save(step.step)
        if step.step == last:
            break


def lines(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder / "metrics.jsonl")]


def weights(folder: Path) -> bytes:
    return (folder / "codec" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(images, tmp_path_factory) -> Path:
    """A run that nothing stopped."""
    config = configure(Path("absent"), [images], factor=2, codec=TINY, **QUICK)
    return complete(tmp_path_factory.mktemp("straight"), config)


# Learning


def test_a_codec_learns_to_reconstruct(quick, tmp_path):
    learning = {"steps": 40, "batch": 16, "learning_rate": 1e-3, "ema": 0.8, "adversarial_start": 0.8}
    folder = complete(tmp_path / "run", quick(**learning, evaluate_every=5, save_every=0))
    noted = lines(folder)
    measured = [line for line in noted if "psnr" in line]
    assert [line["step"] for line in measured] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert measured[-1]["psnr"] > measured[0]["psnr"] + 1.5
    assert measured[-1]["l1"] < 0.85 * measured[0]["l1"]
    assert all(line["held_out"] and line["images"] == 2 for line in measured)  # one in twenty
    assert all(1 <= line["code_perplexity"] <= 24 * line["codes_used"] + 1e-9 for line in measured)
    assert measured[-1]["codes_used"] > 0.9
    trained = [line for line in noted if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 41))
    first, last = (sum(line["pixels"] for line in part) for part in (trained[:5], trained[-5:]))
    assert last < 0.7 * first


def test_held_out_images_are_never_trained_on(quick, tmp_path):
    config = quick()
    run = CodecRun(tmp_path, config, *read_pictures(config, Console(quiet=True)))
    assert len(run.tested) == 2
    assert sorted([*run.tested, *run.trainer.rows]) == list(range(40))
    alone = CodecRun(tmp_path / "alone", config, blobs(1), np.zeros(1, dtype=bool))
    assert not alone.held_out
    assert alone.tested.tolist() == alone.trainer.rows.tolist() == [0]
    many = CodecRun(tmp_path / "many", config, blobs(3_000), np.arange(3_000) % 2 == 1)
    assert len(many.tested) == 1_024
    assert (many.tested % 2 == 1).all()
    assert many.tested[-1] > 2_900  # from the whole range


def test_data_with_a_split_of_its_own_is_trained_on_that(quick, tmp_path):
    np.savez(tmp_path / "own.npz", x_train=blobs(12), x_test=blobs(3))
    images, held_out = read_pictures(
        dataclasses.replace(quick(), images=(str(tmp_path / "own.npz"),)), Console(quiet=True)
    )
    assert images.shape == (15, 8, 8, 3)
    assert held_out.tolist() == [False] * 12 + [True] * 3


def test_the_adversarial_loss_begins_after_its_share_of_the_run(straight):
    judged = {line["step"] for line in lines(straight) if "discriminator" in line}
    assert judged == {line["step"] for line in lines(straight) if "adversarial" in line} == set(range(4, 11))


def test_the_adversarial_loss_comes_in_gently_and_moves_the_codec(quick):
    config = quick(adversarial_start=0.0, learning_rate=1e-3, warmup=0)
    after = {}
    for weight, share in ((1.0, 0.0), (0.0, 0.5), (1.0, 0.5)):
        changed = dataclasses.replace(config, adversarial=weight)
        trainer = Trainer(changed, blobs(8), np.arange(8), CPU)
        trainer.step(0, share, 1e-3)
        after[weight, share] = trainer.codec.decoder.conv_out.weight.detach()
    torch.testing.assert_close(after[1.0, 0.0], after[0.0, 0.5])  # its weight begins at zero
    assert (after[1.0, 0.5] - after[0.0, 0.5]).abs().max() > 1e-4


def test_half_of_the_images_are_flipped_and_all_come_once_in_an_epoch(quick):
    images = blobs(8)
    plain, flipped = (Trainer(quick(flip=flip), images, np.arange(8), CPU) for flip in (False, True))
    whole = torch.cat([plain.batch(0), plain.batch(1)])
    assert sorted(x.sum().item() for x in whole) == sorted(x.sum().item() for x in to_images(images))
    same = turned = 0
    for step in range(8):
        for one, other in zip(plain.batch(step), flipped.batch(step), strict=True):
            same, turned = same + one.equal(other), turned + one.flip(2).equal(other)
    assert same + turned == 32
    assert 6 < turned < 26


def test_dead_codes_are_revived_with_their_averages_and_moments(quick):
    trainer = Trainer(quick(steps=100, revive_after=3, adversarial=0), blobs(8), np.arange(8), CPU)
    weight = trainer.codec.quantize.embedding.weight
    place = [p is weight for p in trainer.codec.parameters()].index(True)
    with torch.no_grad():
        weight[4:] = weight[0]  # never chosen: the first of equals is
    trainer.ema.averages[place][4:] = 7.0
    steps = train_steps(trainer)
    next(steps), next(steps)
    assert trainer.use.used() <= 4 / 24
    kept, moments = weight[:4].detach().clone(), trainer.adam.state[weight]
    moments["exp_avg"][4:] = 1e-9
    dead = trainer.use.dead()
    next(steps)  # the third batch without them
    dead &= trainer.use.dead()
    assert dead[4:].all()
    assert weight[dead].equal(trainer.ema.averages[place][dead])
    torch.testing.assert_close(weight[dead].norm(dim=1), torch.ones(int(dead.sum())))
    assert (moments["exp_avg"][dead] == 0).all()
    assert (moments["exp_avg_sq"][dead] == 0).all()
    assert (weight[:4] - kept)[~dead[:4]].abs().max() < 0.1  # the living stay
    next(steps)
    revived = trainer.use.counts[3 % 3] > 0
    assert revived[4:].sum() > 4
    never = Trainer(quick(steps=3, revive_after=0), blobs(8), np.arange(8), CPU)
    with torch.no_grad():
        never.codec.quantize.embedding.weight[4:] = never.codec.quantize.embedding.weight[0]
    for _ in train_steps(never):
        pass
    assert never.use.used() <= 4 / 24


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


def test_minutes_end_a_run(quick, tmp_path):
    summary = train_codec(tmp_path, quick(steps=10**6, minutes=0.01), Console(file=io.StringIO()))
    assert 1 <= summary.steps < 1_000
    assert read_codec(tmp_path).encode(to_images(blobs(1))).shape == (1, 4, 4)


def test_the_learning_rate_warms_up_and_falls_to_zero(quick):
    config = quick(warmup=4, steps=100)
    assert learning_rate(config, 1, 0.0) == config.learning_rate * 0.5
    assert learning_rate(config, 50, 0.5) == pytest.approx(config.learning_rate * 0.5)
    assert learning_rate(config, 99, 1.0) == pytest.approx(0, abs=1e-12)


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


def test_a_damaged_state_is_named(quick, straight, tmp_path):
    stop_after(tmp_path, quick(), 3)
    state = saved(tmp_path / "states")[-1]
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-00000003.pt does not fit this run or is damaged"):
        complete(tmp_path, quick())


# Images


def test_the_picture_shows_originals_and_reconstructions(straight):
    with Image.open(straight / "reconstructions.png") as shown:
        assert shown.width > 2 * 96  # both that are held out
        assert shown.height > 2 * 96


def test_images_are_read_as_the_data_readers_do(quick, tmp_path):
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    Image.new("RGB", (20, 10), (255, 0, 0)).save(folder / "deep" / "a.png")
    Image.new("L", (8, 8), 100).save(folder / "deep" / "b.bmp")
    (folder / "deep" / "broken.png").write_bytes((folder / "deep" / "a.png").read_bytes()[:40])
    told = io.StringIO()
    config = dataclasses.replace(quick(), images=(str(folder),), size=8)
    images, held_out = read_pictures(config, Console(file=told, width=1_000))
    assert images[:, 4, 4].tolist() == [[255, 0, 0], [100, 100, 100]]
    assert held_out.tolist() == [False, True]
    assert "1 image(s) skipped that cannot be read:" in told.getvalue()
    assert "broken.png" in told.getvalue()


@pytest.mark.parametrize(("side", "size"), [(9, 8), (12, 12), (200, 64)])
def test_the_size_is_that_of_the_first_image_unless_it_is_large(quick, tmp_path, side, size):
    np.save(tmp_path / "a.npy", blobs(2, side, side + 3))
    config = dataclasses.replace(quick(), images=(str(tmp_path / "a.npy"),))
    assert read_pictures(config, Console(quiet=True))[0].shape == (2, size, size, 3)


# Mistakes


def test_mistakes_leave_no_folder(quick, tmp_path):
    config = dataclasses.replace(quick(), images=(str(tmp_path / "absent"),))
    with pytest.raises(ValueError, match="absent: no such file or folder; expected a folder, an archive"):
        complete(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="images of 30 x 30 pixels: expected multiples of the codec's factor 4"):
        configure(tmp_path / "run", ["photos"], factor=4, size=30)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"factor": 3}, "factor 3 is out of range: expected one of 2, 4, 8"),
        ({"steps": 0}, "steps 0 is out of range: expected more than 0"),
        ({"adversarial": -1}, "adversarial -1 is out of range: expected 0 or more"),
        ({"adversarial_start": 2}, "adversarial_start 2 is out of range: expected 0 to 1"),
        ({"ema": 1.0}, "ema 1.0 is out of range"),
        ({"minutes": 0}, "minutes 0 is out of range"),
    ],
)
def test_settings_out_of_range(changed, line, tmp_path):
    with pytest.raises(ValueError, match=line):
        configure(tmp_path, ["photos"], **changed)
    with pytest.raises(ValueError, match="what to train on"):
        configure(tmp_path, [])


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
