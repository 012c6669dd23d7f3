"""Layers are compiled once, a step never waits for the GPU, and captured steps train as computed ones."""

import warnings
from collections.abc import Iterator
from functools import partial, partialmethod

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from maskless.checkpoint import NETWORKS
from maskless.ema import EMA
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.train import captured, loop
from maskless.train.config import MODELS, TEXT_MODELS
from maskless.train.distill import Stride, Teacher, teaching
from maskless.train.distill_loss import LOSSES
from maskless.train.loop import Progress, compile_layers, take_steps, train

CPU = torch.device("cpu")


def steps_with(network: nn.Module, data, config) -> Iterator[Progress]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.0, weight_decay=0.0, fused=True)
    yield from train(network, optimizer, data.split("train"), config.train, Accelerator())


@pytest.fixture
def compiler(monkeypatch) -> None:
    """torch.compile without the slow part: the code is traced and guarded, then runs as it is."""
    torch._dynamo.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


CHAIN = {"model": "pgm", "objective": "chain", "orders": "random=1,strands=2,gaps=1", "context": "ordered"}


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("kind", "accumulate"), [({"model": m}, 1) for m in TEXT_MODELS] + [(CHAIN, 1), ({"model": "mdlm"}, 2)], ids=str
)
def test_nothing_is_compiled_after_the_first_two_steps(data, configure, kind, accumulate):
    """Every step has groups, or a number of targets, of its own."""
    config = configure(**kind, steps=6, compile=True, accumulate=accumulate)
    make_config, make = NETWORKS[MODELS[config.train.model][0]]
    network = make(make_config(**config.network))
    compile_layers(network, config.train, CPU)
    before, counts = graphs(), []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="layers were compiled again")
        for _ in steps_with(network, data, config):
            counts.append(graphs() - before)
    assert counts[1] > 0
    assert counts[1:] == [counts[1]] * 5


class Growing(PartitionTransformer):
    """A network that sees a new shape in every step."""

    def __init__(self, config: PartitionConfig):
        super().__init__(config)
        self.seen, self.look = 0, torch.compile(torch.sin, backend="eager", dynamic=False)

    def forward(self, *arguments):
        self.seen += 1
        self.look(torch.zeros(self.seen + 1))
        return super().forward(*arguments)


def test_compiling_again_is_told_once(data, configure):
    config = configure(steps=6, compile=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert len(list(steps_with(Growing(PartitionConfig(**config.network)), data, config))) == 6
    texts = [str(one.message) for one in told]
    [text] = [text for text in texts if "compiled again" in text]
    assert text.startswith("layers were compiled again after the first steps, which costs time")


def graphs_of_a_student(data, config, device: torch.device) -> list[int]:
    """How many there are after each step of a student of one group, whose contexts have another size in each step."""
    teacher, student = (PartitionTransformer(PartitionConfig(**config.network)).to(device) for _ in range(2))
    torch._dynamo.reset()
    compile_layers(student, config.train, device)
    rows, stride = data.split("train"), Stride(share=0.25, ratio=2)
    work = teaching(Teacher(teacher), LOSSES["tv"], rows, config.train, stride, "one", pinned=device.type == "cuda")
    optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.0, fused=True)
    before = graphs()
    return [graphs() - before for _ in take_steps(student, optimizer, work, config.train, Accelerator())]


@pytest.mark.usefixtures("compiler")
def test_a_student_of_one_group_is_not_compiled_after_the_first_two_steps(data, configure):
    config = configure(steps=6, compile=True, batch=4, seed=0, dropout=0.2)
    counts = graphs_of_a_student(data, config, CPU)
    assert counts[1] > 0
    assert counts[1:] == [counts[1]] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("context", ["full", "ordered"])
def test_on_a_gpu_students_of_one_group_are_not_compiled_again(data, configure, context):
    counts = graphs_of_a_student(data, configure(steps=6, compile=True, context=context), torch.device("cuda"))
    assert counts[2:] == [counts[2]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_step_never_waits_for_the_gpu(data, configure, model):
    config = configure(model, steps=6, compile=False, dropout=0.1)
    make_config, make = NETWORKS[MODELS[model][0]]
    network, averages = make(make_config(**config.network)).cuda(), None
    try:
        for step in steps_with(network, data, config):
            averages = averages or EMA(network.parameters(), 0.9)
            averages.update(network.parameters())
            if step.step == 2:
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "captures"),
    [({"model": "pgm"}, 1), (CHAIN, 1), ({"model": "ar"}, 1), ({"model": "mdlm"}, 0)],  # MDLM's targets vary in number
)
def test_captured_steps_train_as_computed_ones(data, configure, monkeypatch, kind, captures):
    config = configure(**kind, steps=9, compile=True, dropout=0.1)  # compiled or not is the caller's choice: here not
    make_config, make = NETWORKS[MODELS[kind["model"]][0]]
    taken, capture = [], captured.Captured._capture
    monkeypatch.setattr(captured.Captured, "_capture", lambda *given: taken.append(1) or capture(*given))

    def run():
        torch.manual_seed(0)
        network = make(make_config(**config.network)).cuda()
        losses = [step.loss.item() for step in steps_with(network, data, config)]
        return losses, [p.detach().cpu() for p in network.parameters()]

    losses, weights = run()
    assert len(taken) == captures
    monkeypatch.setattr(loop, "RAGGED", (config.train.task,))
    plain_losses, plain_weights = run()
    assert len(taken) == captures
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    for one, other in zip(weights, plain_weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
