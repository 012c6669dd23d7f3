"""What less precision costs: nothing in float32, little in bfloat16, more in float8, and where that is not measured."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import Tensor

from maskless import cli
from maskless.bench import machine, run
from maskless.bench.case import SampleCase, TrainCase
from maskless.bench.rounding import TARGETS, _problems, as_dict, rounding
from maskless.checkpoint import Model
from maskless.nn.blocks import open_gates
from maskless.nn.partition import PartitionConfig, PartitionTransformer

SIZES = {"vocab": 101, "length": 48, "width": 64, "heads": 2}
CPU = torch.device("cpu")


def text(rows: int = 12) -> Tensor:
    return torch.randint(100, (rows, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["position", "ordered", "masked"])
def test_less_precision_costs_more(tiny, kind):
    full, half, low = rounding(tiny(kind, scale=0.1, **SIZES), text(), ["fp32", "bf16", "fp8"])
    assert (full.kl, full.error, full.same) == (0, 0, 1)
    assert full.error < half.error < low.error < 0.1 * low.spread
    assert full.kl < half.kl < low.kl < 1e-2
    assert abs(low.nats - full.nats) < 0.02
    assert 0.8 < low.same <= 1
    assert 0.95 < half.same <= 1


def test_the_cost_in_float32_is_that_of_the_network(tiny):
    network, tokens = tiny("position", scale=0.1, **SIZES), text()
    costs = []
    for problems, truth, _ in _problems(tokens, None, 5, seed=0):
        with torch.no_grad():
            costs.append(torch.nn.functional.cross_entropy(network(problems), truth, reduction="none"))
    (found,) = rounding(network, tokens, ["fp32"], batch=5)
    assert found.nats == pytest.approx(torch.cat(costs).mean().item(), rel=1e-5)


def test_padding_is_neither_known_nor_asked_for():
    tokens = text(6)
    tokens[1, 30:] = tokens[2, 2:] = tokens[3, 1:] = 100  # of the last of these nothing can be asked
    rows = 0
    for problems, truth, n in _problems(tokens, 100, 4, seed=0):
        assert 100 not in problems.tokens
        assert 100 not in truth
        assert (problems.offsets.lengths > 0).all()
        assert int(problems.target_offsets.lengths.min()) >= 1
        assert int(problems.target_offsets.lengths.max()) <= TARGETS
        rows += n
    assert rows == 5


def test_mistakes_are_said(tiny):
    with pytest.raises(ValueError, match="unknown precision 'int8': expected one of bf16, fp32, fp8"):
        rounding(tiny("position", **SIZES), text(), ["int8"])
    with pytest.raises(ValueError, match="expected pgm or mdlm, not ar"):
        rounding(tiny("causal", **SIZES), text(), ["fp8"])
    with pytest.raises(ValueError, match="expected sequences of 2 tokens or more"):
        rounding(tiny("position", **SIZES), torch.full((3, 48), 7), ["fp8"], pad=7)
    with pytest.raises(ValueError, match="precision 'fp8' is one of sampling: expected bf16 or fp32"):
        TrainCase(precision="fp8")
    with pytest.raises(ValueError, match="precision 'fp8' on a CPU: expected bf16 or fp32"):
        run.check([SampleCase(precision="fp8")], CPU, 1)


def test_the_ceiling_of_float8_is_that_of_its_products(monkeypatch):
    monkeypatch.setattr(machine, "SIDE", {"cpu": 64})
    monkeypatch.setattr(machine, "COPIED", {"cpu": 2**20})
    found = machine.measure(CPU, "fp8", repeat=1)
    assert found.precision == "fp8"
    assert found.product > 0


def test_the_command_compares_a_model_on_a_text(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    sizes = {"vocab": 300, "length": 32, "width": 32, "heads": 1, "encoder": 1, "decoder": 1}
    network = PartitionTransformer(PartitionConfig(**sizes))
    open_gates(network)
    Model(network, layout="packed").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question; " * 60)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def say(*more: str) -> str:
        words = ["bench", "rounding", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt")]
        monkeypatch.setattr(sys, "argv", ["maskless", *words, "--tokenizer", "bytes", "--sequences", "6", *more])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    found = json.loads(say("--json"))
    assert list(found) == ["bf16", "fp8"]
    assert found["fp8"].keys() == found["bf16"].keys() == {"nats", "kl", "error", "spread", "same"}
    assert found["bf16"]["error"] < found["fp8"]["error"]
    shown = say("--precision", "fp8")
    assert "fp8" in shown
    assert "bf16" not in shown
    assert as_dict([]) == {}
