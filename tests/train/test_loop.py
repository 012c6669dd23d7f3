"""The loop: schedules, the share of each process, what a step trains on, and when it stops."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from maskless.data.image_tokens import ImageTokens, label_path
from maskless.data.tokens import bin_path, global_batch
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.objective import OBJECTIVES, Task, noise
from maskless.train import loop
from maskless.train.config import TrainConfig
from maskless.train.loop import Clock, Progress, is_due, train
from maskless.train.processes import check_processes
from maskless.train.tasks import objective_of, tasks_of
from objective_tasks import loss

# Schedules


def test_the_rate_warms_up_in_equal_parts_and_stays():
    config = TrainConfig(learning_rate=0.8, warmup=4, decay="constant")
    rates = [config.rate(step, share=step / 100) for step in range(100)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert set(rates[4:]) == {0.8}


@pytest.mark.parametrize(("warmup", "step", "warm"), [(0, 9, 1), (8, 1, 2 / 8)])
def test_the_rate_falls_as_a_cosine_to_zero_and_is_multiplied_by_its_warm_up(warmup, step, warm):
    config = TrainConfig(learning_rate=0.8, warmup=warmup, decay="cosine")
    for share, expected in {0: 0.8, 1 / 3: 0.6, 1 / 2: 0.4, 2 / 3: 0.2, 1: 0, 1.5: 0}.items():
        assert config.rate(step, share) == pytest.approx(warm * expected)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": "gpt"}, "unknown model 'gpt': expected one of pgm, mdlm, mdlm-complementary, ar, maskgit"),
        ({"weights": "fair"}, "unknown weights 'fair': expected one of bounded, released, exact, arccos"),
        ({"decay": "linear"}, "unknown decay 'linear': expected one of constant, cosine"),
        ({"initial": "zero"}, "unknown initial 'zero': expected one of open, released"),
        ({"steps": 0}, "steps 0 is out of range: expected more than 0"),
        ({"batch": -1}, "batch -1 is out of range: expected more than 0"),
        ({"clip": 0.0}, "clip 0.0 is out of range: expected more than 0"),
        ({"learning_rate": math.nan}, "learning_rate nan is out of range: expected more than 0"),
        ({"minutes": -0.5}, "minutes -0.5 is out of range: expected more than 0"),
        ({"save_every": -1}, "save_every -1 is out of range: expected 0 or more"),
        ({"seed": -1}, "seed -1 is out of range: expected 0 to 9223372036854775807"),
        ({"seed": 1 << 63}, "seed 9223372036854775808 is out of range: expected 0 to 9223372036854775807"),
        ({"ema": 1.0}, "ema 1.0 is out of range: expected at least 0 and less than 1"),
        ({"shard_size": 2}, "shard_size 2 without fsdp: expected both, or neither"),
        ({"shard_size": 0, "fsdp": True}, "shard_size 0 is out of range: expected more than 0"),
        ({"skip_spikes": 0.5}, "skip_spikes 0.5 is out of range: expected more than 1, or 0 for none"),
    ],
)
def test_a_wrong_setting_is_named(wrong, says):
    with pytest.raises(ValueError) as raised:
        TrainConfig(**wrong)
    assert str(raised.value) == says


def test_shards_go_to_equal_groups():
    three = SimpleNamespace(num_processes=3, distributed_type=None)
    with pytest.raises(ValueError, match="shard_size 2 of 3 processes: expected a number that divides them"):
        check_processes(TrainConfig(batch=6, fsdp=True, shard_size=2), three)
    check_processes(TrainConfig(batch=6, fsdp=True, shard_size=3), three)


TWO_GROUPS = ["pgm", "pgm-released", "pgm-exact"]


@pytest.mark.parametrize(
    ("model", "tasks"),
    [("pgm", TWO_GROUPS), ("mdlm-complementary", TWO_GROUPS), ("mdlm", ["mdlm"] * 3), ("ar", ["causal"] * 3)],
)
def test_weights_choose_the_task_of_models_with_two_groups_alone(model, tasks):
    assert [TrainConfig(model=model, weights=weights).task for weights in ("bounded", "released", "exact")] == tasks


# Shares of the global batch

CHAIN = {"model": "pgm", "objective": "chain", "orders": "random=1,strands=1,gaps=1"}


def flat(tasks: list[Task]) -> dict[str, Tensor]:
    """The tensors of some tasks, one task after the other."""
    parts = {
        "tokens": [task.problems.tokens for task in tasks],
        "positions": [task.problems.positions for task in tasks],
        "context lengths": [task.problems.offsets.lengths for task in tasks],
        "targets": [task.problems.targets for task in tasks],
        "target lengths": [task.problems.target_offsets.lengths for task in tasks],
        "answers": [task.answers for task in tasks],
        "weights": [task.weights for task in tasks],
    }
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def shares(data, config: TrainConfig, world: int, step: int = 3) -> list[tuple[list[Task], int]]:
    rows, build = data.split("train"), objective_of(config)
    return [tasks_of(rows, config, build, step, world=world, rank=rank) for rank in range(world)]


@pytest.mark.parametrize(("world", "accumulate"), [(1, 4), (2, 1), (2, 3), (4, 1), (3, 2), (12, 1)])
@pytest.mark.parametrize("kind", [{"model": "pgm"}, CHAIN, {"model": "mdlm"}, {"model": "ar"}], ids=str)
def test_the_shares_of_all_processes_joined_are_the_task_of_one(data, kind, world, accumulate):
    """So the times are stratified over the global batch, and the order of a row is its own, however it is shared."""
    config = TrainConfig(**kind, batch=12, accumulate=accumulate, seed=5)
    [(whole, count)] = shares(data, TrainConfig(**kind, batch=12, seed=5), 1)
    parts = shares(data, config, world)
    assert {part_count for _, part_count in parts} == {count} == {12 * 16}
    assert [len(tasks) for tasks, _ in parts] == [accumulate] * world
    joined = flat([task for tasks, _ in parts for task in tasks])
    for name, expected in flat(whole).items():
        assert joined[name].equal(expected), name


def test_the_whole_task_is_built_from_stratified_times(data):
    rows, config = data.split("train"), TrainConfig(batch=12, seed=5)
    t, u = noise(12, 16, seed=5, step=3)
    assert sorted((t * 12).long().tolist()) == list(range(12))
    tokens = rows.rows(global_batch(3, 12, len(rows), seed=5))
    expected = OBJECTIVES["pgm"](tokens, t, u, torch.ones_like(tokens, dtype=torch.bool))
    [(whole, _)] = shares(data, config, 1)
    for name, tensor in flat([expected]).items():
        assert flat(whole)[name].equal(tensor), name


def test_processes_and_steps_have_rows_and_noise_of_their_own(data):
    config = TrainConfig(batch=12, seed=5)
    seen = [flat(tasks) for step in (0, 1) for tasks, _ in shares(data, config, 2, step)]
    for one, other in itertools.combinations(seen, 2):
        assert not one["answers"].sort()[0].equal(other["answers"].sort()[0])
        assert not set(one["weights"].tolist()) & set(other["weights"].tolist())


def test_padding_neither_weighs_nor_counts(data):
    rows = data.split("train")
    tokens = rows.rows(global_batch(0, 12, len(rows), seed=5))
    pad = int(tokens.flatten().mode().values)  # any frequent token will do
    for model in ("pgm", "mdlm", "ar"):
        config = TrainConfig(model=model, batch=12, seed=5)
        [task], count = tasks_of(rows, config, objective_of(config), 0, pad=pad)
        assert count == int((tokens != pad).sum()) < tokens.numel()
        assert (task.weights == 0).equal(task.answers == pad)
        shared = [tasks_of(rows, config, objective_of(config), 0, world=2, rank=rank, pad=pad)[1] for rank in range(2)]
        assert shared == [count, count], "every process divides by the count of the whole batch"


@pytest.mark.parametrize("model", ["pgm", "maskgit"])
def test_whether_a_label_is_hidden_has_nothing_to_do_with_what_is_predicted(model, tmp_path):
    """Of pictures with 2 x 2 tokens: none of them tells of its label by being among the known ones."""
    n, p = 4000, 0.5
    np.zeros((2, 5), "<u2").tofile(bin_path(tmp_path, "train"))
    np.array([0, 1], "<i4").tofile(label_path(tmp_path, "train"))
    rows = ImageTokens(bin_path(tmp_path, "train"), "uint16", 2, 5, classes=2)
    config = TrainConfig(model=model, weights="arccos", batch=n, label_dropout=p)
    [task], _ = tasks_of(rows, config, objective_of(config), 0)
    known = torch.zeros(len(task.problems), 5, dtype=torch.float64)
    known[task.problems.offsets.owner, task.problems.positions] = 1
    known, labels = (x.view(n, -1, *x.shape[1:])[:, 0] for x in (known, task.problems.labels))
    hidden = (labels == 2).double()
    assert abs(float(hidden.mean()) - p) < 4 * math.sqrt(p * (1 - p) / n)
    correlation = torch.corrcoef(torch.cat([hidden[:, None], known[:, 1:]], 1).T)[0, 1:]
    assert float(correlation.abs().max()) < 4 / math.sqrt(n)


# Training


class Ticks(Clock):
    """A clock that goes on by a second whenever it is read."""

    def __init__(self, spent: float):
        super().__init__(0.0)
        self.now = spent

    @property
    def since_setup(self) -> float:
        self.now += 1
        return self.now

    @property
    def seconds(self) -> float:
        return 0.0  # as if a step took no time


def steps_of(data, configure, *, start: int = 0, clock: Clock | None = None, **settings) -> list[Progress]:
    config = configure(**settings)
    torch.manual_seed(0)
    network = PartitionTransformer(PartitionConfig(**config.network))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.0, weight_decay=0.0)
    rows = data.split("train")
    return list(train(network, optimizer, rows, config.train, Accelerator(), start=start, clock=clock))


def test_steps_are_counted_from_the_start_to_the_last(data, configure):
    steps = steps_of(data, configure, start=3, steps=8)
    assert [step.step for step in steps] == [4, 5, 6, 7, 8]
    assert [step.share for step in steps] == [n / 8 for n in (4, 5, 6, 7, 8)]
    assert steps_of(data, configure, start=8, steps=8) == []


def test_the_first_loss_is_the_objective_of_the_first_batch(data, configure):
    config = configure()
    torch.manual_seed(0)
    network = PartitionTransformer(PartitionConfig(**config.network))
    [(whole, count)] = shares(data, config.train, 1, step=0)
    expected = loss(network, whole[0]) / count
    for accumulate in (1, 4):
        first = steps_of(data, configure, steps=1, accumulate=accumulate)[0]
        torch.testing.assert_close(first.loss, expected.detach())


def test_pieces_of_a_batch_train_as_the_whole(data, configure):
    whole, pieces = (steps_of(data, configure, accumulate=n) for n in (1, 4))
    assert len(whole) == 8
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one.loss, other.loss)
        torch.testing.assert_close(one.gradient, other.gradient)
    assert len({float(step.loss) for step in whole}) == 8


def test_minutes_end_a_run_and_set_its_rate(data, configure):
    steps = steps_of(data, configure, steps=1000, minutes=0.1, decay="cosine", warmup=0, clock=Ticks(0.0))
    assert [step.share for step in steps] == pytest.approx([n / 6 for n in range(2, 7)])  # 6 seconds, one is over
    assert [step.rate for step in steps] == pytest.approx(
        [1e-3 * 0.5 * (1 + math.cos(math.pi * n / 6)) for n in range(1, 6)]
    )


def test_the_last_step_ends_a_run_before_its_minutes_and_spent_minutes_before_any_step(data, configure):
    assert len(steps_of(data, configure, steps=4, minutes=10, clock=Ticks(0.0))) == 4
    assert steps_of(data, configure, start=3, steps=1000, minutes=0.1, clock=Ticks(6.0)) == []


def test_the_clock_goes_on_from_earlier_parts_and_stands_still_when_paused(monkeypatch):
    now = 7.0
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    clock = Clock(100.0)
    with clock.paused():
        now += 3
    assert clock.seconds == 100
    now += 2
    assert clock.seconds == 102


def test_milestones_come_every_so_many_steps_or_ten_times_over_the_run():
    def milestones(every, steps):
        due, before = [], 0.0
        for done in range(1, steps + 1):
            step = Progress(done, torch.zeros(()), torch.zeros(()), 0.0, done / steps)
            due += [done] if is_due(every, step, before) else []
            before = step.share
        return due

    assert milestones(3, 10) == [3, 6, 9]
    assert milestones(0, 10) == []
    assert milestones(None, 20) == list(range(2, 21, 2))
    assert milestones(None, 30_000)[:4] == [1_000, 2_000, 3_000, 4_000]
