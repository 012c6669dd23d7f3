"""A run is a folder: stopped, it goes on as if nothing had been, and what cannot go on is named."""

import dataclasses
import io
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from run_folders import complete, newest
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

import maskless
from maskless.bench.case import TrainCase
from maskless.budget import AVERAGE, MOMENTS, WEIGHT, PlannedRun, work_of
from maskless.evaluate.likelihood import Likelihood
from maskless.objective import mixed_seed
from maskless.train import folder as folder_module
from maskless.train import loop, state
from maskless.train.folder import TAIL
from maskless.train.loop import Progress
from maskless.train.report import Throughput, read_metrics
from maskless.train.run import Run, RunConfig, run

# Stopping and going on


@pytest.mark.parametrize(("setting", "one", "other"), [("dropout", 0.5, 0.0), ("initial", "open", "released")])
def test_dropout_is_on_while_training_and_first_weights_are_those_asked_for(
    setting, one, other, configure, losses, tmp_path
):
    found = [losses(complete(tmp_path / str(value), configure(steps=2, **{setting: value}))) for value in (one, other)]
    assert found[0][2] != found[1][2]


def test_what_a_run_gives_back_is_what_it_measured_and_saved(configure, tmp_path):
    model = run(tmp_path, configure(ema=0.5, dropout=0.2), Console(quiet=True)).model
    saved = maskless.load(tmp_path).state_dict()
    assert all(value.equal(saved[name]) for name, value in model.state_dict().items())
    assert not model.network.training


def test_dropout_has_random_numbers_of_its_own(configure, tmp_path, monkeypatch):
    """With the seed of the groups it would drop the same features of the same tokens."""
    seeds: dict[str, list[int]] = {"maskless.objective": [], "maskless.train.loop": []}

    def noting(to: list[int]) -> Callable[..., int]:
        return lambda *numbers: to.append(mixed_seed(*numbers)) or to[-1]

    for module, found in seeds.items():
        monkeypatch.setattr(f"{module}.mixed_seed", noting(found))
    complete(tmp_path, configure(steps=3))
    assert all(len(found) >= 3 for found in seeds.values())
    assert not set.intersection(*map(set, seeds.values()))


def test_a_run_moves_with_its_data(data, configure, tmp_path):
    inside = dataclasses.replace(configure(), data=str(tmp_path / "run" / "data"))
    shutil.copytree(data.folder, inside.data)
    inside.write(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert RunConfig.read(tmp_path / "moved").data == str(tmp_path / "moved" / "data")


# Minutes


@pytest.fixture
def slow(monkeypatch) -> list[float]:
    """The time, which goes on by what is done: steps, saving, and above all evaluating and sampling take long."""
    now, steps, save = [0.0], Run.steps, state.save

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    def slowly(self: Run) -> Iterator[Progress]:
        for step in steps(self):
            pass_by(1.0)
            yield step

    def measured(network, rows, *, sequences: int, **_) -> Likelihood:
        pass_by(0.3 * sequences)
        return Likelihood(1.0, 0.1, sequences, sequences)

    for module in (loop, folder_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Run, "steps", slowly)
    monkeypatch.setattr("maskless.train.run.likelihood", measured)
    monkeypatch.setattr("maskless.train.run.generate", lambda *_, **__: pass_by(3.0) or [])
    monkeypatch.setattr(state, "save", lambda *given: pass_by(1.0) or save(*given))
    return now


def test_minutes_are_wall_time_from_the_start_of_the_command_to_its_end(slow, configure, tmp_path):
    """A full evaluation between steps would take longer than the run."""
    defaults = {"steps": 10_000, "warmup": None, "evaluate_every": None, "save_every": None, "sample_every": None}
    for minutes in (1, 2):
        slow[0] = 9.0  # a set-up, since 0
        folder = tmp_path / str(minutes)
        summary = run(folder, configure(minutes=minutes, **defaults), Console(quiet=True), begun=0.0)
        assert 0.9 <= (slow[0] + TAIL) / (60 * minutes) <= 1.1
        assert summary.seconds > 0.5 * 60 * minutes
        assert summary.steps == round(summary.seconds)
        assert {"loss", "perplexity"} <= set().union(*read_metrics(folder / "metrics.jsonl"))


def test_a_run_that_is_set_up_slowly_still_has_half_of_its_minutes_and_says_so(slow, configure, tmp_path):
    slow[0], said = 100.0, io.StringIO()
    summary = run(tmp_path, configure(minutes=1, steps=10_000, save_every=0), Console(file=said, width=200), begun=0.0)
    assert 30 <= summary.seconds < 32
    assert "the set-up took 100 of 60 seconds, which leaves 30 for training" in said.getvalue()


def test_a_run_of_minutes_warms_up_for_a_twentieth_of_it(configure):
    settings = configure(warmup=None, minutes=1, decay="constant", learning_rate=1.0).train
    assert settings.rate(0, 0.0) == pytest.approx(0.01)
    assert settings.rate(49, 0.01) == pytest.approx(0.5)  # many steps: a hundred of them
    assert settings.rate(24, 0.025) == pytest.approx(0.5)  # few: a twentieth of the run
    assert settings.rate(4, 0.5) == pytest.approx(0.5)  # very few: ten
    assert settings.rate(99, 0.01) == 1.0


# What cannot go on


def test_a_state_of_another_network_is_named(configure, tmp_path):
    folder = complete(tmp_path / "run", configure())
    with pytest.raises(ValueError, match=r"step-00000008.pt does not fit this run or is damaged"):
        Run(folder, configure("mdlm"))


@pytest.mark.parametrize("content", ["{", "{}", '{"data": "", "network": {}, "train": {"colour": 1}}', "[" * 99_999])
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


@pytest.mark.parametrize("milestones", [{}, {"log_every": 20, "sample_every": 2}, {"log_every": 20, "save_every": 2}])
def test_a_loss_that_is_no_number_ends_the_run(milestones, configure, tmp_path):
    says = r"the loss is (nan|inf) at step \d+: (--resume .*, )?try a lower learning rate"
    with pytest.raises(ValueError, match=says):
        complete(tmp_path, configure(learning_rate=1e30, steps=20, **milestones))


def test_a_resumed_run_has_the_milestones_of_one_never_stopped(configure, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    config = configure(steps=20, evaluate_every=None, save_every=0)
    run(whole, config, Console(quiet=True))
    run(halves, dataclasses.replace(config, train=dataclasses.replace(config.train, steps=8)), Console(quiet=True))
    run(halves, config, Console(quiet=True))
    milestones = {
        folder: [line["step"] for line in read_metrics(folder / "metrics.jsonl") if "validation" in line]
        for folder in (whole, halves)
    }
    assert milestones[whole] == list(range(2, 21, 2))
    assert [step for step in milestones[halves] if step > 8] == [10, 12, 14, 16, 18, 20]


def test_speed_is_noted_with_every_look_at_the_losses(configure, tmp_path, monkeypatch):
    """In tokens and in the operations that a plan counts; on a GPU that we know, also as a share of its peak."""
    complete(tmp_path / "run", configure(batch=32, log_every=4, save_every=4))
    noted = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if "tflops_per_device" in line]
    assert [line["step"] for line in noted] == [4, 8]
    assert all(line["tokens_per_second_per_device"] > 0 and "mfu" not in line for line in noted)
    config = RunConfig.read(tmp_path / "run")
    case = TrainCase(width=32, layers=2, vocab=config.network["vocab"], length=16)
    counted = work_of(PlannedRun(case=case, settings=case.settings)).operations / 16
    for line in noted:
        each = 1e12 * line["tflops_per_device"] / line["tokens_per_second_per_device"]
        assert each == pytest.approx(counted, rel=0.05)
    this = Run(tmp_path / "run", config)
    this.waiting = [Progress(8, torch.zeros(()), torch.zeros(()), 0.1, 1.0)]
    this.speed = Throughput(512, 0, 0.0)
    this.accelerator = SimpleNamespace(num_processes=2, device=torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = this.facts()
    assert found["mfu"] == pytest.approx(1e12 * found["tflops_per_device"] / 989.5e12)


def test_a_state_and_a_model_are_as_large_as_a_plan_says(configure, tmp_path):
    """Beside names and small numbers."""
    this = Run(tmp_path, configure(steps=1))
    for step in this:
        this.save(step.step)
    tensors = [value for value in tree_leaves(newest(tmp_path)) if isinstance(value, Tensor) and value.ndim]
    assert sum(value.nbytes for value in tensors) == this.parameters * (WEIGHT + MOMENTS + AVERAGE)
    assert sum(value.nbytes for value in load_file(tmp_path / "model/model.safetensors").values()) == (
        this.parameters * AVERAGE
    )
