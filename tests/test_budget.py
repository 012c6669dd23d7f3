"""What a plan says is what was measured on an H200 (docs/results.md), and follows from the sizes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from in_process import exit_code_of, one_line
from maskless.bench.case import TrainCase
from maskless.budget import ACTIVATION, CLOCK, KERNELS, PROFILED, PlannedRun, budget, planned, seconds_of, work_of
from maskless.gpus import GPUS, gpu, recognised
from maskless.recipes import RECIPES

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = (DOCS / "results.md").read_text() + (DOCS / "history.md").read_text()
H100, H200 = GPUS["h100"], GPUS["h200"]
GIB = 2**30

# Of docs/results.md, forward and backward pass, batch 32, length 1,024: sequences/s and the peak in GiB.
MEASURED = {
    "PGM 6/6": ({"layers": 12}, 502, 12.9),
    "PGM 8/8": ({"layers": 16}, 410, None),
    "PGM 6/6 x1024": ({"layers": 12, "width": 1024}, 343, 17.2),
    "MDLM": ({"layers": 12, "model": "mdlm"}, 555, 12.4),
    "chain 6/6": ({"layers": 12, "objective": "chain"}, 499, 13.0),
    "chain 8/8": ({"layers": 16, "objective": "chain"}, 400, 16.6),
    "chain 6/6 x1024": ({"layers": 12, "width": 1024, "objective": "chain"}, 344, 17.2),
}


@pytest.mark.parametrize("name", MEASURED)
def test_speed_and_memory_are_within_15_percent_of_what_was_measured(name):
    sizes, speed, memory = MEASURED[name]
    case = TrainCase(**sizes)
    this = PlannedRun(case=case, settings=case.settings)
    assert 1 / seconds_of(work_of(this), H200) == pytest.approx(speed, rel=0.15)
    if memory is not None:
        held = 8 * this.parameters + case.batch * ACTIVATION * work_of(this).elementwise
        assert held / GIB == pytest.approx(memory, rel=0.15)


def test_what_was_measured_stands_in_the_results():
    found = [str(speed) for _, speed, _ in MEASURED.values()] + [f"{memory} GiB" for _, _, memory in MEASURED.values()]
    assert [figure for figure in found if figure != "None GiB" and figure not in RESULTS] == []
    for kernels in ("| 33.8 |", "2.8, 8.4 |", "| 13.2 |", "2.8; 0.8 |"):
        assert kernels in RESULTS
    assert sum(KERNELS.values()) == pytest.approx(0.0618)


def test_the_profiled_case_has_the_speed_that_it_was_measured_with():
    assert 32 * seconds_of(work_of(PlannedRun(case=PROFILED, settings=PROFILED.settings)), H200) == pytest.approx(CLOCK)


def test_a_mixture_of_orders_is_the_work_of_random_ones():
    """All tokens of a chain are predicted from those before them, whatever the order."""
    this = planned(layers=4, width=64, length=64, vocab=100, steps=1)
    other = replace(this, settings=replace(this.settings, orders="random=25,strands=50,gaps=25"))
    assert work_of(this) == work_of(other)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.command == "train"])
def test_every_recipe_has_a_budget(name):
    found = budget(planned(name), H200, 2)
    assert found.fits
    assert found.steps == RECIPES[name].train["steps"]
    assert found.tokens == found.steps * RECIPES[name].train["batch"] * RECIPES[name].length
    assert 0.05 < found.mfu < 0.6


def test_twice_the_gpus_take_half_the_time_where_communication_is_hidden():
    one, two = (budget(planned("owt-pgm-8-8"), H100, n) for n in (8, 16))
    assert one.seconds / two.seconds == pytest.approx(2, rel=0.05)
    assert two.mfu == pytest.approx(one.mfu, rel=0.05)
    assert two.communication < two.step


def test_pieces_and_shards_are_taken_where_memory_needs_them():
    sizes = {"length": 2048, "batch": 512, "tokens": 20e9}
    small, large = (planned(width=width, layers=layers, **sizes) for width, layers in ((512, 8), (4096, 32)))
    assert not budget(small, H100, 64).fsdp
    assert budget(small, H100, 64).accumulate == 1
    found = budget(large, H100, 64)
    assert found.fsdp
    assert found.accumulate > 1
    assert found.fits
    assert not budget(large, H100, 1).fits  # there is nobody to share with


def test_tokens_are_as_good_as_steps():
    sizes = {"width": 64, "layers": 2, "length": 100, "batch": 10}
    assert planned(tokens=25e3, **sizes) == planned(steps=25, **sizes)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_recognised_by_what_its_driver_calls_it(driver, name):
    assert recognised(driver) == (gpu(name) if name else None)


# The command


def test_a_plan_is_six_lines(capsys):
    assert exit_code_of("plan", "owt-pgm-8-8", "--gpus", 8, "--gpu", "h100") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PGM 8/8 x768, 202.7 M parameters, on 8 x H100 SXM"
    assert lines[1] == "  1,000,000 steps of 512 x 1024 tokens, 524.3 B in all"
    assert [line.split()[0] for line in lines[2:]] == ["memory", "speed", "time", "disk"]


def test_a_plan_of_given_sizes_as_json(capsys):
    sizes = "--width 2048 --layers 16 --length 2048 --batch 512 --tokens 20e9"
    assert exit_code_of("plan", *sizes.split(), "--gpus", 8, "--gpu", "h100", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == pytest.approx(1.05e9, rel=0.02)
    assert found["fits"]
    assert found["seconds"] == pytest.approx(found["steps"] * found["step"])


def test_what_does_not_fit_is_said(capsys):
    assert exit_code_of("plan", "--width", 8192, "--layers", 80, "--steps", 1, "--batch", 1) == 0
    assert "DOES NOT FIT: take more GPUs, or shorter sequences" in capsys.readouterr().out


TABLE = re.findall(r"^\| `(.*?)` \| (.*) \|$", (DOCS / "scale.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("words", "cells"), TABLE, ids=[words for words, _ in TABLE])
def test_the_table_in_the_documents_is_what_a_plan_says(words, cells, capsys):
    assert exit_code_of("plan", *words.split()) == 0
    said = capsys.readouterr().out
    for cell in cells.split(" | "):
        assert cell.replace(" %", "%") in said
    assert len(TABLE) > 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("owt-pgm-8-9", r"unknown recipe 'owt-pgm-8-9' \(did you mean owt-pgm-8-8\?\)"),
        ("cifar10-codec", "recipe 'cifar10-codec' is for train-codec"),
        ("stories --gpu b52", "unknown GPU 'b52': expected one of h200, h100, a100, l40s, rtx4090"),
        ("stories --gpus 3", "batch 256 does not split over 3 GPUs: expected a multiple of 3"),
        ("stories --gpus 0", "gpus 0 is out of range: expected 1 or more"),
        ("--width 512", "how long. expected a recipe, --steps or --tokens"),
        ("--steps 5 --tokens 5", "steps and tokens exclude each other"),
        ("--steps 5 --width 100", "width 100"),
        ("--tokens inf", "tokens inf is out of range: expected more than 0"),
        ("--steps 0", "steps 0 is out of range"),
        ("cifar10-pgm --objective chain", "objective 'chain' is for text: cifar10-pgm draws pictures"),
    ],
)
def test_a_mistake_is_one_line(words, said, command):
    assert re.match(said, one_line(command("plan", *words.split())))
