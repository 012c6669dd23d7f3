"""A run that is killed, interrupted or out of disk keeps what was saved and goes on as if nothing had been."""

import io
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from run_folders import complete, leftovers, newest, weights

import maskless
from maskless.checkpoint import Model
from maskless.evaluate.likelihood import Likelihood
from maskless.train import state
from maskless.train.report import read_metrics
from maskless.train.run import Run

SLOW = pytest.mark.skipif("MASKLESS_SLOW" not in os.environ, reason="takes minutes: set MASKLESS_SLOW to run it")
SIZES = ("--width", 32, "--layers", 2, "--length", 16, "--vocab", 300, "--batch", 8, "--lr", 1e-3)


# Killed


def killed_and_resumed(start, command: tuple, out: Path, rng: random.Random, kills: int, steps: int) -> list[int]:
    """Kill a command at random moments and start it again, then let it end. Returns how the killed ones ended."""
    before = time.monotonic()
    whole = start(*command, "--out", out / "straight")
    whole.until((out / "straight" / "metrics.jsonl").exists)
    starting = time.monotonic() - before
    assert whole.wait() == 0, whole.stderr
    step = (time.monotonic() - before - starting) / steps
    metrics, ends = out / "killed" / "metrics.jsonl", []
    for life in range(kills):
        process = start(*command, "--out", out / "killed", "--resume")
        if life == 0:  # the first kill falls into the preparation of the text
            process.until(lambda: list(out.glob("killed/.data.*")))
        elif life % 3 == 2:  # some into a start, or soon after it
            time.sleep(rng.uniform(0, starting))
        else:  # the others somewhere into a step, however fast they are, at about their share of the run
            reached = steps * life // kills - rng.randrange(4)
            process.until(lambda reached=reached: metrics.exists() and f'"step": {reached},' in metrics.read_text())
            time.sleep(rng.uniform(0, step))
        process.kill(signal.SIGKILL)
        ends.append(process.wait())
        assert ends[-1] in (-signal.SIGKILL, 0), process.stderr
    last = start(*command, "--out", out / "killed", "--resume")
    assert last.wait() == 0, last.stderr
    return ends


def survives(start, text: Path, losses, out: Path, seed: int, kills: int) -> None:
    steps = 12 * kills
    command = ("maskless", "train", "--text", text, *SIZES, "--steps", steps, "--seed", seed)
    command += ("--save-every", 3, "--log-every", 1, "--evaluate-every", 7)
    ends = killed_and_resumed(start, command, out, random.Random(seed), kills, steps)
    straight, killed = out / "straight", out / "killed"
    assert ends.count(-signal.SIGKILL) > kills / 2
    assert losses(killed) == losses(straight)
    assert list(losses(killed)) == list(range(1, steps + 1))
    assert weights(killed) == weights(straight)
    bounds = [
        {line["step"]: line["validation"] for line in read_metrics(folder / "metrics.jsonl") if "validation" in line}
        for folder in (straight, killed)
    ]
    assert bounds[0] == bounds[1]
    assert list(bounds[0]) == [*range(7, steps, 7), steps]
    assert leftovers(killed) == []


def test_a_run_survives_kills(start, text, losses, tmp_path):
    survives(start, text, losses, tmp_path, seed=0, kills=3)


@SLOW
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_run_survives_ten_kills(start, text, losses, tmp_path, seed):
    survives(start, text, losses, tmp_path, seed=seed, kills=10)


def test_an_interrupted_run_saves_the_step_says_so_and_goes_on(start, text, losses, tmp_path):
    """Also long before a state is due."""
    command = ("maskless", "train", "--text", text, *SIZES, "--out", tmp_path / "run", "--save-every", 0)
    process = start(*command, "--steps", 100_000, "--log-every", 1)
    process.until(lambda: losses(tmp_path / "run"))
    process.kill(signal.SIGINT)
    assert process.wait() == 130
    assert process.stdout == ""
    said = f"interrupted; continue with: maskless train --out {tmp_path / 'run'} --resume"
    assert process.stderr.splitlines()[-1] == said
    assert "Traceback" not in process.stderr
    reached = max(losses(tmp_path / "run"))
    assert newest(tmp_path / "run")["step"] == reached
    assert maskless.generate(maskless.load(tmp_path / "run"), 1)
    process = start(*command, "--resume", "--steps", reached + 2)
    assert process.wait() == 0, process.stderr
    assert f"resumed at step {reached:,}" in process.stderr
    assert list(losses(tmp_path / "run")) == list(range(1, reached + 3))


def test_an_interruption_waits_for_no_more_than_is_to_be_saved(configure, ctrl_c, losses, monkeypatch, tmp_path):
    """Between two steps for the state, after the last one for nothing: all is saved."""
    config, evaluate, looked = configure(steps=4, evaluate_every=2, save_every=0), Run.evaluate, []

    def interrupted(this: Run, step: int, sequences: int) -> Likelihood:
        ctrl_c()
        looked.append(step)
        return evaluate(this, step, sequences)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", interrupted)
        for reached in (2, 4):
            with pytest.raises(KeyboardInterrupt):
                complete(tmp_path / "run", config)
            assert newest(tmp_path / "run")["step"] == reached
    assert looked == [2]
    assert list(losses(complete(tmp_path / "run", config))) == [1, 2, 3, 4]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_state_that_cannot_be_finished_says_why(stop, monkeypatch, tmp_path):
    """Not that an archive has no end."""

    class Stopped(io.BytesIO):
        def write(self, part: bytes) -> int:
            if self.tell():
                raise stop
            return super().write(part)

    monkeypatch.setattr(Path, "open", lambda *_: Stopped())
    with pytest.raises(stop):
        state.dump({"weights": torch.zeros(100_000)}, tmp_path / "state.pt")


# A full disk


def fill(path: Path, leave: int) -> None:
    """Write a file that leaves only so many bytes on its disk."""
    path.write_bytes(bytes(max(0, shutil.disk_usage(path.parent).free - leave)))


def refused(process) -> str:
    """The one line that a process ended with."""
    assert process.wait() == 2, process.stderr
    assert "Traceback" not in process.stderr
    errors = [line for line in process.stderr.splitlines() if "rror" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert "No space left on device" in errors[0]
    assert "what was saved before is still there" in errors[0]
    return errors[0]


def test_a_full_disk_costs_nothing_that_was_saved(start, text, losses, disk, tmp_path):
    command = ("maskless", "train", "--text", text, *SIZES, "--steps", 30, "--save-every", 5, "--log-every", 1)
    refused(start(*command, "--out", disk / "run"))
    states = state.saved(disk / "run" / "states")
    assert len(states) in (1, 2)
    assert leftovers(disk) == []
    for path in states:
        assert torch.load(path, weights_only=True)["step"] == int(path.stem.split("-")[1])
    assert maskless.generate(maskless.load(disk / "run"), 1)
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    assert start(*command, "--out", disk / "run", "--resume").wait() == 0
    assert start(*command, "--out", tmp_path / "straight").wait() == 0
    assert losses(disk / "run") == losses(tmp_path / "straight")
    assert weights(disk / "run") == weights(tmp_path / "straight")


@pytest.mark.parametrize(("room", "what"), [(0, "metrics"), (1_000_000, "state"), (2_800_000, "model")])
def test_a_disk_may_fill_up_at_any_file(room, what, start, text, disk):
    out = disk / "run"
    process = start("maskless", "train", "--text", text, *SIZES, "--out", out, "--steps", 9_000, "--save-every", 40)
    process.until((out / "metrics.jsonl").exists)
    process.stand()  # before the first state
    fill(disk / "filler", room)
    process.kill(signal.SIGCONT)
    refused(process)
    assert leftovers(disk) == []
    assert (len(state.saved(out / "states")), (out / "model" / "config.json").exists()) == ((what == "model"), False)
    (disk / "filler").unlink()
    again = start("maskless", "train", "--out", out, "--resume")
    again.until((out / "model" / "config.json").exists)
    again.end()
    Model.from_pretrained(out / "model")
