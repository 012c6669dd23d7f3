"""Cases say what is measured, and refuse what cannot be; named tables hold the paper's numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from maskless.bench.case import Case, Drawing, Sampling, Training, sweep
from maskless.bench.figures import (
    FIGURES,
    IMAGES,
    MASKGIT,
    MASKGIT_FP32,
    MDLM,
    MEMORY,
    PAPER,
    PGM_6_6_1024,
    PGM_8_8,
    PGM_12_12,
    RELEASED,
    SECONDS,
    SEQUENCES,
    TOKENS,
    TRAIN_PGM_6_6,
    figure,
    speed,
)
from maskless.bench.result import BACKWARD, FORWARD, SAMPLE
from maskless.bench.tables import TABLES, table
from maskless.nn.masked import MaskedConfig
from maskless.nn.maskgit import MaskGIT
from maskless.nn.partition import PartitionConfig, PartitionTransformer

SMALL = {"width": 32, "layers": 4, "length": 16, "vocab": 50, "batch": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "says"),
    [
        (Sampling, {"model": "gpt"}, "unknown model 'gpt': expected one of pgm, mdlm, ar"),
        (Sampling, {"model": "mdlm-complementary"}, "expected one of pgm, mdlm, ar"),
        (Training, {"model": "gpt"}, "expected one of pgm, mdlm, mdlm-complementary, ar"),
        (Training, {"context": "half"}, "unknown context 'half': expected one of full, ordered"),
        (Training, {"precision": "int8"}, "unknown precision 'int8': expected one of bf16, fp32"),
        (Sampling, {"counts": "odd"}, "unknown counts 'odd': expected one of uniform, mdlm"),
        (Sampling, {"steps": 0}, "steps 0 is out of range: expected 1 to 16, the length"),
        (Sampling, {"steps": 17}, "steps 17 is out of range: expected 1 to 16, the length"),
        (Sampling, {"model": "ar", "steps": 4}, "steps 4 of ar: expected 16"),
        (Sampling, {"refresh": 0}, "refresh 0 is out of range"),
        (Sampling, {"refresh": 2, "context": "ordered"}, "refresh 2 belongs to pgm with full context"),
        (Sampling, {"refresh": 2, "model": "mdlm"}, "refresh 2 belongs to pgm with full context"),
        (Drawing, {"model": "mdlm"}, "unknown model 'mdlm': expected one of pgm, maskgit"),
        (Drawing, {"length": 15}, "length 15 is no square"),
        (Drawing, {"model": "maskgit", "encoder": 2}, "context and encoder belong to pgm: the model is maskgit"),
        (Training, {"encoder": 4}, "encoder 4 of 4 layers: expected 1 to 3"),
        (Training, {"encoder": 0}, "encoder 0 of 4 layers: expected 1 to 3"),
        (Training, {"encoder": 2, "model": "mdlm"}, "context and encoder belong to pgm: the model is mdlm"),
        (Training, {"width": 33}, "width 33 does not split"),
        (Training, {"batch": 0}, "batch 0 is out of range: expected 1 or more"),
        (Training, {"length": 0}, "length 0 is out of range: expected 1 or more"),
    ],
)
def test_a_case_that_cannot_be_measured(kind, sizes, says):
    steps = {} if kind is Training else {"steps": 8}
    with pytest.raises(ValueError, match=re.escape(says)):
        kind(**SMALL | steps | sizes)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (PGM_8_8, "PGM 8/8 x768"),
        (replace(PGM_8_8, context="ordered"), "PGM 8/8 x768 ordered"),
        (replace(PGM_8_8, counts="mdlm"), "PGM 8/8 x768, mdlm counts"),
        (replace(PGM_8_8, refresh=4), "PGM 8/8 x768, refreshed every 4"),
        (Sampling(encoder=10, width=1024), "PGM 10/6 x1024"),
        (MDLM, "MDLM 12 x768"),
        (Training(model="mdlm-complementary", layers=12), "MDLM 12 x768 complementary"),
        (Sampling(model="ar", steps=1024, layers=12), "AR 12 x768"),
        (PGM_12_12, "PGM 12/12 x1024"),
        (replace(PGM_12_12, context="ordered"), "PGM 12/12 x1024 ordered"),
        (MASKGIT, "MaskGIT 24 x1024"),
    ],
)
def test_names(case, name):
    assert case.name == name


def test_networks_are_those_of_the_paper():
    """With heads of width 64, and for MDLM one more id, the mask."""
    assert PGM_8_8.config == PartitionConfig(vocab=50_257, length=1024, encoder=8, decoder=8)
    assert PGM_6_6_1024.config == PartitionConfig(vocab=50_257, length=1024, width=1024, heads=16)
    assert MDLM.config == MaskedConfig(vocab=50_258, mask=50_257, length=1024)


def test_networks_of_pictures_have_the_released_number_of_parameters():
    with torch.device("meta"):
        networks = PartitionTransformer(PGM_12_12.config), MaskGIT(MASKGIT.config)
    assert [sum(p.numel() for p in network.parameters()) for network in networks] == [494_220_290, 480_443_393]


def test_nothing_in_a_network_is_trivially_zero():
    network = Training(**SMALL).network(torch.device("cpu"))
    assert network.head.linear.weight.abs().sum() > 0
    again = Training(**SMALL).network(torch.device("cpu"))
    assert all(a.equal(b) for a, b in zip(network.parameters(), again.parameters(), strict=True))


def settings(cases: list[Case]) -> list[tuple[str, int, int, int]]:
    return [(case.model, case.steps, case.length, case.batch) for case in cases]


def test_a_sweep_is_every_combination_and_a_causal_rival_comes_once():
    sizes = {**SMALL, "context": "ordered", "encoder": 1}
    cases = sweep(Sampling, sizes, against=["mdlm", "ar"], lengths=[16, 32], batches=[1, 2], steps=[4, 8])
    grid = [(length, batch, steps) for length in (16, 32) for batch in (1, 2) for steps in (4, 8)]
    assert settings(cases) == [
        *(("pgm", k, n, b) for n, b, k in grid),
        *(("mdlm", k, n, b) for n, b, k in grid),
        *(("ar", n, n, b) for n in (16, 32) for b in (1, 2)),
    ]
    assert {(case.layers, case.width, case.vocab) for case in cases} == {(4, 32, 50)}
    assert {(case.context, case.encoder) for case in cases} == {("ordered", 1), ("full", None)}


def test_a_sweep_of_training_has_no_steps():
    cases = sweep(Training, SMALL, against=["mdlm-complementary"], lengths=[16], batches=[1, 2], steps=None)
    assert [(case.model, case.batch) for case in cases] == [
        ("pgm", 1),
        ("pgm", 2),
        ("mdlm-complementary", 1),
        ("mdlm-complementary", 2),
    ]


def test_a_causal_network_alone_takes_a_step_for_each_token():
    cases = sweep(Sampling, SMALL | {"model": "ar"}, against=[], lengths=[16], batches=[2], steps=None)
    assert settings(cases) == [("ar", 16, 16, 2)]


@pytest.mark.parametrize(("kind", "rival"), [(Sampling, "foo"), (Sampling, "pgm"), (Training, "foo")])
def test_an_unknown_rival(kind, rival):
    with pytest.raises(ValueError, match=f"unknown rival '{rival}': expected one of mdlm, "):
        sweep(kind, SMALL, against=[rival], lengths=[16], batches=[1], steps=[4])


# What others reached


def test_the_paper_says_how_many_times_faster_pgm_is():
    """5 to 5.5 times MDLM at K=128 with uniform counts; training at 75 % of MDLM's speed.  PGM, Sec. 5.1 and Tab. 3"""

    def at(case: Case, part: str = SAMPLE) -> float:
        found = speed(PAPER, case, part)
        assert found is not None
        return found.value

    for steps in (32, 64, 128, 256, 512, 1024):
        mdlm = at(replace(MDLM, steps=steps))
        for case in (PGM_8_8, PGM_6_6_1024):
            assert 5 < at(replace(case, steps=steps)) / mdlm < 5.5
            assert 3.7 < at(replace(case, steps=steps, counts="mdlm")) / mdlm < 4.6
    trained = [one for one in FIGURES if one.by == PAPER and one.part in (FORWARD, BACKWARD)]
    assert len(trained) == 10
    for steps in (64, 256, 1024, 4096):
        assert 4 < at(replace(PGM_8_8, steps=steps, length=4096)) / at(replace(MDLM, steps=steps, length=4096)) < 6


def test_throughput_falls_as_steps_rise():
    for by in (PAPER, RELEASED):
        series: dict[Case, dict[int, float]] = {}
        for one in FIGURES:
            if one.by == by and one.measure == TOKENS:
                series.setdefault(replace(one.case, steps=1), {})[one.case.steps] = one.value
        assert len(series) == {PAPER: 8, RELEASED: 2}[by]
        for points in series.values():
            values = [points[steps] for steps in sorted(points)]
            assert values == sorted(values, reverse=True)


def test_no_figure_stands_twice():
    assert len({(one.by, one.case, one.part, one.measure) for one in FIGURES}) == len(FIGURES)


def test_figures_are_found_whatever_the_precision_and_for_mdlm_whatever_the_counts():
    case = replace(PGM_8_8, precision="fp32")
    found = figure(RELEASED, case, SAMPLE, TOKENS)
    assert found is not None
    assert found.value == 9_735
    assert figure(RELEASED, replace(case, counts="mdlm"), SAMPLE, TOKENS) is None
    assert figure(RELEASED, replace(MDLM, counts="uniform"), SAMPLE, TOKENS) is not None
    assert figure(RELEASED, replace(case, width=512), SAMPLE, TOKENS) is None


def test_figures_in_tokens_per_second():
    alone = speed(RELEASED, replace(PGM_8_8, batch=1), SAMPLE)
    trained = speed(RELEASED, TRAIN_PGM_6_6, BACKWARD)
    assert alone is not None
    assert alone.measure == SECONDS
    assert alone.tokens_per_second == pytest.approx(1024 / 3.09)
    assert trained is not None
    assert trained.tokens_per_second == 204 * 1024


def test_figures_of_pictures_tell_precisions_apart():
    """Beside ours stands what was reached in bf16; the paper's own comparison, in fp32, is kept as well."""
    found = figure(RELEASED, replace(MASKGIT, precision="fp32"), SAMPLE, IMAGES)
    assert found is not None
    assert found.value == 4.06
    assert found.tokens_per_second == 4.06 * 1024
    (slow,) = (one for one in FIGURES if one.case == MASKGIT_FP32)
    assert slow.value == 0.84
    pgm = figure(PAPER, PGM_12_12, SAMPLE, IMAGES)
    assert pgm is not None
    assert pgm.value / figure(PAPER, MASKGIT, SAMPLE, IMAGES).value == pytest.approx(7.5, abs=0.1)


def test_better_is_more_tokens_and_less_memory():
    assert TOKENS.times_better(30, 10) == 3
    assert SEQUENCES.times_better(10, 30) == pytest.approx(1 / 3)
    assert MEMORY.times_better(10, 30) == SECONDS.times_better(10, 30) == 3


# Named tables


def test_tables_hold_the_rows_of_the_paper():
    sampling, long, training = (TABLES[f"paper-{name}"] for name in ("sampling", "context-4096", "training"))
    assert len(sampling.rows) == 5 * 6
    assert {row.case.steps for row in sampling.rows} == {32, 64, 128, 256, 512, 1024}
    assert {row.case.name for row in long.rows} == {"MDLM 12 x768", "PGM 8/8 x768", "PGM 6/6 x1024"}
    assert {row.case.length for row in long.rows} == {4096}
    assert len(long.rows) == 3 * 4
    assert len(training.rows) == 5 * 2
    for each in (sampling, long, training):
        assert all(row.others(PAPER) is not None for row in each.rows)


def test_targets_are_beyond_what_was_released_and_the_aim_beyond_the_least():
    for row in TABLES["targets"].rows:
        assert row.at_least is not None
        assert row.aim is not None
        assert row.measure.times_better(row.aim, row.at_least) > 1
        released = row.others(RELEASED)
        if released is not None:
            assert row.measure.times_better(row.at_least, released.value) > 1.5


def test_the_table_of_images_has_floors_and_rivals():
    rows = TABLES["images"].rows
    assert {(row.case.model, row.case.context, row.case.batch) for row in rows} == {
        (model, context, batch)
        for model, context in (("pgm", "full"), ("pgm", "ordered"), ("maskgit", "full"))
        for batch in (1, 32)
    }
    assert [row.at_least for row in rows] == [40, 120, None, 0.15, None, None]
    assert [None if row.released_rival is None else row.released_rival.value for row in rows] == [
        *(4.06, 4.06, None),
        *(1.20, 1.20, None),
    ]
    assert [row.others(RELEASED) is not None for row in rows] == [True, False, True, True, False, True]


def test_a_table_gives_what_samples_or_what_trains():
    targets = TABLES["targets"]
    assert len(table("targets", Sampling).rows) + len(table("targets", Training).rows) == len(targets.rows)
    with pytest.raises(ValueError, match=r"unknown table 'foo': expected one of paper-sampling, .*targets"):
        table("foo", Sampling)
    with pytest.raises(ValueError, match="'paper-training' has nothing to sample: expected one of paper-sampling"):
        table("paper-training", Sampling)
    with pytest.raises(ValueError, match="'paper-sampling' has nothing to train: expected one of paper-training"):
        table("paper-sampling", Training)


def test_rows_are_selected_by_their_steps():
    chosen = TABLES["paper-sampling"].only([32, 128])
    assert {row.case.steps for row in chosen.rows} == {32, 128}
    with pytest.raises(ValueError, match="steps 7 are not in the table 'targets': it has 32, 128"):
        TABLES["targets"].only([7])
