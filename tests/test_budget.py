"""What a plan says is what was measured on an H200 (docs/results.md), and follows from the sizes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from in_process import exit_code_of, one_line
from maskless.bench.case import TrainCase
from maskless.budget import (
    CLOCK,
    KERNELS,
    PEAK_CPU,
    PROFILED,
    PlannedRun,
    activations_of,
    budget,
    measured,
    planned,
    seconds_of,
    work_of,
)
from maskless.gpus import CPU, GPUS, gpu, recognised, this_cpu
from maskless.recipes import RECIPES

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = (DOCS / "results.md").read_text() + (DOCS / "history.md").read_text()
SCALE = (DOCS / "scale.md").read_text()
H100, H200 = GPUS["h100"], GPUS["h200"]
EPYC = CPU(name="one thread of an EPYC", peak=PEAK_CPU, bandwidth=1, memory=64e9, link=1)
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
    assert case.batch / seconds_of(this, H200, case.batch) == pytest.approx(speed, rel=0.15)
    if memory is not None:
        held = 8 * this.parameters + activations_of(this, H200, case.batch)
        assert held / GIB == pytest.approx(memory, rel=0.15)


def test_what_was_measured_stands_in_the_results():
    found = [str(speed) for _, speed, _ in MEASURED.values()] + [f"{memory} GiB" for _, _, memory in MEASURED.values()]
    assert [figure for figure in found if figure != "None GiB" and figure not in RESULTS] == []
    for kernels in ("| 33.8 |", "2.8, 8.4 |", "| 13.2 |", "2.8; 0.8 |"):
        assert kernels in RESULTS
    assert sum(KERNELS.values()) == pytest.approx(0.0618)


def test_the_profiled_case_has_the_speed_that_it_was_measured_with():
    assert seconds_of(PlannedRun(case=PROFILED, settings=PROFILED.settings), H200, 32) == pytest.approx(CLOCK)
    assert 1 / measured().products == pytest.approx(751e12, rel=0.01)  # what the largest product of that run had
    assert "751 TFLOP/s" in RESULTS


# Runs at once on one card: tokens of each, and of how many seconds.
AT_ONCE = {
    "CIFAR-10": ({"cifar10-pgm": 369_129, "cifar10-pgm-ordered": 369_746, "cifar10-maskgit": 498_530}, 1),
    "64 x 64": ({"pictures64-pgm": 5_497 * 256 * 257, "pictures64-maskgit": 5_451 * 256 * 257}, 750),
    "stories": (dict.fromkeys(("stories", "stories-mdlm", "stories-ar"), 36_000 * 65_536), 22 * 60),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_runs_at_once_took_as_long_as_their_plans_together(name):
    runs, seconds = AT_ONCE[name]
    found = [budget(planned(run), H200) for run in runs]
    took = sum(tokens / one.tokens_per_second for tokens, one in zip(runs.values(), found, strict=True))
    assert took == pytest.approx(seconds, rel=0.15)
    assert f"| {took / seconds:.2f} |" in SCALE


def test_what_ran_at_once_stands_in_the_results():
    for said in ("369,129", "369,746", "498,530", "5,497", "5,451", "12.5 minutes each, both at once", "22 minutes"):
        assert said in RESULTS


# Of the table in docs/scale.md: tokens of a second of one thread's time, in the training loop.
SHAKESPEARE: dict[str, Any] = {"layers": 4, "width": 128, "vocab": 2048, "length": 64, "batch": 32}
STORIES: dict[str, Any] = {"layers": 6, "width": 256, "vocab": 4096, "length": 256, "batch": 16}
CIFAR: dict[str, Any] = {"layers": 12, "width": 384, "vocab": 1024, "length": 256, "batch": 8, "classes": 10}
ON_CPU = {
    "text, chain": (SHAKESPEARE, 10_611),
    "text, PGM": (SHAKESPEARE | {"objective": "partition"}, 9_627),
    "text, MDLM": (SHAKESPEARE | {"model": "mdlm"}, 13_055),
    "text, AR": (SHAKESPEARE | {"model": "ar"}, 11_517),
    "stories, chain": (STORIES, 2_159),
    "stories, PGM": (STORIES | {"objective": "partition"}, 1_847),
    "stories, MDLM": (STORIES | {"model": "mdlm"}, 2_529),
    "stories, AR": (STORIES | {"model": "ar"}, 2_317),
    "text, MDLM, complementary masks": (SHAKESPEARE | {"model": "mdlm-complementary"}, 6_654),
    "width 512, 4/4 layers, chain": (STORIES | {"layers": 8, "width": 512, "vocab": 8192, "batch": 4}, 498),
    "images, PGM": (CIFAR, 552),
    "images, PGM, ordered": (CIFAR | {"context": "ordered"}, 554),
    "images, MaskGIT": (CIFAR | {"model": "maskgit"}, 601),
}


@pytest.mark.parametrize("name", ON_CPU)
def test_on_a_cpu_speed_is_within_15_percent_of_what_was_measured(name):
    sizes, speed = ON_CPU[name]
    found = budget(planned(steps=1, **sizes), EPYC)
    assert found.tokens_per_second == pytest.approx(speed, rel=0.15)
    assert f"| {name} | {found.tokens_per_second:,.0f} | {speed:,} |" in SCALE


def test_a_cpu_is_timed_where_the_plan_is_made(capsys):
    assert this_cpu().peak > 1e9
    slow, fast = (replace(EPYC, peak=peak) for peak in (PEAK_CPU / 4, PEAK_CPU))
    run = planned(steps=1, **SHAKESPEARE)
    assert budget(run, slow).step == pytest.approx(4 * budget(run, fast).step)
    assert exit_code_of("plan", "stories", "--gpu", "cpu") == 0
    first, _, memory, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"PGM 3/3 x256 ordered, 8.4 M parameters, on this CPU with \d+ threads?", first)
    assert "a GPU" not in memory


def test_checkpointed_activations_take_a_third_more_time_and_little_memory():
    run = planned("owt-pgm-8-8")
    plain, again = (seconds_of(run, H200, 8, checkpointing=on) for on in (False, True))
    assert 1.2 < again / plain < 4 / 3
    much, little = (activations_of(run, H200, 8, checkpointing=on) for on in (False, True))
    assert little < much / 4
    found = budget(run, H200, checkpointing=True)
    assert found.checkpointing
    assert found.accumulate < budget(run, H200).accumulate


def test_activations_are_checkpointed_where_nothing_else_fits():
    sizes = {"width": 4096, "layers": 32, "steps": 1, "batch": 64}
    short, long = (budget(planned(length=length, **sizes), H100, 64) for length in (2048, 16_384))
    assert not short.checkpointing
    assert long.checkpointing
    assert long.fits
    assert long.activations < H100.memory < activations_of(planned(length=16_384, **sizes), H100, 1)


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


TABLE = re.findall(r"^\| `(.*?)` \| (.* GiB) \|$", SCALE, re.MULTILINE)


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
        ("stories --gpu b52", "unknown GPU 'b52': expected one of h200, h100, a100, l40s, rtx4090, cpu"),
        ("stories --gpus 3", "batch 256 does not split over 3 GPUs: expected a multiple of 3"),
        ("stories --gpus 0", "gpus 0 is out of range: expected 1 or more"),
        ("--width 512", "how long. expected a recipe, --steps or --tokens"),
        ("--steps 5 --tokens 5", "steps and tokens exclude each other"),
        ("--steps 5 --width 100", "width 100"),
        ("--steps 5 --classes 10 --objective chain", "objective 'chain' is for text: a network with classes draws"),
        ("--steps 5 --classes 10 --length 200", "length 200 is no square"),
        ("stories --gpu cpu --gpus 2", "gpus 2 of a CPU: expected 1"),
        ("--tokens inf", "tokens inf is out of range: expected more than 0"),
        ("--steps 0", "steps 0 is out of range"),
        ("cifar10-pgm --objective chain", "objective 'chain' is for text: cifar10-pgm draws pictures"),
    ],
)
def test_a_mistake_is_one_line(words, said, command):
    assert re.match(said, one_line(command("plan", *words.split())))
