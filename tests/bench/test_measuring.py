"""Measurements: what is timed, what is not, and what follows from the times."""

from itertools import pairwise

import pytest
import torch

from maskless.bench import machine, run
from maskless.bench.case import Case, DrawCase, SampleCase, TrainCase
from maskless.bench.machine import Machine, Timing, find_device
from maskless.engine import Engine
from maskless.paper import BACKWARD, FORWARD, SAMPLE, STEP
from maskless.plans import Plan

CPU = torch.device("cpu")
HERE = Machine(device="cpu", name="a machine", torch="2", threads=1, precision="fp32", product=1e9, copy=1e8)
SMALL = {"width": 32, "layers": 2, "length": 16, "vocab": 50, "batch": 2, "precision": "fp32"}
SAMPLED = [
    SampleCase(**SMALL, steps=4),
    SampleCase(**SMALL, steps=4, counts="mdlm"),
    SampleCase(**SMALL, steps=4, refresh=2),
    SampleCase(**SMALL, steps=4, context="ordered"),
    SampleCase(**SMALL, steps=4, model="mdlm"),
    SampleCase(**SMALL, steps=16, model="ar"),
    DrawCase(**SMALL, steps=4, classes=3),
    DrawCase(**SMALL, steps=4, classes=3, context="ordered"),
    DrawCase(**SMALL, steps=4, classes=3, model="maskgit", guidance=0.0),
]


def measured(case: Case, repeat: int = 3) -> tuple[list[Timing], int]:
    """Results, and how many runs it took."""
    seen: list[Case] = []
    results = list(run.measure([case], HERE, repeat=repeat, on_run=seen.append))
    assert set(seen) == {case}
    return results, len(seen)


def result(**changes: object) -> Timing:
    base = {"case": SAMPLED[0], "part": SAMPLE, "times": (2.0, 1.0, 4.0), "start_up": 9.0, "machine": HERE}
    return Timing(**base | {"memory": 2**30, "flops": 5e8, "traffic": 1e7} | changes)


@pytest.mark.parametrize("case", SAMPLED, ids=lambda case: case.name)
def test_sampling_is_measured(case):
    (found,), runs = measured(case)
    assert runs == run.runs_of(case, 3) == 1 + 2 + 3
    assert found.part == SAMPLE
    assert len(found.times) == 3
    assert found.start_up is not None
    assert found.start_up > 0
    assert found.flops > 0
    assert found.traffic > 0
    assert found.memory > 2**20
    assert (found.flops_everywhere is not None) == (case.model == "mdlm")


def test_a_warm_up_that_takes_long_enough_is_cut_short(monkeypatch):
    monkeypatch.setattr(run, "LONG", 0.0)
    (found,), runs = measured(SAMPLED[0])
    assert (len(found.times), runs) == (3, run.runs_of(SAMPLED[0], 3))


@pytest.mark.parametrize("model", ["pgm", "mdlm", "mdlm-complementary", "ar"])
def test_training_is_measured_in_three_parts(model):
    case = TrainCase(**SMALL, model=model)
    results, runs = measured(case)
    assert runs == run.runs_of(case, 3) == 1 + 3 * (2 + 3)
    assert [found.part for found in results] == [BACKWARD, FORWARD, STEP]
    both, forward, step = results
    assert both.flops == step.flops == pytest.approx(3 * forward.flops)
    assert both.start_up is not None
    assert (forward.start_up, step.start_up) == (None, None)


def test_every_run_has_an_order_of_its_own_and_decides_every_token(monkeypatch):
    """An engine that knew a plan by heart would be too fast."""
    plans: list[Plan] = []

    class Watched(Engine):
        def sample(self, tokens, plan, keys, **more):
            assert (tokens.shape, tokens.sum()) == ((2, 16), 0)
            super().sample(tokens, plan, keys, **more)
            plans.append(plan)

    monkeypatch.setattr(run, "Engine", Watched)
    measured(SAMPLED[0])
    assert len(plans) == 6
    assert all(not a.order.equal(b.order) for i, a in enumerate(plans) for b in plans[:i])
    assert all(plan.ends[:, -1].tolist() == [16, 16] for plan in plans)


def test_the_engine_is_told_what_the_case_says_and_closed(monkeypatch):
    said: list[object] = []

    class Watched(Engine):
        def __init__(self, network, *, precision):
            said.append((precision, network.training))
            super().__init__(network, precision=precision)

        def sample(self, tokens, plan, keys, *, refresh):
            said.append(refresh)
            super().sample(tokens, plan, keys, refresh=refresh)

        def close(self):
            said.append("closed")
            super().close()

    monkeypatch.setattr(run, "Engine", Watched)
    measured(SampleCase(**SMALL | {"precision": "bf16"}, steps=4, refresh=2), repeat=1)
    assert said == [(torch.bfloat16, False), *[2] * 4, "closed"]


def test_pictures_are_drawn_with_labels_of_their_own_and_guidance(monkeypatch):
    seen: list[tuple] = []

    class Watched(Engine):
        def sample(self, tokens, plan, keys, *, labels, guidance, never, warmup):
            assert tokens[:, 0].tolist() == [51, 51]
            super().sample(tokens, plan, keys, labels=labels, guidance=guidance, never=never, warmup=warmup)
            assert (tokens[:, 1:] < 50).all()
            seen.append((labels.tolist(), guidance.weight, never, warmup))

    monkeypatch.setattr(run, "Engine", Watched)
    measured(DrawCase(**SMALL, steps=4, classes=3, guidance=1.5), repeat=1)
    assert seen == [([i % 3, (i + 1) % 3], 1.5, (50, 51), 1) for i in range(4)]


def test_steps_of_training_are_real(monkeypatch):
    """Weights move in optimiser steps and nowhere else; every task has noise of its own."""
    weights, tasks = [], []
    honest = run.loss

    def watched(network, task, *, low):
        weights.append(network.head.linear.weight.detach().clone())
        tasks.append(task)
        return honest(network, task, low=low)

    monkeypatch.setattr(run, "loss", watched)
    measured(TrainCase(**SMALL), repeat=1)
    moved = [not a.equal(b) for a, b in pairwise(weights)]
    assert moved == [False] * (1 + 3 + 3 - 1) + [False, True, True]
    assert len({tuple(task.problems.offsets.lengths.tolist()) for task in tasks}) > 1


def test_a_loss_is_the_training_loss_per_token():
    case = TrainCase(**SMALL)
    network, task = case.network(CPU).eval(), run._task(case, 0)
    with torch.no_grad():
        cost = torch.nn.functional.cross_entropy(network(task.problems), task.answers, reduction="none")
        ours = run.loss(network, task, low=False)
    torch.testing.assert_close(ours, (cost * task.weights).sum() / 32)


def test_medians_and_shares():
    found = result()
    assert found.seconds == 2
    assert found.tokens_per_second == 16
    assert found.sequences_per_second == 1
    assert found.achieved == 2.5e8
    assert (found.limit, found.bound, found.of_limit) == (0.5, "arithmetic", 0.25)
    bytes_count = result(traffic=1.5e8)
    assert (bytes_count.limit, bytes_count.bound, bytes_count.of_limit) == (1.5, "memory", 0.75)
    whole = found.as_dict()
    assert whole["seconds"] == {"median": 2, "min": 1, "max": 4, "all": (2.0, 1.0, 4.0)}
    assert whole["limit_tokens_per_second"] == 64
    assert whole["share_of_ceiling"] == 0.25


def test_what_does_not_fit_into_memory_is_named(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run, "Engine", full)
    with pytest.raises(ValueError, match="PGM 1/1 x32 with length 16 and batch 2 does not fit into the memory"):
        measured(SAMPLED[0])


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr(machine, "SIDE", {"cpu": 128})
    monkeypatch.setattr(machine, "COPIED", {"cpu": 2**22})
    found = machine.measure(CPU, "fp32", repeat=3)
    assert 1e8 < found.product < 1e14
    assert 1e8 < found.copy < 1e13
    assert found.name


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device(None) == find_device("cpu") == find_device("cpu:0") == CPU
    with pytest.raises(ValueError, match="device 'cuda': torch sees no GPU here"):
        find_device("cuda")
    with pytest.raises(ValueError, match="unknown device 'tpu': expected one of cpu, cuda"):
        find_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device(None).type == "cuda"


@pytest.mark.gpu
def test_sampling_and_training_are_measured_on_a_gpu():
    device = torch.device("cuda")
    here = machine.measure(device, "bf16", repeat=3)
    assert here.product > 1e13
    sizes = SMALL | {"width": 128, "precision": "bf16"}
    cases: list[Case] = [
        SampleCase(**sizes, steps=4),
        SampleCase(**sizes, steps=4, context="ordered"),
        TrainCase(**sizes),
    ]
    cases += [DrawCase(**sizes, steps=4, classes=3, model=model) for model in ("pgm", "maskgit")]
    for found in run.measure(cases, here, repeat=2, on_run=lambda case: None):
        assert 0 < found.memory < 2**33
