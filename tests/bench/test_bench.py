"""The commands: a table, JSON and pictures out of a few options, and one line for every mistake."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from in_process import Ended, one_line
from maskless.bench import machine, plots, report, run
from maskless.bench.case import Case, SampleCase, TrainCase
from maskless.bench.machine import Machine, Timing
from maskless.bench.plots import QualityPoint, swept
from maskless.bench.tables import RELEASED, TABLES, cases_of, only
from maskless.paper import BACKWARD, FORWARD, SAMPLE, STEP

TINY = ["--device", "cpu", "--width", 32, "--layers", 2, "--vocab", 50, "--repeat", 2]
PGM_8_8 = SampleCase()
H200 = Machine(device="cuda", name="H200", torch="2", threads=1, precision="bf16", product=790e12, copy=4.3e12)


@pytest.fixture
def command(command, monkeypatch) -> Callable[..., Ended]:
    """command(*words): how `maskless bench` ends on a machine without a GPU."""
    monkeypatch.setattr(machine, "SIDE", {"cpu": 128})
    monkeypatch.setattr(machine, "COPIED", {"cpu": 2**22})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return partial(command, "bench")


def made_up(case: Case) -> list[Timing]:
    """Results as they might come from an H200."""
    parts = (SAMPLE,) if isinstance(case, SampleCase) else (BACKWARD, FORWARD, STEP)
    flops = 1e9 * case.batch * case.length * getattr(case, "steps", 3)
    same = {"times": (flops / 3e14, flops / 2e14, flops / 1e14), "memory": 12 * 2**30, "machine": H200}
    same |= {"flops": flops, "traffic": flops / 1e3}
    return [Timing(case=case, part=p, start_up=None if p in (FORWARD, STEP) else 2.0, **same) for p in parts]


def shown(grid: Any) -> str:
    console = Console(width=250)
    with console.capture() as captured:
        console.print(grid)
    return captured.get()


def test_sampling_beside_its_rivals(command, tmp_path):
    lists = ["--length", "8,16", "--steps", "2,4", "--batch", 2]
    files = ["--plot", tmp_path / "speed.png", "--out", tmp_path / "speed.json"]
    ended = command("sample", *TINY, *lists, "--against", "mdlm", "--against", "ar", *files)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    for word in ("PGM 1/1 x32", "MDLM 2 x32", "AR 2 x32", "x mdlm", "x ar", "limit", "TFLOP/s", "start-up", "fp32"):
        assert word in ended.out
    whole = json.loads((tmp_path / "speed.json").read_text())
    assert [r["model"] for r in whole["results"]] == ["PGM 1/1 x32"] * 4 + ["MDLM 2 x32"] * 4 + ["AR 2 x32"] * 2
    assert whole["machine"]["device"] == "cpu"
    for each in whole["results"]:
        assert len(each["seconds"]["all"]) == 2
        assert each["seconds"]["min"] <= each["seconds"]["median"] <= each["seconds"]["max"]
        assert each["peak_memory_bytes"] > 0
        assert 0 < each["share_of_limit"]
    with Image.open(tmp_path / "speed.png") as image:
        assert image.format == "PNG"
        assert image.size == (2 * 768, 576)  # against K and against L
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed.json", "speed.png"]


def test_training_as_json_only(command):
    ended = command("train", *TINY, "--length", 16, "--batch", 2, "--against", "mdlm", "--json")
    assert ended.code == 0, ended.err
    assert ended.err == ""
    whole = json.loads(ended.out)
    assert [(r["model"], r["part"]) for r in whole["results"]] == [
        (model, part) for model in ("PGM 1/1 x32", "MDLM 2 x32") for part in (BACKWARD, FORWARD, STEP)
    ]


def test_quality_is_drawn_against_throughput(command, tmp_path):
    entries = [{"model": "pgm", "steps": k, "quality": q, "name": "Gen-PPL"} for k, q in ((4, 30.0), (8, 20.0))]
    (tmp_path / "quality.json").write_text(json.dumps(entries))
    lists = ["--length", 16, "--steps", "4,8", "--batch", 2]
    ended = command("sample", *TINY, *lists, "--plot", tmp_path / "a.png", "--quality", tmp_path / "quality.json")
    assert ended.code == 0, ended.err
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (2 * 768, 576)  # against K, and the quality


def test_a_named_table_runs_its_rows_and_only_those_asked_for(command, monkeypatch, tmp_path):
    asked: list[Case] = []

    def measure(cases, here, *, repeat, on_run):
        for case in cases:
            asked.append(case)
            yield from (replace(r, machine=here) for r in made_up(case))

    monkeypatch.setattr(run, "measure", measure)
    ended = command("sample", "--table", "paper-sampling", "--steps", "32,128", "--out", tmp_path / "a.json")
    assert ended.code == 0, ended.err
    assert {case.steps for case in asked} == {32, 128}
    assert {case.precision for case in asked} == {"fp32"}  # as the machine computes
    assert "21,121" in ended.out  # the paper's PGM 8/8 in 32 steps
    rows = json.loads((tmp_path / "a.json").read_text())["table"]["rows"]
    assert len(rows) == 10
    assert rows[0]["paper"] == 4_077.08
    assert rows[0]["sources"]["paper"].startswith("PGM, Tab. 6")


def test_a_run_that_is_stopped_leaves_what_it_has(command, monkeypatch, tmp_path):
    def measure(cases, here, *, repeat, on_run):
        yield from made_up(cases[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "measure", measure)
    ended = command("sample", "--table", "targets", "--out", tmp_path / "a.json")
    assert ended.code == 130
    whole = json.loads((tmp_path / "a.json").read_text())
    assert len(whole["results"]) == 1
    assert [row["unit"] for row in whole["table"]["rows"]] == ["seconds to start", "tokens/s"]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", [SampleCase, TrainCase])
def test_every_table_can_be_shown(name, kind):
    table = only(TABLES[name], kind)
    if not table.lines:
        return
    results = [r for case in cases_of(table) for r in made_up(case)]
    text = shown(report.grid_of(table, H200, results))
    assert table.about in text
    assert len(report.as_json(H200, results, table)["table"]["rows"]) == len(table.lines)
    assert report.grid(H200, results).row_count == len(results)


def test_targets_say_what_is_reached():
    table = only(TABLES["targets"], SampleCase, [32])
    (case, other) = cases_of(table)
    for share, word in ((1.01, "aim"), (0.99, "at least"), (0.5, "no")):
        seconds = 32 * 1024 / (200_000 * share)
        results = [replace(r, times=(seconds,)) for r in made_up(case)] + made_up(other)
        row = report.as_json(H200, results, table)["table"]["rows"][0]
        assert row["reached"] == word
        assert row["released"] == 31_945
        assert row["released_rival"] == 8_761
        assert row["times_released"] == pytest.approx(200_000 * share / 31_945)


def test_what_others_reached_stands_beside_ours():
    results = [r for steps in (32, 64) for r in made_up(replace(PGM_8_8, steps=steps))]
    assert "31,945" in shown(report.grid(H200, results))
    whole = report.as_json(H200, results)["results"]
    assert [len(each[RELEASED]) for each in whole] == [1, 0]
    assert "H200" in whole[0][RELEASED][0]["source"]


def test_numbers_are_brief():
    said = {0.001234: "0.00123", 1.5: "1.5", 99.94: "99.9", 100.2: "100", 31_945.4: "31,945"}
    assert {x: report.brief(x) for x in said} == said
    assert [report.percent(x) for x in (0.00123, 0.0456, 0.456, 1.2)] == ["0.12%", "4.6%", "46%", "120%"]


def test_an_axis_is_swept_where_a_line_has_two_points():
    one, two = replace(PGM_8_8, steps=32), replace(PGM_8_8, steps=64)
    causal = SampleCase(model="ar", layers=12, steps=1024)
    assert swept([one]) == swept([one, causal]) == []
    assert swept([one, two, causal]) == ["steps"]
    assert swept([one, replace(one, batch=1), replace(two, batch=1)]) == ["steps", "batch"]
    assert swept([causal, replace(causal, length=64, steps=64)]) == ["length"]
    assert swept([TrainCase(length=64), TrainCase(length=128)]) == ["length"]


def test_the_picture_of_every_kind(tmp_path):
    cases = [replace(PGM_8_8, steps=k, length=n, batch=b) for k in (32, 128) for n in (512, 1024) for b in (1, 32)]
    cases += [SampleCase(model="ar", layers=12, length=n, steps=n) for n in (512, 1024)]
    quality = [QualityPoint("PGM 8/8 x768", k, 100 / k, "Gen-PPL") for k in (32, 128)]
    plots.plot([r for case in cases for r in made_up(case)], tmp_path / "all.png", quality)
    trained = [r for b in (8, 32) for r in made_up(TrainCase(batch=b))]
    plots.plot(trained, tmp_path / "trained.png", [])
    sizes = {name: Image.open(tmp_path / f"{name}.png").size for name in ("all", "trained")}
    assert sizes == {"all": (4 * 768, 576), "trained": (768, 576)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sample", "--against", "foo"], "unknown rival 'foo': expected one of mdlm, ar"),
        (["sample", "--steps", "4,x"], "--steps '4,x': expected a whole number, or several: 32,128"),
        (["sample", "--device", "cuda"], "device 'cuda' cannot be used: expected cpu"),
        (["sample", "--table", "targets", "--width", "64"], "--width goes without --table"),
        (["sample", "--table", "targets", "--batch", "1"], "--batch goes without --table"),
        (["sample", "--table", "targets", "--against", "mdlm"], "--against goes without --table"),
        (["train", "--table", "paper-sampling"], "has nothing to train: expected one of paper-training, targets"),
        (["sample", "--plot", "{tmp}/a.png"], "nothing to plot: expected a list"),
        (["sample", "--plot", "{tmp}/no/a.png", "--steps", "4,8"], "no is not a folder"),
        (["sample", "--quality", "{tmp}/q.json"], "--quality goes with --plot"),
        (["sample", "--plot", "{tmp}/a.png", "--quality", "{tmp}/q.json"], "No such file"),
        (["sample", "--plot", "{tmp}/a.png", "--quality", "{tmp}/bad.json"], "expected a list of"),
        (["sample", "--plot", "{tmp}/a.png", "--quality", "{tmp}/deep.json"], "expected a list of"),
        (["sample", "--plot", "{tmp}/a.png", "--quality", "{tmp}/other.json"], "'pgm' at 7 steps: that is not measur"),
        (["sample", "--plot", "{tmp}/a.png", "--quality", "{tmp}/word.json"], "quality 'good' of pgm: expected a"),
        (["train", "--precision", "bf16"], "precision 'bf16' on a CPU: expected fp32"),
        (["train", "--repeat", "0"], "repeat 0 is out of range: expected 1 or more"),
        (["train", "--steps", "4"], "No such option: --steps"),
        (["paint"], "unknown command 'paint': expected one of sample, train"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, says, command, tmp_path):
    entry = {"model": "pgm", "steps": 7, "quality": 3.0, "name": "Gen-PPL"}
    (tmp_path / "bad.json").write_text('{"model": "pgm"}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "other.json").write_text(json.dumps([entry]))
    (tmp_path / "word.json").write_text(json.dumps([entry | {"quality": "good"}]))
    before = sorted(Path(tmp_path).iterdir())
    assert says in one_line(command(*(word.format(tmp=tmp_path) for word in arguments)))
    assert sorted(Path(tmp_path).iterdir()) == before


def test_a_quality_that_fits_several_models_must_be_told_apart():
    cases = [PGM_8_8, replace(PGM_8_8, width=1024)]
    with pytest.raises(ValueError, match="fits several models: expected one of PGM 8/8 x768, PGM 8/8 x1024"):
        plots.check(cases, [QualityPoint("pgm", 128, 3.0, "Gen-PPL")])
    plots.check(cases, [QualityPoint("PGM 8/8 x768", 128, 3.0, "Gen-PPL")])


def test_alone_it_shows_its_help(command):
    ended = command()
    assert ended.code == 2
    assert ended.err == ""
    assert "sample" in ended.out
    for name in ("sample", "train"):
        assert f"maskless bench {name} " in command(name, "--help").out
