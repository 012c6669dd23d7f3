"""From what was asked for to a configuration: what was said stands, the rest comes from the text."""

from pathlib import Path

import pytest

from maskless.data.prepare import prepare as really_prepare
from maskless.data.tokens import Prepared, open_tokens
from maskless.train.run import RunConfig
from maskless.train.setup import Request, configure, resumed, run_folder


def prepare(inputs: list[str], to: Path, **how) -> Prepared:
    return open_tokens(really_prepare(inputs, to, **how))


def ask(folder: Path, **request) -> RunConfig:
    return configure(folder, Request(**request), prepare)


def test_a_text_alone_is_enough(text, tmp_path):
    config = ask(tmp_path / "run", text=[str(text)])
    data = open_tokens(config.data)
    assert data.folder == tmp_path / "run" / "data"
    assert config.network["vocab"] == data.vocab
    assert config.network["length"] == data.length
    assert config.train.model == "pgm"
    assert config.train.decay == "cosine"
    assert not (tmp_path / "run" / "run.json").exists()


def test_what_was_said_stands(text, tmp_path):
    said = {"steps": 7, "batch": 4, "learning_rate": 0.5, "warmup": 2, "decay": "constant", "save_every": 9}
    sizes, train = {"width": 64, "layers": 6, "encoder": 1, "dropout": 0.3}, said | {"model": "pgm", "weights": "exact"}
    config = ask(tmp_path / "run", text=[str(text)], vocab=280, length=24, network=sizes, train=train)
    assert {name: getattr(config.train, name) for name in said} == said
    assert config.train.task == "pgm-exact"
    chosen = ("vocab", "length", "width", "encoder", "decoder", "dropout")
    assert [config.network[name] for name in chosen] == [280, 24, 64, 1, 5, 0.3]


def test_prepared_data_stay_where_they_are(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.folder.parent)
    config = ask(tmp_path / "run", data=Path(data.folder.name))
    assert config.data == str(data.folder)
    assert not (tmp_path / "run").exists()


def test_a_mistake_shows_before_the_text_is_prepared(text, tmp_path):
    for wrong in (
        {"train": {"model": "gpt"}},
        {"train": {"weights": "fair"}},
        {"train": {"minutes": -1.0}},
        {"train": {"batch": 6, "accumulate": 4}},
        {"network": {"context": "half"}},
        {"network": {"layers": 1}},
        {"network": {"encoder": 9}},
        {"tokenizer": "klingon"},
    ):
        with pytest.raises(ValueError):
            ask(tmp_path / "run", text=[str(text)], **wrong)
        assert not (tmp_path / "run").exists(), wrong


def test_tokens_left_by_an_earlier_try_are_made_anew(text, tmp_path):
    folder = tmp_path / "run"
    assert ask(folder, text=[str(text)], length=16).network["length"] == 16
    (folder / ".data.0123abcd.partial").mkdir()
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper())
    config = ask(folder, text=[str(other)], length=24)
    assert config.network["length"] == 24
    data = open_tokens(config.data)
    assert "ANNA" in data.codec().decode(data.split("train").rows(range(40)).flatten())
    assert [path.name for path in folder.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "expected either --text FILE or --data DIR"),
        ({"text": ["a.txt"], "data": Path("data")}, "expected either --text FILE or --data DIR"),
        ({"text": ["nowhere.txt"]}, "nowhere.txt: no such file or folder"),
        ({"data": Path("nowhere")}, "nowhere: not a prepared folder"),
    ],
)
def test_there_must_be_something_to_train_on(wrong, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        ask(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", [{"vocab": 300}, {"tokenizer": "bytes"}, {"length": 16}])
def test_prepared_data_have_a_vocabulary_and_a_length_of_their_own(wrong, data, tmp_path):
    with pytest.raises(ValueError, match="go with --text"):
        ask(tmp_path / "run", data=data.folder, **wrong)


def test_a_folder_that_holds_a_run_is_left_alone(data, tmp_path):
    (tmp_path / "run.json").write_text("a run")
    with pytest.raises(ValueError, match="holds a run already: resume it with --resume, or name another --out"):
        ask(tmp_path, data=data.folder)
    assert (tmp_path / "run.json").read_text() == "a run"


def test_a_run_goes_on_as_it_began_but_for_its_end_and_milestones(text, tmp_path):
    folder, asked = tmp_path / "run", {"model": "pgm", "steps": 7, "learning_rate": 0.5}
    began = ask(folder, text=[str(text)], network={"width": 64}, train=asked)
    began.write(folder)
    same = resumed(folder, Request(text=[str(text)], network={"width": 64}, train=asked))
    assert same == began
    (other := tmp_path / "other.txt").write_text("another text")
    longer = resumed(folder, Request(train={"steps": 9, "keep": 5}))
    assert (longer.train.steps, longer.train.keep, longer.train.learning_rate) == (9, 5, 0.5)
    for wrong, message in (
        (Request(train={"learning_rate": 0.1}), "learning_rate is 0.5"),
        (Request(train={"model": "mdlm"}), "model is pgm"),
        (Request(network={"width": 32}), "width is 64"),
        (Request(network={"layers": 12}), r"layers is \d+ in"),
        (Request(text=[str(other)]), f"the text is {text.name} in {folder}, not other.txt"),
        (Request(data=tmp_path), f"data is {folder / 'data'} in {folder}, not {tmp_path}"),
    ):
        with pytest.raises(ValueError, match=message):
            resumed(folder, wrong)


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def fail(folder: Path, made: dict[str, str], error: BaseException) -> None:
    with run_folder(folder):
        write(folder, made)
        raise error


BEGUN = {"distill.json": "{}", "round-1/metrics.jsonl": "{}"}


@pytest.mark.parametrize(
    ("before", "made", "stays"),
    [
        (None, {"run.json": "{}", "metrics.jsonl": "", "data/a": "", "tensorboard/a": ""}, None),
        ({}, {"run.json": "{}"}, {}),
        ({"data/a": "mine"}, {"run.json": "{}", "metrics.jsonl": ""}, {"data/a": "mine"}),
        ({}, {"run.json": "{}", "other": ""}, {"other": ""}),
        (None, {"run.json": "{}", "metrics.jsonl": "{}"}, {"run.json": "{}", "metrics.jsonl": "{}"}),
        (None, {"distill.json": "{}", "round-0/a": "", "round-1/metrics.jsonl": ""}, None),
        (None, BEGUN, BEGUN),
        ({"run.json": "{}"}, {"metrics.jsonl": ""}, {"run.json": "{}", "metrics.jsonl": ""}),
    ],
    ids=["new", "empty", "own data", "another's", "begun", "distillation", "begun distillation", "goes on"],
)
def test_a_run_that_fails_before_its_first_step_leaves_what_was_there(before, made, stays, tmp_path):
    folder = tmp_path / "run"
    if before is not None:
        write(folder, before)
    with pytest.raises(ValueError, match="refused"):
        fail(folder, made, ValueError("refused"))
    left = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert (left if folder.exists() else None) == stays


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_a_run_that_is_interrupted_or_meets_a_full_disk_stays(error, tmp_path):
    with pytest.raises(type(error)):
        fail(tmp_path, {"run.json": "{}"}, error)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
