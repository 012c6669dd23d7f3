"""A run of any kind, stopped, interrupted or out of disk, goes on as if nothing had been."""

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from codec_runs import lines
from rich.console import Console
from run_folders import Kind, codec_runs, kept, leftovers, network_runs, newest, spoiled_gradients, trained
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

from maskless.train import state
from maskless.train.config import TEXT_MODELS
from maskless.train.folder import RunFolder

NETWORKS = {model: {"model": model} for model in TEXT_MODELS} | {"ordered": {"context": "ordered"}}
KINDS = ("pgm", "codec")
STEP = 6  # at which something goes wrong; states are due every 3


@pytest.fixture(params=KINDS)
def kind(request, configure, quick) -> Kind:
    """Runs of networks and of codecs, of 8 and of 10 steps."""
    if request.param == "codec":
        return codec_runs(quick)
    return network_runs(partial(configure, **NETWORKS[request.param], dropout=0.2, ema=0.5, evaluate_every=0))


@pytest.fixture(scope="module")
def runs() -> dict[str, Path]:
    return {}


@pytest.fixture
def straight(kind, runs, request, tmp_path_factory) -> Path:
    """A run of the kind that nothing stopped, for all tests to look at."""
    name = request.node.callspec.params["kind"]
    if name not in runs:
        runs[name] = kind.complete(tmp_path_factory.mktemp("straight"), kind.configure())
    return runs[name]


# Stopping and going on


@pytest.mark.parametrize("kind", [*NETWORKS, "codec"], indirect=True)
def test_a_stopped_and_resumed_run_is_bit_equal_to_one_never_stopped(kind, straight, tmp_path):
    config = kind.configure()
    kind.stop_after(tmp_path / "stopped", config, 2)  # before the first state
    kind.stop_after(tmp_path / "stopped", config, 5)  # after the state of step 3
    stopped = kind.complete(tmp_path / "stopped", config)
    assert lines(stopped) == lines(straight)
    assert [line["step"] for line in trained(straight)] == list(range(1, newest(straight)["step"] + 1))
    assert kind.weights(stopped) == kind.weights(straight)
    one, other = (pytree.tree_flatten_with_path(newest(folder))[0] for folder in (stopped, straight))
    for (place, value), (_, expected) in zip(one, other, strict=True):
        same = value.equal(expected) if isinstance(value, torch.Tensor) else value == expected
        assert same or "seconds" in pytree.keystr(place), place


def test_a_run_resumed_between_two_logs_has_no_gap(kind, tmp_path):
    config = kind.configure(log_every=4, save_every=3)
    straight = kind.complete(tmp_path / "straight", config)
    kind.stop_after(tmp_path / "stopped", config, 7)
    stopped = kind.complete(tmp_path / "stopped", config)
    for name in ("step", "loss", "gradient", "rate"):
        assert [line[name] for line in trained(stopped)] == [line[name] for line in trained(straight)]


def test_training_goes_on_from_the_trained_weights_after_a_look_at_the_average(kind, straight, tmp_path):
    samples = {} if kind.model == "codec" else {"sample_every": 3}
    looked = kind.complete(tmp_path / "looked", kind.configure(evaluate_every=2, **samples))
    assert trained(looked) == trained(straight)
    assert kind.weights(looked) == kind.weights(straight)
    last = newest(looked)["step"]
    tested = [line["step"] for line in lines(looked) if "loss" not in line]
    assert tested == list(range(2, last + 1, 2))


def test_a_finished_run_resumed_stays_as_it_is_and_gets_a_model_that_a_kill_cost(kind, straight, tmp_path):
    folder = shutil.copytree(straight, tmp_path / "run")
    before, found = lines(folder), kind.weights(folder)
    shutil.rmtree(folder / kind.model)
    kind.complete(folder, kind.configure())
    assert (lines(folder), kind.weights(folder)) == (before, found)


def test_a_run_whose_minutes_are_spent_stays_as_it_is_when_resumed(kind, steady_clock, tmp_path):
    config = kind.configure(steps=10_000, minutes=0.01)
    folder = kind.complete(tmp_path, config)
    before = trained(folder), kind.weights(folder)
    assert 0 < len(before[0]) < 10_000
    kind.complete(folder, config)
    assert (trained(folder), kind.weights(folder)) == before


def test_an_interrupted_run_saves_the_step_and_goes_on(kind, straight, ctrl_c, monkeypatch, tmp_path):
    """Also before a state is due."""
    config, log = kind.configure(save_every=0), RunFolder.log

    def interrupted(run: RunFolder, step) -> float | None:
        if step.step == 5:
            ctrl_c()
        return log(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "log", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kind.complete(tmp_path / "run", config)
    assert kept(tmp_path / "run") == ["step-00000005.pt"]
    assert len(kind.weights(tmp_path / "run")) == len(kind.weights(straight))
    assert lines(kind.complete(tmp_path / "run", config)) == lines(straight)
    assert kind.weights(tmp_path / "run") == kind.weights(straight)


def test_a_run_that_cannot_write_leaves_the_state_before(kind, straight, monkeypatch, tmp_path):
    config, write = kind.configure(), state.write_aside

    def full(path, how):
        if path.name == "step-00000006.pt":
            raise OSError(28, "No space left on device")
        write(path, how)

    with monkeypatch.context() as patch:
        patch.setattr(state, "write_aside", full)
        with pytest.raises(OSError, match="No space left"):
            kind.complete(tmp_path / "run", config)
    assert kept(tmp_path / "run") == ["step-00000003.pt"]
    assert kind.weights(tmp_path / "run")
    assert lines(kind.complete(tmp_path / "run", config)) == lines(straight)


def test_what_a_killed_process_left_is_swept_away(kind, tmp_path):
    for name in ("states/.step-00000003.pt.77.part", f"{kind.model}/.model.safetensors.77.part", ".run.json.77.part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / kind.model / ".codec.77.part").mkdir()
    kind.complete(tmp_path, kind.configure(steps=1))
    assert leftovers(tmp_path) == []


# What is saved


def test_the_model_of_a_run_is_the_average_of_its_weights(kind, straight, tmp_path):
    found, last = load_file(straight / kind.model / "model.safetensors"), newest(straight)
    last = last.get("trainer", last)
    names = [name for name, _ in kind.begin(tmp_path, kind.configure()).network.named_parameters()]
    assert all(average.equal(found[name]) for name, average in zip(names, last["averages"], strict=True))
    trained = last["codec" if kind.model == "codec" else "weights"]
    assert not all(trained[name].equal(value) for name, value in found.items())


def test_the_last_states_are_kept(kind, tmp_path):
    folder = kind.complete(tmp_path, kind.configure(steps=9, save_every=2, keep=3))
    assert kept(folder) == [f"step-{n:08d}.pt" for n in (6, 8, 9)]


def test_a_run_that_ends_before_its_first_log_has_a_speed(kind, tmp_path):
    ended = kind.end(tmp_path, kind.configure(steps=3, log_every=10), Console(quiet=True))
    speed = ended.images_per_second if kind.model == "codec" else ended.tokens_per_second / 16  # sequences
    batch = 4 if kind.model == "codec" else 8
    assert speed >= 3 * batch / ended.seconds > 0


# Numbers that are none any more


@pytest.mark.parametrize("milestones", [{}, {"log_every": 20, "evaluate_every": STEP}])
def test_a_gradient_that_is_no_number_costs_no_state(milestones, kind, monkeypatch, tmp_path):
    """Its run goes on from the last good state."""
    config, folder = kind.configure(keep=1, **milestones), tmp_path / "run"
    straight = kind.complete(tmp_path / "straight", config)
    with spoiled_gradients(STEP), pytest.raises(ValueError, match=r"the gradient is nan at step 6: ") as error:
        kind.complete(folder, config)
    assert "--resume goes on from step-00000003.pt; if it ends here again, try a lower learning" in str(error.value)
    assert kept(folder) == ["step-00000003.pt"]
    tensors = [value for value in pytree.tree_leaves(newest(folder)) if isinstance(value, torch.Tensor)]
    assert state.finite([*tensors, *load_file(folder / kind.model / "model.safetensors").values()])
    assert not [line for line in lines(folder) if None in line.values()]
    assert lines(kind.complete(folder, config)) == lines(straight)
    assert kind.weights(folder) == kind.weights(straight)


def test_weights_that_are_no_numbers_are_not_saved(kind, monkeypatch, tmp_path):
    """Also where loss and gradient are: the optimiser may go too far with them."""
    log = RunFolder.log

    def too_far(this: RunFolder, step) -> float | None:
        if step.step == STEP:
            with torch.no_grad():
                next(this.network.parameters())[0] = math.inf
        return log(this, step)

    monkeypatch.setattr(RunFolder, "log", too_far)
    says = "weights are no finite numbers at step 6: --resume goes on from step-00000003.pt"
    with pytest.raises(ValueError, match=says):
        kind.complete(tmp_path, kind.configure(keep=1, steps=STEP))
    assert kept(tmp_path) == ["step-00000003.pt"]
    assert state.finite(load_file(tmp_path / kind.model / "model.safetensors").values())


def test_a_state_without_numbers_is_named_with_the_one_before_it(kind, tmp_path):
    folder, config = kind.complete(tmp_path, kind.configure(steps=8)), kind.configure(steps=9)
    spoiled, last = newest(folder), state.saved(folder / "states")[-1]
    next(iter((spoiled["trainer"]["codec"] if kind.model == "codec" else spoiled["weights"]).values())).fill_(math.nan)
    torch.save(spoiled, last)
    says = r"step-00000008.pt .*: it holds weights that are no finite numbers; without it .* step-00000006.pt"
    with pytest.raises(ValueError, match=says):
        kind.begin(folder, config)
    last.unlink()
    assert newest(kind.complete(folder, config))["step"] == 9
