"""Mistakes around a run that goes on, or cannot: one line, exit code 2, and nothing on disk that changes."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from run_folders import contents
from test_data import SHORT, refused

from in_process import exit_code_of
from maskless.data.prepare import prepare
from toy_text import write


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> Path:
    """A folder with prepared data, data, and a run of two steps on them, run."""
    folder = tmp_path_factory.mktemp("apart")
    prepare([write(folder / "toy.txt", 800, seed=0)], folder / "data", vocab=300, length=16)
    given = ("--data", folder / "data", "--steps", 2, "--save-every", 1, *SHORT)
    assert exit_code_of("train", *given, "--out", folder / "run") == 0
    return folder


@pytest.fixture
def moved(apart, tmp_path) -> Path:
    """A copy whose data lies in other, not where the run knows it."""
    folder = shutil.copytree(apart, tmp_path / "moved", copy_function=shutil.copyfile)
    run = json.loads((folder / "run" / "run.json").read_text())
    (folder / "run" / "run.json").write_text(json.dumps(run | {"data": str(folder / "data")}))
    (folder / "data").rename(folder / "other")
    return folder


def test_data_that_moved_are_asked_for_and_known_again(moved, command):
    run = moved / "run"
    says = f"the data of {run} is no longer in {moved / 'data'}: name its folder with --data"
    refused(command, run, says, "train", "--steps", 3)
    prepare([write(moved / "second.txt", 800, seed=1)], moved / "second", vocab=300, length=16)
    says = f"data is {moved / 'data'} in {run}, not {moved / 'second'}: a run goes on as it began"
    refused(command, run, says, "train", "--steps", 3, "--data", moved / "second")
    assert exit_code_of("train", "--data", moved / "other", "--steps", 3, "--out", run, "--resume") == 0
    assert json.loads((run / "run.json").read_text())["data"] == str(moved / "other")
    assert exit_code_of("train", "--steps", 4, "--out", run, "--resume") == 0


def test_an_end_that_is_past_is_refused(apart, command):
    refused(command, apart / "run", f"{apart / 'run'} is at step 2 already", "train", "--steps", 1)


def test_a_damaged_state_is_named_with_the_one_before_it(moved, command):
    run = moved / "run"
    older, newest = sorted((run / "states").iterdir())
    newest.write_bytes(b"garbage\n")
    says = f"damaged: torch cannot read it; without it the run goes on from {older.name}"
    refused(command, run, says, "train", "--steps", 3, "--data", moved / "other")
    newest.unlink()
    assert exit_code_of("train", "--steps", 3, "--data", moved / "other", "--out", run, "--resume") == 0


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_an_error(apart, tmp_path, command):
    before = contents(tmp_path)
    given = ("--data", apart / "data", "--steps", 2, *SHORT, "--tracker", "wandb")
    ended = command("train", *given, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "tracker wandb is not installed: pip install wandb" in ended.err
    assert contents(tmp_path) == before
