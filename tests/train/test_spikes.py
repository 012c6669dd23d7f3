"""A step whose gradient is far above the others is left out and counted; many in a row end a run."""

import pytest
import torch
from codec_runs import lines
from run_folders import complete, kept, newest, spoiled_gradients, trained, weights

from maskless.train import spikes
from maskless.train.run import Run
from maskless.train.spikes import LEAST, WINDOW, Spikes

CPU = torch.device("cpu")


def test_a_norm_far_above_the_median_is_a_spike():
    guard = Spikes(10.0, CPU)
    usual = [1.0 + 0.1 * (i % 5) for i in range(3 * WINDOW)]
    assert not any(guard.found(torch.tensor(norm)) for norm in usual)
    assert guard.norms.isfinite().all()
    before = guard.norms
    assert guard.found(torch.tensor(12.1))
    assert guard.norms.equal(before), "a spike moves the median"
    assert not guard.found(torch.tensor(11.9))
    assert [guard.found(torch.tensor(norm)).item() for norm in (50.0, 50.0, 1.0)] == [1, 1, 0]
    assert (guard.total, guard.row) == (3, 0)


def test_nothing_is_a_spike_before_there_is_a_median_and_what_is_no_number_is_none():
    guard = Spikes(2.0, CPU)
    assert not any(guard.found(torch.tensor(10.0**i)) for i in range(LEAST))
    assert not guard.found(torch.tensor(torch.nan))  # it ends the run


@pytest.fixture
def early(monkeypatch) -> None:
    """Two norms make a median, and three spikes an end."""
    monkeypatch.setattr(spikes, "LEAST", 2)
    monkeypatch.setattr("maskless.train.run.IN_A_ROW", 3)


@pytest.mark.usefixtures("early")
def test_a_spike_is_left_out_and_counted(configure, tmp_path):
    with spoiled_gradients(5, by=1e4):
        folder = complete(tmp_path, configure(skip_spikes=10.0, save_every=1, keep=9))
    assert [line["skipped"] for line in trained(folder)] == [0, 0, 0, 0, 1, 1, 1, 1]
    before, after, later = (torch.load(tmp_path / f"states/step-0000000{i}.pt") for i in (4, 5, 6))
    assert all(value.equal(after["weights"][name]) for name, value in before["weights"].items())
    assert not all(value.equal(later["weights"][name]) for name, value in before["weights"].items())
    count = next(iter(newest(folder)["optimizer"]["state"].values()))["step"]
    assert count == 7  # the moments have not seen it either


@pytest.mark.usefixtures("early")
def test_a_run_without_spikes_is_the_same_with_and_without_the_option(configure, tmp_path):
    plain, guarded = (
        complete(tmp_path / str(factor), configure(dropout=0.1, skip_spikes=factor)) for factor in (0.0, 10.0)
    )
    assert weights(plain) == weights(guarded)
    assert [line | {"skipped": 0} for line in trained(plain)] == trained(guarded)


@pytest.mark.usefixtures("early")
def test_a_run_resumed_after_a_spike_is_bit_equal(configure, tmp_path):
    config = configure(skip_spikes=10.0)
    with spoiled_gradients(3, 7, by=1e4):
        straight = complete(tmp_path / "straight", config)
        this = Run(tmp_path / "stopped", config)
        for step in this:
            this.log(step)
            if step.step == 3:
                this.save(3)
                break
        stopped = complete(tmp_path / "stopped", config)
    assert lines(stopped) == lines(straight)
    assert trained(straight)[-1]["skipped"] == 2
    assert weights(stopped) == weights(straight)


@pytest.mark.usefixtures("early")
def test_many_spikes_in_a_row_end_a_run_and_cost_no_state(configure, tmp_path):
    config = configure(skip_spikes=10.0, steps=20)
    said = r"the last 3 steps were skipped as spikes at step 8: --resume goes on from step-00000006.pt"
    with spoiled_gradients(*range(6, 20), by=1e4), pytest.raises(ValueError, match=said):
        complete(tmp_path, config)
    assert kept(tmp_path)[-1] == "step-00000006.pt"
    assert newest(tmp_path)["spikes"]["row"] == 1
