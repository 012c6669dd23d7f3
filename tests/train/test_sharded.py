"""States of sharded runs: written by some processes and read by others; what was saved survives kills and bad disks."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import together
from run_folders import complete, kept, leftovers, weights

from maskless.checkpoint import Model
from maskless.train.run import RunConfig

TOGETHER = Path(together.__file__)
KILLS = 10 if "MASKLESS_SLOW" in os.environ else 1


@pytest.fixture
def training(start_several):
    """training(processes, folder, config): processes that begin or resume a sharded run."""

    def start(processes: int, folder: Path, config: RunConfig) -> list:
        config.write(folder)
        return start_several(processes, TOGETHER, "train", folder)

    return start


def end_well(processes: list) -> None:
    for process in processes:
        assert process.wait() == 0, process.stderr


@pytest.mark.parametrize("kind", [{"model": "pgm"}, {"model": "mdlm", "skip_spikes": 10.0}])
def test_a_run_of_four_processes_is_resumed_by_two_and_by_one(kind, training, configure, losses, tmp_path):
    """It begins as a run of one process, whose states are files. Four are two groups with all weights each (HSDP)."""
    single = complete(tmp_path / "single", configure(**kind))
    several = complete(tmp_path / "several", configure(**kind, steps=2))
    for processes, steps, more in ((4, 4, {"shard_size": 2}), (2, 6, {"activation_checkpointing": True}), (1, 8, {})):
        end_well(training(processes, several, configure(**kind, **more, steps=steps, save_every=2, fsdp=True)))
    found, expected = losses(several), losses(single)
    assert list(found) == list(expected) == list(range(1, 9))
    for step, line in expected.items():
        assert found[step] == pytest.approx(line, rel=1e-5), step
    assert kept(several) == ["step-00000006", "step-00000008"]
    ours, theirs = (Model.from_pretrained(folder / "model").state_dict() for folder in (several, single))
    for name, value in theirs.items():
        assert ours[name].numpy() == pytest.approx(value.numpy(), rel=1e-3, abs=1e-4), name


def test_a_run_survives_kills_of_its_processes(training, configure, losses, tmp_path):
    """At random moments, in steps and while states are written; it is bit-equal to one that nobody killed."""
    rng, steps = random.Random(0), 12 * KILLS
    config = configure(steps=steps, save_every=2, log_every=1, fsdp=True)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    end_well(training(2, straight, config))
    for life in range(KILLS):
        both = training(2, killed, config)
        reached = steps * life // KILLS + rng.randrange(8)
        both[0].until(lambda reached=reached: reached == 0 or reached in losses(killed))
        time.sleep(rng.uniform(0, 0.2))
        one = rng.randrange(2)
        both[one].kill(signal.SIGKILL)
        assert both[one].wait() in (-signal.SIGKILL, 0)
        assert both[1 - one].wait() in (0, 1, 2), both[1 - one].stderr  # the other finds that it is alone
    end_well(training(2, killed, config))
    assert losses(killed) == losses(straight)
    assert list(losses(killed)) == list(range(1, steps + 1))
    assert weights(killed) == weights(straight)
    assert leftovers(killed) == []


@pytest.mark.parametrize(
    ("damage", "said"), [(Path.unlink, "it has 1 of 2 files"), (lambda path: path.write_bytes(b"no"), "damaged")]
)
def test_a_damaged_state_is_named_with_the_one_before(damage, said, training, configure, tmp_path):
    config = configure(steps=4, save_every=2, fsdp=True)
    end_well(training(2, tmp_path, config))
    damage(sorted((tmp_path / "states" / "step-00000004").glob("*.safetensors"))[0])
    (one,) = training(1, tmp_path, configure(steps=6, fsdp=True))
    assert one.wait() == 2, one.stderr
    (line,) = (line for line in one.stderr.splitlines() if line.startswith("error: "))
    assert said in line
    assert line.endswith("without it the run goes on from step-00000002")
    assert "Traceback" not in one.stderr


# Disks


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def full(disk: Path, states: Path) -> None:
    mount("-o", f"remount,size={shutil.disk_usage(disk).used + 500_000}", disk)  # a state takes three times as much


def read_only(disk: Path, states: Path) -> None:
    mount("--bind", states, states)
    mount("-o", "remount,bind,ro", states)


def writable(disk: Path, states: Path) -> None:
    subprocess.run(["umount", "-q", states], check=False)
    mount("-o", "remount,size=20m", disk)


@pytest.mark.parametrize(("change", "said"), [(full, "No space left on device"), (read_only, "Read-only file system")])
def test_a_disk_that_takes_no_more_costs_nothing_that_was_saved(
    change, said, training, configure, losses, disk, tmp_path
):
    run, states = disk / "run", disk / "run" / "states"
    both = training(2, run, configure(steps=100_000, save_every=20, log_every=1, fsdp=True))
    both[0].until(lambda: kept(run))
    change(disk, states)
    try:
        before = kept(run)
        assert both[0].wait() == 2, both[0].stderr
        assert said in both[0].stderr.splitlines()[-1]
        assert "Traceback" not in both[0].stderr
        assert both[1].wait() in (1, 2)
        assert kept(run)[: len(before)] == before
    finally:
        writable(disk, states)
    assert leftovers(run) == []
    reached = int(kept(run)[-1].removeprefix("step-"))
    config = configure(steps=reached + 3, save_every=0, log_every=1, fsdp=True)
    end_well(training(2, run, config))
    end_well(training(2, tmp_path / "straight", config))
    assert losses(run) == losses(tmp_path / "straight")
    assert weights(run) == weights(tmp_path / "straight")
