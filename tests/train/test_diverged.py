"""A run whose numbers are none any more says so, saves nothing of it, and goes on from the last good state."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import codec_runs
import numpy as np
import pytest
import torch
from rich.console import Console
from run_folders import complete, newest, weights

import maskless
from maskless.checkpoint import Model
from maskless.codec.vq import read_codec
from maskless.train import distill_run, state
from maskless.train.codec import CodecRun
from maskless.train.codec_loop import Trainer
from maskless.train.loop import Progress
from maskless.train.run import Run

STEP = 6  # at which something goes wrong; states are due every 3


def spoil_gradients(module: torch.nn.Module, step: int = STEP) -> None:
    """After so many backward passes the gradients are no numbers; the loss of that step is one."""
    passes = 0

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return gradient * math.nan if passes == step else gradient

    next(module.parameters()).register_hook(spoil)


def spoiled(make: Callable[..., torch.nn.Module], step: int = STEP) -> Callable[..., torch.nn.Module]:
    def build(*given) -> torch.nn.Module:
        network = make(*given)
        spoil_gradients(network, step)
        return network

    return build


def finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(values.isfinite().all()) for values in tensors)


def kept(folder: Path) -> list[str]:
    return [path.name for path in state.saved(folder / "states")]


@pytest.mark.parametrize("stations", [{}, {"log_every": 20, "evaluate_every": STEP}])
def test_a_gradient_that_is_no_number_costs_no_state(stations, configure, losses, monkeypatch, tmp_path):
    config = configure(keep=1, **stations)
    straight = complete(tmp_path / "straight", config)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "build", spoiled(Run.build))
        with pytest.raises(ValueError, match=r"the gradient is nan at step 6: ") as error:
            complete(tmp_path / "run", config)
    assert "--resume goes on from step-00000003.pt; if it ends here again, try a lower learning" in str(error.value)
    assert kept(tmp_path / "run") == ["step-00000003.pt"]
    assert finite([*newest(tmp_path / "run")["averages"], *maskless.load(tmp_path / "run").parameters()])
    assert losses(complete(tmp_path / "run", config)) == losses(straight)
    assert weights(tmp_path / "run") == weights(straight)


def test_weights_that_are_no_numbers_are_not_saved(configure, monkeypatch, tmp_path):
    """Also where loss and gradient are: the optimiser may go too far with them."""
    steps = Run.steps

    def too_far(this: Run) -> Iterator[Progress]:
        for step in steps(this):
            if step.step == STEP:
                with torch.no_grad():
                    next(this.network.parameters())[0] = math.inf
            yield step

    monkeypatch.setattr(Run, "steps", too_far)
    with pytest.raises(
        ValueError, match=r"weights are no finite numbers at step 6: --resume goes on from step-00000003.pt"
    ):
        complete(tmp_path, configure(keep=1, steps=STEP))
    assert kept(tmp_path) == ["step-00000003.pt"]
    assert finite(maskless.load(tmp_path).parameters())


def test_a_state_without_numbers_is_named_with_the_one_before_it(configure, tmp_path):
    folder, config = complete(tmp_path, configure()), configure(steps=9)
    spoiled = newest(folder)
    next(iter(spoiled["weights"].values())).fill_(math.nan)
    torch.save(spoiled, state.saved(folder / "states")[-1])
    says = r"step-00000008.pt .*: it holds weights that are no finite numbers; without that file .* step-00000006.pt"
    with pytest.raises(ValueError, match=says):
        complete(folder, config)
    state.saved(folder / "states")[-1].unlink()
    complete(folder, config)
    assert newest(folder)["step"] == 9


def test_a_round_that_diverges_leaves_its_last_good_state(data, configure, monkeypatch, tmp_path):
    teacher = complete(tmp_path / "teacher", configure(steps=1))
    given = {"steps": 4, "batch": 4, "log_every": 9, "save_every": 1, "keep": 1, "tracker": "none"}
    config = distill_run.begin(tmp_path / "out", str(teacher), data.folder, train=given, rounds=1, teacher_steps=4)
    monkeypatch.setattr(distill_run.Round, "build", spoiled(distill_run.Round.build, 3))
    with pytest.raises(ValueError, match=r"the gradient is nan at step 3: --resume goes on from step-00000002.pt"):
        distill_run.distill(tmp_path / "out", config, Console(file=io.StringIO()))
    assert kept(tmp_path / "out" / "round-1") == ["step-00000002.pt"]
    assert finite(Model.from_pretrained(tmp_path / "out" / "round-1" / "model").parameters())
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("stations", [{}, {"log_every": 20, "evaluate_every": STEP}])
def test_a_codec_that_diverges_is_an_error_and_keeps_the_last_good_state(stations, quick, monkeypatch, tmp_path):
    config = quick(steps=STEP, keep=1, **stations)
    begin = Trainer.__init__

    def spoiled(this: Trainer, *given) -> None:
        begin(this, *given)
        spoil_gradients(this.codec)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", spoiled)
        with pytest.raises(ValueError, match=r"the gradient is nan at step 6: --resume goes on from step-00000003.pt"):
            codec_runs.complete(tmp_path, config)
    assert kept(tmp_path) == ["step-00000003.pt"]
    assert finite(read_codec(tmp_path).parameters())
    assert not [line for line in codec_runs.lines(tmp_path) if None in line.values()]
    codec_runs.complete(tmp_path, config)
    assert kept(tmp_path) == ["step-00000006.pt"]


def test_a_codec_whose_pictures_are_no_numbers_is_an_error(quick, monkeypatch, tmp_path):
    """Also where all that was learned is: from such weights the pictures may pass every number."""
    rebuilt = CodecRun._rebuilt

    def spoiled(this: CodecRun, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        images, out = rebuilt(this, numbers)
        return images, out * math.nan

    monkeypatch.setattr(CodecRun, "_rebuilt", spoiled)
    with pytest.raises(ValueError, match="the PSNR is nan at step 2: try a lower learning rate"):
        codec_runs.complete(tmp_path, quick(steps=2))
    assert not (tmp_path / "reconstructions.png").exists()
