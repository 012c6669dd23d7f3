"""Two processes train as one: the same batches, the same losses, the same weights."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import together
from rich.console import Console

from maskless.checkpoint import Model
from maskless.train.report import read_metrics
from maskless.train.run import RunConfig, run

TOGETHER = Path(together.__file__)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_two(start, *arguments) -> list:
    """Two processes with what torchrun would tell them."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [start(*arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


def alone(folder: Path, config: RunConfig) -> Path:
    run(folder, config, Console(file=io.StringIO()))
    return folder


def in_full(folder: Path, config: RunConfig) -> Path:
    """The folder with the configuration, as a run that has not begun."""
    config.write(folder)
    return folder


def same_losses(one: dict[int, tuple], other: dict[int, tuple]) -> None:
    assert list(one) == list(other)
    for step, expected in other.items():
        assert one[step] == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize(("model", "accumulate"), [("pgm", 1), ("mdlm", 2)])
def test_two_processes_have_the_losses_of_one(model, accumulate, start, configure, losses, tmp_path):
    config = configure(model, accumulate=accumulate)
    single = alone(tmp_path / "single", dataclasses.replace(config, train=configure(model).train))
    double = in_full(tmp_path / "double", config)
    for process in start_two(start, "maskless", "train", "--out", double, "--resume"):
        assert process.wait() == 0, process.stderr
    same_losses(losses(double), losses(single))
    assert len(losses(single)) == 8
    ours, expected = (Model.from_pretrained(folder / "model").state_dict() for folder in (double, single))
    for name, value in expected.items():
        assert ours[name].numpy() == pytest.approx(value.numpy(), rel=1e-3, abs=1e-5), name


def test_the_first_process_alone_writes_and_reports(start, configure, tmp_path):
    first, second = start_two(start, "maskless", "train", "--out", in_full(tmp_path, configure(steps=2)), "--resume")
    assert (first.wait(), second.wait()) == (0, 0)
    assert "2 process(es)" in first.stderr
    assert "validation perplexity" in first.stdout
    assert second.stdout == ""
    assert "process(es)" not in second.stderr
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_a_killed_pair_of_processes_resumes_with_the_same_losses(start, configure, losses, tmp_path):
    config = configure(dropout=0.1)
    for process in start_two(start, "maskless", "train", "--out", in_full(tmp_path / "a", config), "--resume"):
        assert process.wait() == 0, process.stderr
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=3))
    for process in start_two(start, "maskless", "train", "--out", in_full(tmp_path / "b", half), "--resume"):
        assert process.wait() == 0, process.stderr
    for process in start_two(start, "maskless", "train", "--out", in_full(tmp_path / "b", config), "--resume"):
        assert process.wait() == 0, process.stderr
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_torchrun_prepares_a_text_once_and_trains_on_it(text, losses, tmp_path):
    options = ["--text", str(text), "--vocab", "300", "--length", "16", "--width", "32", "--layers", "2"]
    options += ["--steps", "4", "--batch", "8", "--accumulate", "2", "--dropout", "0", "--log-every", "1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    double = subprocess.run(
        [*torchrun, "-m", "maskless", "train", *options, "--out", str(tmp_path / "double")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert double.returncode == 0, double.stderr
    assert "2 process(es)" in double.stderr
    config = RunConfig.read(tmp_path / "double")
    assert config.data == str(tmp_path / "double" / "data")
    single = alone(tmp_path / "single", config)
    same_losses(losses(tmp_path / "double"), losses(single))
    assert len(losses(single)) == 4


def test_a_batch_that_does_not_split_is_refused_by_every_process_before_the_work(start, text, tmp_path):
    command = ("maskless", "train", "--text", text, "--out", tmp_path / "run", "--batch", 6, "--accumulate", 2)
    for process in start_two(start, *command):
        assert process.wait() == 2
        assert process.stderr == "error: batch 6 does not split over 2 process(es) x 2 piece(s)\n"
    assert not (tmp_path / "run").exists()


def test_processes_agree_on_the_rate_the_end_and_the_evaluation(start, configure, tmp_path):
    for process in start_two(
        start, TOGETHER, "agree", tmp_path / "found.json", in_full(tmp_path / "pgm", configure(warmup=0))
    ):
        assert process.wait() == 0, process.stderr
    found = json.loads((tmp_path / "found.json").read_text())["pgm"]
    assert found["processes"] == 2
    assert found["agreed"], "weights, rates or shares differ"
    shares = [share for _, _, share in found["steps"]]
    assert 0.5 <= shares[0] < 0.7  # 0.4 of the minutes are over on average, and a tenth with every step
    assert [share >= 1 for share in shares] == [False] * (len(shares) - 1) + [True]
    for n, expected in together.bounds(configure()).items():
        assert found["bounds"][n] == pytest.approx(expected), n
        assert expected["sequences"] == int(n)


@pytest.mark.parametrize("model", ["pgm", "mdlm"])
def test_sharded_weights_train_as_whole_ones(model, start, configure, losses, tmp_path):
    config = configure(model, accumulate=2, evaluate_every=1)
    single = alone(tmp_path / "single", config)
    run = in_full(tmp_path / model, config)
    for process in start_two(start, TOGETHER, "shard", tmp_path / "found.json", run):
        assert process.wait() == 0, process.stderr
    assert json.loads((tmp_path / "found.json").read_text())[model]["sharded"]
    same_losses(losses(run / "shard"), losses(single))
    assert len(losses(single)) == 8
    last = [line for line in read_metrics(run / "shard" / "metrics.jsonl") if "validation" in line][-1]
    expected = [line for line in read_metrics(single / "metrics.jsonl") if "validation" in line][-1]
    assert last["validation"] == pytest.approx(expected["validation"], abs=5 * (last["error"] + expected["error"]))
