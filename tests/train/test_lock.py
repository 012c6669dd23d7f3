"""A folder is for one run at a time: a second process is refused in one line and touches nothing of the first."""

import os
import signal
from pathlib import Path

import pytest
from run_folders import contents

from maskless.files import LOCK, locked
from maskless.train import state

SIZES = ("--width", 32, "--layers", 2, "--length", 16, "--vocab", 300, "--batch", 8, "--steps", 100_000)


def refused(process, folder: Path, owner: int) -> None:
    assert process.wait() == 2, process.stderr
    said = f"error: {folder} is in use by process {owner} on {os.uname().nodename}: wait for its end"
    assert process.stderr.startswith(said)
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc, to see that a process has stopped")
def test_a_second_process_changes_nothing_of_a_run_and_a_killed_one_is_no_obstacle(start, text, losses, tmp_path):
    out = tmp_path / "run"
    train = ("maskless", "train", "--text", text, *SIZES, "--save-every", 2, "--log-every", 1, "--out", out)
    first = start(*train)
    for given, moment in (
        ((), lambda: list(out.glob(".data.*"))),
        (("--resume",), lambda: state.saved(out / "states")),
    ):
        first.until(moment)
        first.stand()
        before = contents(out)
        refused(start(*train, *given), out, first.pid)
        assert contents(out) == before
        first.kill(signal.SIGCONT)
    first.kill(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    reached = int(state.saved(out / "states")[-1].stem.removeprefix("step-"))
    last = start("maskless", "train", "--out", out, "--resume", "--steps", reached + 1)
    assert last.wait() == 0, last.stderr
    assert list(losses(out)) == list(range(1, reached + 2))
    assert not (out / LOCK).exists()


def test_processes_that_train_together_have_one_lock_and_are_refused_together(start_two, configure, tmp_path):
    configure().write(tmp_path)
    before = contents(tmp_path)
    with locked(tmp_path):
        for process in start_two("maskless", "train", "--out", tmp_path, "--resume"):
            refused(process, tmp_path, os.getpid())
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", ["train-codec", "distill"])
def test_codecs_and_distillations_have_their_folder_alone_too(command, start, data, images, tmp_path):
    given = {"train-codec": ("--images", images), "distill": (tmp_path / "model", "--data", data.folder)}[command]
    with locked(tmp_path / "out"):
        before = contents(tmp_path)
        refused(start("maskless", command, *given, "--out", tmp_path / "out"), tmp_path / "out", os.getpid())
        assert contents(tmp_path) == before
