"""Cases say what is measured, and refuse what cannot be; named tables hold the paper's numbers."""

import re
from dataclasses import replace

import pytest
import torch

from maskless.bench.case import Case, DrawCase, SampleCase, TrainCase, sweep
from maskless.bench.tables import (
    FIGURES,
    PAPER,
    RELEASED,
    TABLES,
    better,
    case_of,
    figure,
    only,
    speed,
    table,
)
from maskless.paper import BACKWARD, FORWARD, IMAGES, MEMORY, SAMPLE, SECONDS, SEQUENCES, TOKENS

PGM_8_8, PGM_6_6_1024 = SampleCase(), SampleCase(layers=12, width=1024)
MDLM = SampleCase(model="mdlm", layers=12, counts="mdlm")
PGM_12_12, MASKGIT = DrawCase(), DrawCase(model="maskgit")
SMALL = {"width": 32, "layers": 4, "length": 16, "vocab": 50, "batch": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "says"),
    [
        (SampleCase, {"model": "gpt"}, "unknown model 'gpt': expected one of pgm, mdlm, ar"),
        (SampleCase, {"model": "mdlm-complementary"}, "expected one of pgm, mdlm, ar"),
        (TrainCase, {"model": "gpt"}, "expected one of pgm, mdlm, mdlm-complementary, ar"),
        (TrainCase, {"precision": "int8"}, "unknown precision 'int8': expected one of bf16, fp32"),
        (SampleCase, {"counts": "odd"}, "unknown counts 'odd': expected one of uniform, mdlm"),
        (SampleCase, {"steps": 17}, "steps 17 is out of range: expected 1 to 16, the length"),
        (SampleCase, {"model": "ar", "steps": 4}, "steps 4 of ar: expected 16"),
        (SampleCase, {"refresh": 0}, "refresh 0 is out of range"),
        (SampleCase, {"refresh": 2, "context": "ordered"}, "refresh 2 belongs to pgm with full context"),
        (SampleCase, {"refresh": 2, "model": "mdlm"}, "refresh 2 belongs to pgm with full context"),
        (DrawCase, {"model": "mdlm"}, "unknown model 'mdlm': expected one of pgm, maskgit"),
        (DrawCase, {"length": 15}, "length 15 is no square"),
        (DrawCase, {"model": "maskgit", "encoder": 2}, "context and encoder belong to pgm: the model is maskgit"),
        (TrainCase, {"encoder": 0}, "encoder 0 of 4 layers: expected 1 to 3"),
        (TrainCase, {"encoder": 2, "model": "mdlm"}, "context and encoder belong to pgm: the model is mdlm"),
        (TrainCase, {"batch": 0}, "batch 0 is out of range: expected 1 or more"),
        (TrainCase, {"length": 0}, "length 0 is out of range: expected 1 or more"),
    ],
)
def test_a_case_that_cannot_be_measured(kind, sizes, says):
    steps = {} if kind is TrainCase else {"steps": 8}
    with pytest.raises(ValueError, match=re.escape(says)):
        kind(**SMALL | steps | sizes)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (replace(PGM_8_8, context="ordered"), "PGM 8/8 x768 ordered"),
        (replace(PGM_8_8, counts="mdlm"), "PGM 8/8 x768, mdlm counts"),
        (replace(PGM_8_8, refresh=4), "PGM 8/8 x768, refreshed every 4"),
        (SampleCase(encoder=10, width=1024), "PGM 10/6 x1024"),
        (TrainCase(model="mdlm-complementary", layers=12), "MDLM 12 x768 complementary"),
        (replace(PGM_12_12, context="ordered"), "PGM 12/12 x1024 ordered"),
        (MASKGIT, "MaskGIT 24 x1024"),
    ],
)
def test_names(case, name):
    assert case.name == name


def test_nothing_in_a_network_is_trivially_zero():
    network = TrainCase(**SMALL).network(torch.device("cpu"))
    assert network.head.linear.weight.abs().sum() > 0
    again = TrainCase(**SMALL).network(torch.device("cpu"))
    assert all(a.equal(b) for a, b in zip(network.parameters(), again.parameters(), strict=True))


def settings(cases: list[Case]) -> list[tuple[str, int, int, int]]:
    return [(case.model, case.steps, case.length, case.batch) for case in cases]


def test_a_sweep_is_every_combination_and_a_causal_rival_comes_once():
    sizes = {**SMALL, "context": "ordered", "encoder": 1}
    cases = sweep(SampleCase, sizes, against=["mdlm", "ar"], lengths=[16, 32], batches=[1, 2], steps=[4, 8])
    grid = [(length, batch, steps) for length in (16, 32) for batch in (1, 2) for steps in (4, 8)]
    assert settings(cases) == [
        *(("pgm", k, n, b) for n, b, k in grid),
        *(("mdlm", k, n, b) for n, b, k in grid),
        *(("ar", n, n, b) for n in (16, 32) for b in (1, 2)),
    ]
    assert {(case.layers, case.width, case.vocab) for case in cases} == {(4, 32, 50)}
    assert {(case.context, case.encoder) for case in cases} == {("ordered", 1), ("full", None)}
    alone = sweep(SampleCase, SMALL | {"model": "ar"}, against=[], lengths=[16], batches=[2], steps=None)
    assert settings(alone) == [("ar", 16, 16, 2)]
    trained = sweep(TrainCase, SMALL, against=["mdlm-complementary"], lengths=[16], batches=[1, 2], steps=None)
    expected = [(model, batch) for model in ("pgm", "mdlm-complementary") for batch in (1, 2)]
    assert [(case.model, case.batch) for case in trained] == expected


# What others reached


def test_the_paper_says_how_many_times_faster_pgm_is():
    """5 to 5.5 times MDLM at K=128 with uniform counts; training at 75 % of MDLM's speed.  PGM, Sec. 5.1 and Tab. 3"""

    def at(case: Case) -> float:
        return speed(PAPER, case, SAMPLE).value

    for steps in (32, 64, 128, 256, 512, 1024):
        mdlm = at(replace(MDLM, steps=steps))
        for case in (PGM_8_8, PGM_6_6_1024):
            assert 5 < at(replace(case, steps=steps)) / mdlm < 5.5
            assert 3.7 < at(replace(case, steps=steps, counts="mdlm")) / mdlm < 4.6
    for steps in (64, 256, 1024, 4096):
        assert 4 < at(replace(PGM_8_8, steps=steps, length=4096)) / at(replace(MDLM, steps=steps, length=4096)) < 6
    assert at(PGM_12_12) / at(MASKGIT) == pytest.approx(7.5, abs=0.1)
    assert len([part for by, _, part, _ in FIGURES if by == PAPER and part in (FORWARD, BACKWARD)]) == 10


def test_throughput_falls_as_steps_rise():
    for by, lines in ((PAPER, 8), (RELEASED, 2)):
        series: dict[Case, dict[int, float]] = {}
        for (who, case, _, measure), one in FIGURES.items():
            if (who, measure) == (by, TOKENS):
                series.setdefault(replace(case, steps=1), {})[case.steps] = one.value
        assert len(series) == lines
        for points in series.values():
            values = [points[steps] for steps in sorted(points)]
            assert values == sorted(values, reverse=True)


def test_figures_are_found_whatever_the_precision_and_for_mdlm_whatever_the_counts():
    case = replace(PGM_8_8, precision="fp32")
    assert figure(RELEASED, case, SAMPLE, TOKENS).value == 9_735
    assert figure(RELEASED, replace(case, counts="mdlm"), SAMPLE, TOKENS) is None
    assert figure(RELEASED, replace(MDLM, counts="uniform"), SAMPLE, TOKENS) is not None
    assert figure(RELEASED, replace(case, width=512), SAMPLE, TOKENS) is None
    slow = replace(MASKGIT, precision="fp32")  # ours stands beside bf16; the paper's own is kept
    found = figure(RELEASED, slow, SAMPLE, IMAGES)
    assert (found.value, found.tokens_per_second) == (4.06, 4.06 * 1024)
    assert FIGURES[RELEASED, slow, SAMPLE, IMAGES].value == 0.84
    alone = speed(RELEASED, replace(PGM_8_8, batch=1), SAMPLE)
    assert (alone.measure, alone.tokens_per_second) == (SECONDS, pytest.approx(1024 / 3.09))
    assert speed(RELEASED, TrainCase(layers=12), BACKWARD).tokens_per_second == 204 * 1024


def test_better_is_more_tokens_and_less_memory():
    assert better(TOKENS, 30, 10) == 3
    assert better(SEQUENCES, 10, 30) == pytest.approx(1 / 3)
    assert better(MEMORY, 10, 30) == better(SECONDS, 10, 30) == 3


# Named tables


def cases(name: str) -> list[Case]:
    return [case_of(line.work, line.at) for line in TABLES[name].lines]


def test_tables_hold_the_rows_of_the_paper():
    sampling, long, training = (cases(f"paper-{name}") for name in ("sampling", "context-4096", "training"))
    assert {case.steps for case in sampling} == {32, 64, 128, 256, 512, 1024}
    assert {(case.name, case.length) for case in long} == {
        (name, 4096) for name in ("MDLM 12 x768", "PGM 8/8 x768", "PGM 6/6 x1024")
    }
    assert (len(sampling), len(long), len(training)) == (5 * 6, 3 * 4, 5 * 2)


def released(name: str) -> list[float | None]:
    """What the released code reached in the lines of a table."""
    found = [figure(RELEASED, case_of(one.work, one.at), BACKWARD if one.work.trains else SAMPLE, one.measure)
             for one in TABLES[name].lines]  # fmt: skip
    return [one and one.value for one in found]


def test_targets_are_beyond_what_was_released_and_the_aim_beyond_the_least():
    for line, reached in zip(TABLES["targets"].lines, released("targets"), strict=True):
        assert better(line.measure, line.aim, line.at_least) > 1
        assert reached is None or better(line.measure, line.at_least, reached) > 1.5


def test_a_table_gives_what_samples_or_what_trains():
    targets = TABLES["targets"]
    assert len(table("targets", SampleCase).lines) + len(table("targets", TrainCase).lines) == len(targets.lines)
    with pytest.raises(ValueError, match=r"unknown table 'foo': expected one of paper-sampling, .*targets"):
        table("foo", SampleCase)
    with pytest.raises(ValueError, match="'paper-training' has nothing to sample: expected one of paper-sampling"):
        table("paper-training", SampleCase)
    with pytest.raises(ValueError, match="'paper-sampling' has nothing to train: expected one of paper-training"):
        table("paper-sampling", TrainCase)


def test_rows_are_selected_by_their_steps():
    chosen = only(TABLES["paper-sampling"], SampleCase, [32, 128])
    assert {line.at for line in chosen.lines} == {32, 128}
    with pytest.raises(ValueError, match="steps 7 are not in the table 'targets': it has 32, 128"):
        table("targets", SampleCase, [7])
