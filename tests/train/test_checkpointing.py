"""Activation checkpointing changes what is kept for the backward pass, and no gradient."""

import copy
from functools import partialmethod

import pytest
import torch
from run_folders import complete, weights
from torch import Tensor, nn

from maskless.bench.case import Case, DrawCase, TrainCase
from maskless.checkpoint import NETWORKS
from maskless.nn.blocks import open_gates
from maskless.objective import OBJECTIVES, Task, noise
from maskless.train.config import TrainConfig
from maskless.train.loop import _cost, checkpoint_layers, compile_layers
from maskless.train.tasks import objective_of

SIZES = {"layers": 8, "width": 32, "vocab": 50, "batch": 4}
TEXTS = [{"objective": "chain"}, {}, {"model": "mdlm"}, {"model": "ar"}]
CASES: dict[str, Case] = {str(kind): TrainCase(**SIZES, length=32, **kind) for kind in TEXTS}
CASES |= {model: DrawCase(model=model, **SIZES, length=16, steps=4, classes=3) for model in ("pgm", "maskgit")}


def task_of(case: Case) -> Task:
    n, L = case.batch, case.config.length
    tokens = torch.randint(0, case.vocab, (n, L), generator=torch.Generator().manual_seed(0))
    counted = torch.ones(n, L, dtype=torch.bool)
    if isinstance(case, TrainCase):
        return objective_of(case.settings)(tokens, *noise(n, L, seed=0, step=0), counted)
    counted[:, 0] = False
    build = OBJECTIVES[TrainConfig(model=case.model, weights="arccos").task]
    return build(tokens, *noise(n, L, seed=0, step=0), counted).labelled(torch.arange(n) % 3)


def network_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    network = NETWORKS[case.kind][1](case.config)  # with dropout
    open_gates(network)
    return network.train()


def gradients(network: nn.Module, task: Task) -> tuple[dict[str, Tensor], int]:
    """And the bytes that are kept for the backward pass, without the weights."""
    own, kept = {p.untyped_storage().data_ptr() for p in network.parameters()}, {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = _cost(network, task)
    loss.backward()
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return found, sum(size for pointer, size in kept.items() if pointer not in own)


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in CASES), (str({"model": "mdlm"}), True)])
def test_gradients_are_the_same_and_less_is_kept(name, compiled, monkeypatch):
    """Also with dropout, whose draws are those of the first time; compiled, layers are one graph as before."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    monkeypatch.setattr("maskless.train.loop.Head", type(None))  # read in chunks, and no layer
    case, found = CASES[name], []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        network, before = network_of(case), graphs()
        if checkpointed:
            checkpoint_layers(network)
        if compiled:
            compile_layers(network, TrainConfig(compile=True), torch.device("cpu"))
        found.append((*gradients(network, task_of(case)), graphs() - before))
    (plain, much, made), (ours, less, made_again) = found
    assert [*ours] == [*plain]
    assert all(ours[name].equal(gradient) for name, gradient in plain.items())
    assert less < much / 3
    assert made == made_again
    assert (made > 0) == compiled


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_copy_of_a_checkpointed_network_computes_with_its_own_weights():
    case = next(iter(CASES.values()))
    network, other = network_of(case).eval(), network_of(case).eval()
    checkpoint_layers(network)
    copied = copy.deepcopy(network)
    for model in (copied, other):
        for parameter in model.parameters():
            parameter.data += 0.1
    problems = task_of(case).problems
    assert copied(problems).equal(other(problems))
    assert not network(problems).equal(other(problems))


def test_a_run_has_the_same_weights_with_it(configure, tmp_path):
    kind = {"model": "mdlm", "dropout": 0.2}
    plain = complete(tmp_path / "plain", configure(**kind))
    ours = complete(tmp_path / "ours", configure(**kind, activation_checkpointing=True))
    assert weights(ours) == weights(plain)


@pytest.mark.gpu
def test_on_a_gpu_too(configure, tmp_path):
    """To rounding: compiled, what is computed again may be fused in another way."""
    from maskless.train.report import read_metrics

    kind = {"model": "pgm", "objective": "chain", "orders": "random=1,strands=2,gaps=1", "context": "ordered"}
    found = []
    for on in (False, True):
        folder = complete(tmp_path / str(on), configure(**kind, dropout=0.1, activation_checkpointing=on))
        found.append([line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line])
    assert found[1] == pytest.approx(found[0], rel=2e-2)
