"""What may be drawn: temperature, top-k, nucleus, ids that are never drawn, and warm first steps."""

import math

import pytest
import torch
from torch import Tensor

from maskless import logits as lg
from maskless.draw import Guidance, Truncation
from sampling_runs import B, L, V, certain, run, state


def test_filters_see_the_row_and_the_position_of_every_logit():
    def only(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return certain((10 * rows + positions) % 7, 7)

    unknown = torch.zeros(B, L, dtype=torch.bool)
    done, *_ = run(lambda p: torch.zeros(len(p.targets), 7), unknown.long(), unknown, steps=2, filter=only)
    assert torch.equal(done, (10 * torch.arange(B)[:, None] + torch.arange(L)) % 7)


def allowed(logits: Tensor, **truncation) -> list[set[int]]:
    rows = torch.zeros(len(logits), dtype=torch.long)
    return [set(x.isfinite().nonzero()[:, 0].tolist()) for x in Truncation(**truncation)(logits, rows, rows)]


def test_truncation_is_temperature_then_top_k_then_nucleus():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert allowed(logits) == [{0, 1, 2, 3}]
    assert allowed(logits, top_k=3) == [{0, 1, 2}]
    assert allowed(logits, top_p=0.65) == [{0, 1}]
    assert allowed(logits, top_p=0.75, top_k=3) == [{0, 1}]  # 4/9 + 3/9 of the three that are left
    assert allowed(logits, top_p=0.65, temperature=4.0) == [{0, 1, 2}]
    assert allowed(logits, top_p=0.65, temperature=0.5) == [{0, 1}]
    assert allowed(logits, top_p=0.5, temperature=0.5) == [{0}]
    assert allowed(logits, temperature=0) == [{0}]


def test_the_default_truncation_leaves_the_distribution_as_it_is():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(5, dtype=torch.long)
    assert torch.equal(Truncation()(logits, rows, rows), logits)
    assert torch.equal(Truncation(top_p=1.0, top_k=9)(logits, rows, rows), logits)


@pytest.mark.parametrize("temperature", [1e-20, 1e-40])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = torch.tensor([[-torch.inf, 3.0, 30.0, 29.0]])
    filtered = Truncation(temperature=temperature)(logits, torch.zeros(1), torch.zeros(1))
    assert lg.draw(filtered, torch.tensor([0.999]).double()).tolist() == [2]


@pytest.mark.parametrize("confident", [False, True])
def test_ids_that_are_never_drawn_are_not_drawn(tiny, confident):
    network, unknown = tiny("position", scale=0.2), torch.zeros(50, L, dtype=torch.bool)
    done, *_ = run(network, unknown.long(), unknown, steps=3, confident=confident)
    assert len(done.unique()) == V + 1
    done, *_ = run(network, unknown.long(), unknown, steps=3, never=(0, 4, V), confident=confident)
    assert set(done.unique().tolist()) == set(range(V)) - {0, 4}


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize(("warmup", "expected"), [(0, [8, 8, 8]), (1, [4, 8, 8]), (2, [4, 4, 8])])
def test_warm_up_halves_the_sharpness_in_the_first_steps(warmup, expected, confident):
    seen = []

    def watching(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        seen.append(logits.unique().tolist())
        return logits

    unknown, how = torch.zeros(1, 3, dtype=torch.bool), {"filter": watching, "confident": confident}
    run(lambda p: torch.full((len(p.targets), 3), 8.0), unknown.long(), unknown, steps=3, warmup=warmup, **how)
    assert seen == [[float(x)] for x in expected]


def sampled(**how) -> None:
    tokens, known = state()
    run(lambda problems: certain(problems.targets, V), tokens, known, **how)


def guided(weight: float, dropped: int | None = 9) -> Guidance:
    return Guidance(weight=weight, dropped=dropped)


@pytest.mark.parametrize(
    ("call", "how", "message"),
    [
        (Truncation, {"temperature": -0.1}, "temperature -0.1 is out of range"),
        (Truncation, {"temperature": math.nan}, "temperature nan is out of range"),
        (Truncation, {"temperature": math.inf}, "temperature inf is out of range"),
        (Truncation, {"top_k": 0}, "top_k 0 is out of range"),
        (Truncation, {"top_p": 0.0}, "top_p 0.0 is out of range"),
        (Truncation, {"top_p": 1.1}, "top_p 1.1 is out of range"),
        (guided, {"weight": -0.5}, "guidance -0.5 is out of range: expected 0 .none. or more"),
        (guided, {"weight": math.nan}, "guidance nan is out of range"),
        (guided, {"weight": math.inf}, "guidance inf is out of range"),
        (guided, {"weight": 2.0, "dropped": None}, "guidance 2.0 needs a network with class labels: this one knows no"),
        (sampled, {"confident": True, "noise": -1.0}, "noise -1.0 is out of range: expected 0 .none. or more"),
        (sampled, {"confident": True, "noise": math.nan}, "noise nan is out of range"),
        (sampled, {"confident": True, "noise": math.inf}, "noise inf is out of range"),
        (sampled, {"confident": True, "warmup": -1}, "warmup -1 is out of range: expected 0 .none. or more steps"),
        (sampled, {"never": (3, -1)}, "expected 0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(call, how, message):
    with pytest.raises(ValueError, match=message):
        call(**how)
