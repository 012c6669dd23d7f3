"""Two processes train as one: the same batches, the same losses, the same weights."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import together
import torch
from codec_runs import blobs
from run_folders import complete

from command_inputs import INPUTS
from in_process import exit_code_of
from maskless.checkpoint import Model
from maskless.train import state
from maskless.train.report import read_metrics
from maskless.train.run import RunConfig

TOGETHER = Path(together.__file__)


def end_well(processes: list) -> None:
    ends = [process.wait() for process in processes]
    assert {*ends} == {0}, "\n".join(process.stderr for process in processes)


def in_full(folder: Path, config: RunConfig) -> Path:
    """The folder with the configuration, as a run that has not begun."""
    config.write(folder)
    return folder


def same_losses(one: dict[int, tuple], other: dict[int, tuple]) -> None:
    assert list(one) == list(other)
    for step, expected in other.items():
        assert one[step] == pytest.approx(expected, rel=1e-5), step


CHAIN = {"model": "pgm", "objective": "chain", "orders": "random=1,strands=2,gaps=1", "context": "ordered"}


@pytest.mark.parametrize(
    ("kind", "accumulate", "stop"), [(CHAIN, 1, 3), ({"model": "pgm"}, 1, None), ({"model": "mdlm"}, 2, None)]
)
def test_two_processes_have_the_losses_of_one(kind, accumulate, stop, start_two, configure, losses, tmp_path):
    """Also where they stop and go on."""
    single, double = complete(tmp_path / "single", configure(**kind)), tmp_path / "double"
    for steps in (stop, 8):
        if steps is not None:
            in_full(double, configure(**kind, accumulate=accumulate, steps=steps))
            end_well(start_two("maskless", "train", "--out", double, "--resume"))
    same_losses(losses(double), losses(single))
    assert len(losses(single)) == 8
    ours, expected = (Model.from_pretrained(folder / "model").state_dict() for folder in (double, single))
    for name, value in expected.items():
        assert ours[name].numpy() == pytest.approx(value.numpy(), rel=1e-3, abs=1e-4), name


def test_the_first_process_alone_writes_and_reports(start_two, configure, tmp_path):
    first, second = start_two("maskless", "train", "--out", in_full(tmp_path, configure("ar", steps=2)), "--resume")
    end_well([first, second])
    assert "2 processes" in first.stderr
    assert "validation perplexity" in first.stdout
    assert second.stdout == ""
    assert "processes" not in second.stderr
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_two_machines_prepare_a_text_once_and_train_as_one(on_two_machines, text, losses, tmp_path):
    options = ["--text", text, "--vocab", "300", "--length", "16", "--width", "32", "--layers", "2"]
    options += ["--steps", "4", "--batch", "8", "--accumulate", "2", "--dropout", "0", "--log-every", "1"]
    said = on_two_machines("train", *options, "--out", tmp_path / "double")
    assert sum("2 processes" in err for _, err in said) == 1
    config = RunConfig.read(tmp_path / "double")
    assert config.data == str(tmp_path / "double" / "data")
    single = complete(tmp_path / "single", config)
    same_losses(losses(tmp_path / "double"), losses(single))
    assert len(losses(single)) == 4


def test_a_batch_that_does_not_split_is_refused_by_every_process_before_the_work(start_two, text, tmp_path):
    command = ("maskless", "train", "--text", text, "--out", tmp_path / "run", "--batch", 6, "--accumulate", 2)
    for process in start_two(*command):
        assert process.wait() == 2
        assert process.stderr == "error: batch 6 does not split over 2 process(es) x 2 piece(s)\n"
    assert not (tmp_path / "run").exists()


def test_an_interruption_of_one_process_saves_a_step_and_ends_all(start_two, configure, losses, tmp_path):
    config = configure(steps=100_000, save_every=0, log_every=2)
    first, second = start_two("maskless", "train", "--out", in_full(tmp_path, config), "--resume")
    first.until(lambda: losses(tmp_path))
    second.kill(signal.SIGINT)
    assert [first.wait(), second.wait()] == [130, 130], first.stderr + second.stderr
    (saved,) = state.saved(tmp_path / "states")
    assert torch.load(saved, weights_only=True)["step"] == max(losses(tmp_path))


def test_processes_agree_on_the_rate_the_end_and_the_evaluation(start_two, configure, tmp_path):
    folder = in_full(tmp_path / "pgm", configure(warmup=0))
    end_well(start_two(TOGETHER, "agree", tmp_path / "found.json", folder))
    found = json.loads((tmp_path / "found.json").read_text())["pgm"]
    assert found["processes"] == 2
    assert found["agreed"], "weights, rates or shares differ"
    shares = [share for _, _, share in found["steps"]]
    assert 0.4 <= shares[0] < 0.5  # of the minutes, 0.2 and 0.6 were over before; each step adds a tenth
    assert [share >= 1 for share in shares] == [False] * (len(shares) - 1) + [True]
    for n, expected in together.bounds(configure()).items():
        assert found["bounds"][n] == pytest.approx(expected, rel=1e-5, nan_ok=True), n  # one sequence has no error
        assert expected["sequences"] == int(n)


def test_sharded_weights_train_as_whole_ones(start_two, configure, losses, tmp_path):
    """Also where they stop and go on, with a look at the averages after every step."""
    configs = {"pgm": configure("pgm", accumulate=2), "mdlm": configure("mdlm", accumulate=2, skip_spikes=10.0)}
    runs = [in_full(tmp_path / model, config) for model, config in configs.items()]
    end_well(start_two(TOGETHER, "shard", tmp_path / "found.json", *runs))
    found = json.loads((tmp_path / "found.json").read_text())
    for model, config in configs.items():
        assert found[model]["sharded"]
        assert found[model]["gathered"] == "torch.float32"
        single, double = complete(tmp_path / f"single-{model}", config), tmp_path / model / "shard"
        same_losses(losses(double), losses(single))
        assert len(losses(single)) == 8
        ours, expected = (validations(folder)[-1] for folder in (double, single))
        assert ours["validation"] == pytest.approx(expected["validation"], abs=5 * (ours["error"] + expected["error"]))


def test_weights_gathered_in_half_precision_train_as_whole_ones_to_that_precision(
    start_several, configure, losses, tmp_path
):
    """By two groups of two processes, each group with all weights (HSDP)."""
    config = configure(**CHAIN, activation_checkpointing=True)
    run = in_full(tmp_path / "chain", config)
    end_well(start_several(4, TOGETHER, "half", tmp_path / "found.json", run))
    found = json.loads((tmp_path / "found.json").read_text())["chain"]
    assert found["sharded"]
    assert found["mesh"] == [2, 2]
    assert found["gathered"] == "torch.bfloat16"
    ours, expected = losses(run / "half"), losses(complete(tmp_path / "single", configure(**CHAIN)))
    apart = [abs(ours[step][0] / line[0] - 1) for step, line in expected.items()]
    assert 1e-6 < max(apart) < 2e-3


def validations(folder: Path) -> list[dict]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if "validation" in line]


@pytest.mark.parametrize("stuck", [0, 2])
def test_a_process_that_hangs_is_named(stuck, start_several, configure, tmp_path):
    config = configure(steps=100, batch=12, save_every=2, log_every=1)
    three = start_several(3, TOGETHER, "hang", in_full(tmp_path, config), stuck)
    first, second = (process for rank, process in enumerate(three) if rank != stuck)
    assert [first.wait(), second.wait()] == [2, 2], first.stderr + second.stderr
    named = rf"error: process {stuck} did not come to step 3 in \d+ seconds: it hangs or has ended; continue with"
    assert re.match(named, first.stderr.splitlines()[-1])
    other = named if stuck == 0 else "error: a process did not come to step 3: process 0 says which; continue with"
    assert re.match(other, second.stderr.splitlines()[-1])
    assert [path.name for path in state.saved(tmp_path / "states")] == ["step-00000002.pt"]


# Other long commands


def by_two(start_two, *command: object) -> str:
    """What the first of two processes prints; the other prints nothing."""
    first, second = start_two("maskless", *command)
    end_well([first, second])
    assert second.stdout == ""
    return first.stdout


def test_two_processes_evaluate_as_one(start_two, configure, data, tmp_path, capsys):
    """What is drawn at random differs as with another seed: its draws are those of a batch."""
    folder = complete(tmp_path, configure(**CHAIN))
    command = ["evaluate", folder, "--data", data.folder, "--sequences", 7, "--samples", 2, "--json"]
    assert exit_code_of(*command) == 0
    expected = json.loads(capsys.readouterr().out)
    found = json.loads(by_two(start_two, *command))
    assert found.keys() == expected.keys()
    assert found["left to right"] == pytest.approx(expected["left to right"], rel=1e-4)
    for name in ("any order", "gaps, given the rest"):
        spread = found[name]["error"] + expected[name]["error"]
        assert found[name]["sequences"] == 7
        assert found[name]["nats"] == pytest.approx(expected[name]["nats"], abs=5 * spread)


def test_two_processes_compare_pictures_as_one(start_two, images, tmp_path, capsys):
    np.save(made := tmp_path / "made.npy", 255 - blobs(33))  # an odd number
    INPUTS["inception.pt"](network := tmp_path / "means.pt")
    command = ["fid", images, made, "--features", network, "--feature-input", "pixels", "--json"]
    assert exit_code_of(*command) == 0
    expected = json.loads(capsys.readouterr().out)
    found = json.loads(by_two(start_two, *command))
    assert expected["fid"] > 0.01
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6)), name
