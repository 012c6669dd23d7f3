"""A table is made step by step: nothing twice, nothing silently left out, with the values that the commands found."""

import contextlib
import csv
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from command_inputs import INPUTS, photos
from in_process import one_line
from maskless.cli import app
from maskless.paper import DRAWN_BY_HAND, GRADIENT, TABLES, Bound, Curve, Line, Table
from maskless.reproduce import run
from maskless.reproduce.jobs import SCALES, Options, TablePlan
from maskless.reproduce.plan import plan
from maskless.train.report import read_metrics
from toy_text import write


class Commands:
    """Stands in for the command line: keeps what it was told, and answers as `evaluate` and `bench` would."""

    def __init__(self, **fails: str):
        self.told: list[tuple[str, ...]] = []
        self.fails = fails  # by command: why

    def __call__(self, command) -> str:
        self.told.append(tuple(command))
        name = command[command.index("maskless") + 1]
        if name in self.fails:
            raise ValueError(self.fails[name])
        if name == "bench":
            parts = ("forward", "forward + backward", "optimiser step")
            return json.dumps({"results": [{"part": p, "case": {}, "sequences_per_second": 100.0} for p in parts]})
        number = 20.0 + len(self.told)
        found = {"perplexity": number, "perplexity_error": 0.5}
        return json.dumps({"bound": {"data": {"both groups, stratified": found}}})

    @property
    def names(self) -> list[str]:
        return [command[command.index("maskless") + 1] for command in self.told]


def quiet(step, stands) -> None:
    pass


@pytest.fixture
def made(tmp_path):
    """made(name, lines=, scale=, **more): a plan in a folder of its own."""
    (tmp_path / "my.txt").write_text("words " * 100)

    def made(name: str, lines: slice = slice(None), scale: str = "toy", **more) -> TablePlan:
        request = {"scale": SCALES[scale], "out": tmp_path / "out", "text": str(tmp_path / "my.txt")}
        found = TABLES[name]
        return plan(replace(found, lines=found.lines[lines]), Options(**request | more))

    return made


def test_values_are_what_the_commands_found_and_come_once(made):
    do, this = Commands(), made("table-5", slice(2))
    found = list(run.numbers(this, run.run(this, do, quiet)))
    assert do.names == ["prepare", "train", "evaluate", "train", "evaluate"]
    assert [(number.value, number.error) for number in found] == [(23.0, 0.5), (25.0, 0.5)]
    again = Commands()
    assert list(run.numbers(this, run.run(this, again, quiet))) == found
    assert again.told == []
    assert {run.standing(this, step) for step in this.jobs.values()} == {"done"}
    more = made("table-5", slice(3))
    run.run(more, again, quiet)
    assert again.names == ["train", "evaluate"]  # of the third row alone


def test_a_changed_setting_is_named(made, tmp_path):
    this = made("table-5", slice(1))
    run.run(this, Commands(), quiet)
    (tmp_path / "other.txt").write_text("words")
    do = Commands()
    says = "prepare-text.json was made otherwise: command prepare .*my.txt, now .*other.txt"
    with pytest.raises(ValueError, match=says):
        run.run(made("table-5", slice(1), text=str(tmp_path / "other.txt")), do, quiet)
    small = made("table-5", slice(1), scale="small")
    with pytest.raises(ValueError, match=r"--vocab 300, now 8192; --length 16, now 256; name another --out"):
        run.run(small, do, quiet)
    assert do.told == []


def test_a_row_that_fails_says_why_and_the_others_are_there(made):
    this = made("table-1", slice(6, 8))
    do = Commands(train="the loss is nan at step 3")
    outcomes = run.run(this, do, quiet)
    first, second = run.numbers(this, outcomes)
    assert first.why_not == "not run: the loss is nan at step 3"
    assert second.value is None  # what `bench` said has no such steps
    assert do.names == ["prepare", "train", "bench"]


def test_what_failed_is_tried_again_with_what_was_missing(made):
    outcomes = run.run(made("table-6", slice(3)), Commands(evaluate="no judge"), quiet)
    assert [outcome.why_not for outcome in outcomes.values()] == ["", "", "no judge"]
    do = Commands()
    run.run(made("table-6", slice(3), judge="judge"), do, quiet)
    assert do.names == ["evaluate"]
    assert "--judge" in do.told[0]


def test_a_run_that_was_killed_goes_on_with_the_same_settings_only(made):
    this = made("table-5", slice(1))

    def killed(command) -> str:
        if "train" in command:
            raise KeyboardInterrupt
        return "{}"

    with pytest.raises(KeyboardInterrupt):
        run.run(this, killed, quiet)
    assert [run.standing(this, step) for step in this.jobs.values()] == ["done", "begun", ""]
    train = this.jobs["train-lm1b-mdlm-200k"]
    changed = replace(train, words=(*train.words, "--seed", "1"))
    with pytest.raises(ValueError, match="--seed not given, now 1"):
        run.standing(this, changed)


def test_data_that_was_prepared_by_hand_is_taken(made, tmp_path):
    this = made("table-5", slice(1))
    folder = tmp_path / "out" / "data" / "text"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("{}")
    do = Commands()
    run.run(this, do, quiet)
    assert do.names == ["train", "evaluate"]


def test_the_cost_is_that_of_the_steps_which_are_not_done(made):
    this, do = made("table-5", slice(2), scale="paper", text=None), Commands()
    with pytest.raises(ValueError, match="the cost of train-lm1b-mdlm-200k could not be measured: no room"):
        run.estimate(this, Commands(bench="no room"), quiet)
    hours = run.estimate(this, do, quiet)
    assert do.names == ["bench"] * 2
    assert hours == {
        "train-lm1b-mdlm-200k": pytest.approx(200_000 * 512 / 100 / 3600),
        "train-lm1b-mdlm": pytest.approx(1_000_000 * 512 / 100 / 3600),
    }
    run.run(made("table-5", slice(1), scale="paper", text=None), do, quiet)
    do.told.clear()
    assert list(run.estimate(this, do, quiet)) == ["train-lm1b-mdlm"]
    assert do.told == []  # a measurement is kept as well


def test_a_distillation_costs_a_training_step_and_two_passes_of_the_teacher(made):
    this, do = made("table-7", slice(18, 19), scale="paper", text=None), Commands()
    hours = run.estimate(this, do, quiet)
    assert do.names == ["bench"]  # the student's network is the one that was trained
    assert hours == {
        "train-owt-mdlm": pytest.approx(1_000_000 * 512 / 100 / 3600),
        "distill-owt-mdlm": pytest.approx(5 * 10_000 * 128 * (1 + 2) / 100 / 3600),
    }


def test_a_damaged_record_is_one_line(made):
    this = made("table-5", slice(1))
    run.run(this, Commands(), quiet)
    for damaged in ("[1]", "[" * 100_000):
        (this.options.out / "steps" / "prepare-text.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"prepare-text.json is not the record of a step"):
            run.run(this, Commands(), quiet)


# The real commands, in this process


def here(command) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app(list(command[1:]), standalone_mode=False)
    return out.getvalue()


@pytest.fixture
def command(command, monkeypatch, tmp_path):
    """command(*words): how `maskless reproduce` ends, with commands in this process."""
    monkeypatch.setattr("maskless.reproduce.run.child", here)
    monkeypatch.setattr("maskless.train.run.plot_losses", lambda *_: None)  # tests/cli has a run that draws them
    monkeypatch.chdir(tmp_path)
    return partial(command, "reproduce")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_text_from_a_file_to_a_table(command, tmp_path, monkeypatch):
    write(tmp_path / "toy.txt", 200, seed=0)
    INPUTS["judge"](tmp_path / "judge")
    recipe = "owt-pgm-8-8"
    speed = next(line for line in TABLES["table-1"].lines if line.model == "OWT, PGM 8/8")
    written = [line for line in TABLES["table-6"].lines if line.model == "PGM 8/8" and line.at in (512, 1024)]
    curve = Line(model="curve", work=Curve(recipe, "bounded"), measure=GRADIENT)
    bound = next(line for line in TABLES["table-5"].lines if line.work == Bound(recipe))
    some = Table(name="some", about="some of each", lines=(bound, curve, speed, *written), draw="losses")
    monkeypatch.setitem(TABLES, "some", some)
    asked = ("some", "--scale", "toy", "--data", "toy.txt", "--judge", "judge", "--out", "out")
    code, shown, _ = command(*asked, "--dry-run")
    assert code == 0
    assert shown.count("to do    maskless ") == 5
    assert not (tmp_path / "out").exists()
    code, shown, said = command(*asked)
    assert code == 0, said
    assert shown == (tmp_path / "out" / "some.md").read_text()
    assert Image.open(tmp_path / "out" / "some.png").width > 500
    found = rows(tmp_path / "out" / "some.csv")
    assert [row["paper"] for row in found[:1] + found[2:4]] == ["22.61", "5585.57", "108.76"]
    assert all(float(row["ours"]) > 0 for row in found)
    assert [row["ours at"] for row in found] == ["", "", "2", *["8"] * 3, *["16"] * 3]
    metrics = read_metrics(tmp_path / "out" / "runs" / "lm1b-pgm-6-6" / "metrics.jsonl")
    gradients = [line["gradient"] for line in metrics if line.get("gradient") and line["step"] > 2]
    assert float(found[1]["ours"]) == max(gradients)
    points = json.loads((tmp_path / "out" / "points" / "texts-lm1b-pgm-6-6-uniform.json").read_text())["points"]
    assert float(found[3]["ours"]) == points[0]["quality"]["retokenised"]["perplexity"]
    assert float(found[-1]["ours"]) == points[1]["tokens_per_second"]
    code, again, _ = command(*asked)
    assert (code, again) == (0, shown)
    assert command(*asked, "--dry-run")[1].count("done     maskless ") == 5


class Means(torch.nn.Module):
    """A feature network: what is light and what is dark in each channel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.mean([2, 3]), x.amax([2, 3])], 1) / 64


def test_pictures_from_a_folder_to_a_figure(command, tmp_path, monkeypatch):
    photos(tmp_path / "photos", shape=(8, 8))
    torch.jit.script(Means()).save(tmp_path / "means.pt")
    drawn = [line for line in TABLES["table-9"].lines if line.model == "PGM 12/12, 32 steps" and line.at < 2]
    some = Table(name="some", about="pictures", lines=tuple(drawn), draw="quality")
    monkeypatch.setitem(TABLES, "some", some)
    asked = ("some", "--scale", "toy", "--data", "photos", "--out", "out")
    code, shown, _ = command(*asked, "--features", "none.pt")
    assert code == 1  # the table is there, but not all of it
    assert shown.count("|  |  | 1 2 |") == 6
    assert "2. not run: no feature network at none.pt" in shown
    code, shown, said = command(*asked, "--features", "means.pt", "--feature-input", "pixels")
    assert code == 0, said
    assert "maskless evaluate" in said
    assert "maskless train" not in said  # which is done
    found = rows(tmp_path / "out" / "some.csv")
    (points,) = (tmp_path / "out" / "points").glob("*.json")
    kept = json.loads(points.read_text())["points"]
    assert [float(row["ours"]) for row in found if row["measure"] == "FID"] == [p["quality"]["fid"] for p in kept]
    scores = [row for row in found if row["measure"] == "Inception Score"]
    assert [(row["ours"], row["note"]) for row in scores] == [("", "the feature network means.pt has no logits")] * 2
    assert all("features of means.pt (Inception-v3)" in row["what differs"] for row in found)
    assert Image.open(tmp_path / "out" / "some.png").width > 500


def test_orders_are_drawn_without_any_data(command, tmp_path):
    code, _, said = command("figure-5", "--out", "out")
    assert code == 0
    assert "written: out/figure-5.csv   out/figure-5.md   out/figure-5.png" in said
    assert Image.open(tmp_path / "out" / "figure-5.png").width > 300


def test_without_a_name_all_are_listed(command):
    code, shown, _ = command()
    assert code == 0
    assert [line.split()[0] for line in shown.splitlines()] == [*TABLES, *DRAWN_BY_HAND]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("table-5 --data none", "--data none: no such file or folder"),
        ("table-5 --scale big", "unknown scale 'big': expected one of paper, small, toy"),
        ("nothing", "unknown table 'nothing': expected one of table-1"),
        ("table-5 --processes 0", "processes 0 is out of range: expected 1 or more"),
        ("table-5 --scale paper --data my.txt", "the paper's scale has its own text, prepared in reproduced/paper/da"),
        ("table-5 --data my.txt --out my.txt", "my.txt is not a folder"),
    ],
)
def test_mistakes_are_one_line(command, tmp_path, words, says):
    (tmp_path / "my.txt").write_text("words")
    assert says in one_line(command(*words.split()))
    assert [path.name for path in tmp_path.iterdir()] == ["my.txt"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_papers_scale_needs_a_gpu(command):
    code, _, said = command("table-3", "--scale", "paper")
    assert code == 2
    assert "torch sees no GPU here" in said


def test_data_that_cannot_be_read_is_one_line_and_no_table(command, tmp_path):
    (tmp_path / "empty.txt").touch()
    code, shown, said = command("table-5", "--scale", "toy", "--data", "empty.txt", "--out", "out")
    assert (code, shown) == (2, "")
    assert said.splitlines()[-1] == "error: empty.txt: the file is empty"
    assert not list(tmp_path.glob("out/table-5.*"))
