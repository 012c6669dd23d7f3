"""A run is a folder: stopped, killed or out of disk, it goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console

import maskless
from maskless.checkpoint import Model
from maskless.evaluate.likelihood import Likelihood
from maskless.train import state
from maskless.train.loop import TEXT_MODELS
from maskless.train.report import read_metrics
from maskless.train.run import Run, RunConfig, run

SLOW = pytest.mark.skipif("MASKLESS_SLOW" not in os.environ, reason="takes minutes: set MASKLESS_SLOW to run it")
KINDS = [{"model": model} for model in TEXT_MODELS] + [{"model": "pgm", "context": "ordered"}]
SIZES = ("--width", 32, "--layers", 2, "--length", 16, "--vocab", 300, "--batch", 8, "--lr", 1e-3)


def complete(folder: Path, config: RunConfig) -> Path:
    run(folder, config, Console(file=io.StringIO()))
    return folder


def stop_after(folder: Path, config: RunConfig, last: int) -> None:
    """Take steps up to `last`, saving as a run does, and drop everything that is only in memory."""
    this = Run(folder, config)
    for step in this:
        this.log(step)
        if step.step % config.train.save_every == 0:
            this.save(step.step)
        if step.step == last:
            break


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def newest(folder: Path) -> dict:
    return torch.load(state.saved(folder / "states")[-1], weights_only=True)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".")]


# Stopping and going on


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_a_stopped_and_resumed_run_is_bit_equal_to_one_never_stopped(kind, configure, losses, tmp_path):
    config = configure(**kind, dropout=0.2)
    straight = complete(tmp_path / "straight", config)
    stop_after(tmp_path / "stopped", config, 2)  # before the first state
    stop_after(tmp_path / "stopped", config, 5)  # after the state of step 3
    stopped = complete(tmp_path / "stopped", config)
    assert losses(stopped) == losses(straight)
    assert list(losses(straight)) == list(range(1, 9))
    assert weights(stopped) == weights(straight)
    one, other = newest(stopped), newest(straight)
    assert one["step"] == other["step"] == 8
    assert one["updates"] == other["updates"] == 8
    assert all(map(torch.equal, one["averages"], other["averages"]))
    assert all(one["weights"][name].equal(value) for name, value in other["weights"].items())


def test_dropout_is_on_while_training(configure, losses, tmp_path):
    dropped = complete(tmp_path / "dropped", configure(dropout=0.5, steps=1))
    plain = complete(tmp_path / "plain", configure(dropout=0.0, steps=1))
    assert losses(dropped)[1] != losses(plain)[1]


def test_a_run_resumed_between_two_logs_has_no_gap(configure, losses, tmp_path):
    config = configure(log_every=4, save_every=3)
    straight = complete(tmp_path / "straight", config)
    stop_after(tmp_path / "stopped", config, 7)
    stopped = complete(tmp_path / "stopped", config)
    assert losses(stopped) == losses(straight)
    assert list(losses(stopped)) == list(range(1, 9))


def test_the_model_of_a_run_is_the_average_of_its_weights(configure, tmp_path):
    folder = complete(tmp_path / "run", configure(ema=0.5))
    last = newest(folder)
    model = maskless.load(folder)
    for average, parameter in zip(last["averages"], model.parameters(), strict=True):
        assert average.equal(parameter.data)
    trained = dict(last["weights"])
    assert not all(trained[name].equal(value) for name, value in model.network.state_dict().items())


def test_training_goes_on_from_the_trained_weights_after_a_look_at_the_average(configure, losses, tmp_path):
    config = configure(ema=0.5)
    undisturbed = complete(tmp_path / "undisturbed", config)
    looked = complete(
        tmp_path / "looked",
        dataclasses.replace(config, train=dataclasses.replace(config.train, evaluate_every=2, sample_every=3)),
    )
    assert losses(looked) == losses(undisturbed)
    assert weights(looked) == weights(undisturbed)
    tested = [line["step"] for line in read_metrics(looked / "metrics.jsonl") if "validation" in line]
    assert tested == [2, 4, 6, 8]


def test_a_finished_run_resumed_stays_as_it_is(configure, losses, tmp_path):
    folder = complete(tmp_path / "run", configure())
    before = losses(folder), weights(folder)
    complete(folder, RunConfig.read(folder))
    assert (losses(folder), weights(folder)) == before


def test_a_run_whose_minutes_are_spent_stays_as_it_is_when_resumed(configure, losses, tmp_path):
    folder = complete(tmp_path / "run", configure(steps=10_000, minutes=0.005))
    before = losses(folder), weights(folder)
    assert 0 < len(before[0]) < 10_000
    complete(folder, RunConfig.read(folder))
    assert (losses(folder), weights(folder)) == before


def test_the_last_states_are_kept(configure, tmp_path):
    folder = complete(tmp_path / "run", configure(steps=9, save_every=2, keep=3))
    assert [path.name for path in state.saved(folder / "states")] == [f"step-{n:08d}.pt" for n in (6, 8, 9)]


def test_open_first_weights_differ_from_released_ones(configure, losses, tmp_path):
    first = [losses(complete(tmp_path / name, configure(initial=name, steps=2))) for name in ("open", "released")]
    assert first[0][2] != first[1][2]


def test_what_a_killed_process_left_is_swept_away(configure, tmp_path):
    config = configure(steps=1)
    for name in ("states/.step-00000003.pt.77.part", "model/.model.safetensors.77.part", ".run.json.77.part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    complete(tmp_path, config)
    assert leftovers(tmp_path) == []


# What cannot go on


def test_a_damaged_state_is_named(configure, tmp_path):
    folder = complete(tmp_path / "run", configure())
    newest = state.saved(folder / "states")[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{newest.name} does not fit this run or is damaged"):
        Run(folder, configure())


def test_a_state_of_another_network_is_named(configure, tmp_path):
    folder = complete(tmp_path / "run", configure())
    with pytest.raises(ValueError, match=r"step-00000008.pt does not fit this run or is damaged"):
        Run(folder, configure("mdlm"))


def test_a_configuration_survives_its_file(configure, tmp_path):
    config = configure("mdlm", minutes=3.5, seed=9)
    config.write(tmp_path)
    assert RunConfig.read(tmp_path) == config


@pytest.mark.parametrize("content", ["{", "{}", '{"data": "", "network": {}, "train": {"colour": 1}}'])
def test_a_configuration_that_is_none_is_named(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json is not a run's configuration"):
        RunConfig.read(tmp_path)


def test_data_of_other_sizes_are_refused(configure, tmp_path):
    config = configure()
    for wrong in ({"length": 32}, {"vocab": 200}):
        with pytest.raises(ValueError, match="has 300 ids and length 16, the network"):
            Run(tmp_path, dataclasses.replace(config, network=config.network | wrong))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"accumulate": 3}, r"batch 8 does not split over 1 process\(es\) x 3 piece\(s\)"),
        ({"fsdp": True}, "fsdp shards over GPUs"),
    ],
)
def test_work_that_cannot_be_shared_out_is_refused(wrong, says, configure, tmp_path):
    with pytest.raises(ValueError, match=says):
        Run(tmp_path, configure(**wrong))
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_ends_the_run(configure, tmp_path):
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step \d+: try a lower learning rate"):
        complete(tmp_path, configure(learning_rate=1e30, steps=20))


# Killed


def killed_and_resumed(start, command: tuple, out: Path, rng: random.Random, kills: int) -> list[int]:
    """Kill a command at random moments and start it again, then let it end. Returns how the killed ones ended."""
    before = time.monotonic()
    whole = start(*command, "--out", out / "straight")
    whole.until((out / "straight" / "metrics.jsonl").exists)
    starting = time.monotonic() - before
    assert whole.wait() == 0, whole.stderr
    training = time.monotonic() - before - starting
    ends = []
    for life in range(kills):
        process = start(*command, "--out", out / "killed", "--resume")
        if life == 0:  # the first kill falls into the preparation of the text
            process.until(lambda: list(out.glob("killed/.data.*")))
        else:  # the others fall anywhere: the starts are long, and in all there is time to train once
            time.sleep(rng.uniform(0, starting + 2 * training / kills))
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
    ends = killed_and_resumed(start, command, out, random.Random(seed), kills)
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
    assert process.stderr.splitlines()[-1] == "interrupted; a training run goes on with --resume"
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


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A folder on a disk of 6 MB: room for one or two states of a tiny run."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount a small disk: {error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(path: Path, leave: int) -> None:
    """Write a file that leaves only so many bytes on its disk, at no time fewer: a run is writing there too."""
    with suppress(OSError):  # full already: the run was quicker
        path.write_bytes(bytes(max(0, shutil.disk_usage(path.parent).free - leave)))


def refused(process) -> str:
    """The one line that a process ended with."""
    assert process.wait() == 2, process.stderr
    assert "Traceback" not in process.stderr
    errors = [line for line in process.stderr.splitlines() if "rror" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert "No space left on device" in errors[0]
    assert errors[0].endswith("what was saved before is still there")
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
    fill(disk / "filler", room)
    refused(process)
    assert leftovers(disk) == []
    assert (len(state.saved(out / "states")), (out / "model" / "config.json").exists()) == ((what == "model"), False)
    (disk / "filler").unlink()
    again = start("maskless", "train", "--out", out, "--resume")
    again.until((out / "model" / "config.json").exists)
    again.end()
    Model.from_pretrained(out / "model")


def test_a_resumed_run_has_the_stations_of_one_never_stopped(configure, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    config = configure(steps=20, evaluate_every=None, save_every=0)
    run(whole, config, Console(quiet=True))
    run(halves, dataclasses.replace(config, train=dataclasses.replace(config.train, steps=8)), Console(quiet=True))
    run(halves, config, Console(quiet=True))
    stations = {
        folder: [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "validation" in line]
        for folder in (whole, halves)
    }
    assert stations[whole] == list(range(2, 21, 2))
    assert [step for step in stations[halves] if step > 8] == [10, 12, 14, 16, 18, 20]
