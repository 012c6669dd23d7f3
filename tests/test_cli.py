"""The command line: results on stdout, the rest on stderr, and for every mistake one line and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

import maskless
from maskless import cli
from maskless.cli import entry
from maskless.codec.text import byte_codec
from maskless.data.prepare import prepare
from maskless.data.toy import write
from maskless.order import COUNTS, ORDERS
from maskless.train.report import read_metrics
from nn.reference import parameters, random_state

TINY = ["--width", "32", "--layers", "2", "--length", "16", "--tokenizer", "bytes", "--batch", "8"]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def really(*arguments: Any, folder: Path | None = None) -> Ended:
    """What a real process makes of a command."""
    command = [sys.executable, "-m", "maskless", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., Ended]:
    """command(...): the same in this process."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def run(*arguments: Any) -> Ended:
        monkeypatch.setattr(sys, "argv", ["maskless", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ended(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def text(folder) -> Path:
    return write(folder / "toy.txt", 300, seed=0)


@pytest.fixture(scope="module")
def trained(folder, text) -> Ended:
    """A text and a place are enough; the minutes only keep it short."""
    return really("train", "--text", text.name, "--out", "run", "--minutes", 0.03, folder=folder)


@pytest.fixture(scope="module")
def model(folder, trained) -> Path:
    assert trained.code == 0, trained.err
    return folder / "run"


@pytest.fixture(scope="module")
def other(folder) -> Path:
    """Data of a vocabulary as large as the model's, with other tokens in it."""
    path = folder / "other.jsonl"
    path.write_text("".join(json.dumps({"text": f"Zwölf Boxkämpfer {n} " * 30}) + "\n" for n in range(40)))
    return prepare([path], folder / "other", vocab=257, length=16)


# What works


def test_training_on_a_text_leaves_a_whole_run(trained, model):
    assert trained.code == 0
    for name in ("run.json", "metrics.jsonl", "loss.png", "model/config.json", "model/model.safetensors"):
        assert (model / name).is_file(), name
    lines = read_metrics(model / "metrics.jsonl")
    states = sorted(path.name for path in (model / "states").iterdir())
    assert states[-1] == f"step-{lines[-1]['step']:08d}.pt"  # the end is saved, and before it at most one more is kept
    assert len(states) <= 2
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, lines[-1]["step"] + 1))
    assert "perplexity" in lines[-1]
    with Image.open(model / "loss.png") as image:
        assert image.format == "PNG"
    assert [path.name for path in model.rglob(".*")] == []


def test_training_reports_on_stdout_and_shows_progress_on_stderr(trained):
    assert "validation perplexity" in trained.out
    assert "try: maskless generate run" in trained.out
    assert "training: pgm" in trained.err
    assert "training: pgm" not in trained.out


def test_generated_texts_alone_are_on_stdout_and_a_seed_repeats_them(model, command):
    one, again, other = (command("generate", model, "--n", 2, "--steps", 4, "--seed", s) for s in (1, 1, 2))
    texts = maskless.generate(maskless.load(model), 2, steps=4, seed=1)
    assert one == again
    assert one.code == 0
    assert one.out == "".join(f"{text}\n" for text in texts)
    assert one.out != other.out


def test_generated_json_tells_how_each_text_came(model, command):
    ended = command("generate", model, "--n", 3, "--steps", 5, "--seed", 1, "--json", "--prompt", "anna ")
    lines = [json.loads(line) for line in ended.out.splitlines()]
    texts = maskless.generate(maskless.load(model), 3, steps=5, seed=1, prompt="anna ")
    assert [line["text"] for line in lines] == texts
    assert [line["tokens"] for line in lines] == [text.tokens for text in texts]
    assert [line["order"] for line in lines] == [text.order for text in texts]
    assert [line["steps"] for line in lines] == [text.steps for text in texts]
    assert all(line["text"].startswith("anna ") for line in lines)
    assert ended.err == ""


def test_options_of_sampling_arrive(model, command):
    given = {"steps": 3, "seed": 5, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "order": "raster", "counts": "mdlm"}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    loaded = maskless.load(model)
    ended = command("generate", model, "--n", 1, "--length", 12, *options)
    assert ended.out == f"{maskless.generate(loaded, 1, length=12, **given)[0]}\n"
    ended = command("fill", model, "anna [6] ben [2].", *options)
    assert ended.out == f"{maskless.fill(loaded, 'anna [6] ben [2].', **given)}\n"


def test_a_filled_text_keeps_what_was_given(model, command):
    ended = command("fill", model, "anna [3] the [4].", "--steps", 7, "--json")
    filled = json.loads(ended.out)
    assert filled["text"].startswith("anna ")
    assert " the " in filled["text"]
    assert filled["text"].endswith(".")
    assert len(filled["order"]) == 7
    assert command("fill", model, "anna [3] the [4].", "--steps", 7).out == filled["text"] + "\n"


def test_evaluation_gives_both_estimators(model, command):
    ended = command("evaluate", model, "--data", model / "data", "--sequences", 8, "--json")
    results = json.loads(ended.out)
    assert list(results) == ["both groups, stratified", "the paper's"]
    for result in results.values():
        assert set(result) == {"nats", "error", "sequences", "tokens", "perplexity", "perplexity_error"}
        assert result["sequences"] == 8
    assert ended.err == ""
    shown = command("evaluate", model, "--data", model / "data", "--sequences", 8)
    assert f"{results['both groups, stratified']['perplexity']:.2f}" in shown.out


def test_a_released_checkpoint_becomes_a_model_folder(command, tmp_path):
    sizes = {"vocab": 258, "width": 16, "heads": 2, "condition": 8, "encoder": 1, "decoder": 1}
    state, ema = random_state(**sizes), random_state(**sizes, seed=1)
    content = {
        "state_dict": {f"backbone.{name}": value for name, value in state.items()},
        "ema": {"shadow_params": parameters(ema)},
        "hyper_parameters": {"config": {"model": {"length": 24, "swap": {"pre_query_mode": "learn+freqs"}}}},
    }
    torch.save(content, tmp_path / "released.ckpt")
    ended = command("convert", tmp_path / "released.ckpt", tmp_path / "model", "--tokenizer", "bytes")
    assert ended.code == 0, ended.err
    assert "PartitionConfig" in ended.out
    one, other = (command("generate", tmp_path / name, "--tokenizer", "bytes") for name in ("released.ckpt", "model"))
    assert one == other
    raw = command("convert", tmp_path / "released.ckpt", tmp_path / "raw", "--tokenizer", "bytes", "--weights", "raw")
    assert raw.code == 0
    weights = [maskless.load(tmp_path / name).network.embedding.weight for name in ("model", "raw")]
    assert weights[0].equal(ema["vocab_embed.embedding"])
    assert weights[1].equal(state["vocab_embed.embedding"])


def test_preparing_says_what_came_out(text, command, tmp_path):
    ended = command("prepare", text, "--out", tmp_path / "data", "--vocab", 300, "--length", 16)
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 1
    assert "vocabulary 300, length 16" in ended.out
    assert ended.err == ""


def test_resuming_where_there_is_nothing_starts_anew(text, command, tmp_path):
    ended = command("train", "--text", text, "--out", tmp_path / "run", *TINY, "--steps", 2, "--resume")
    assert ended.code == 0, ended.err
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2


def test_a_run_resumes_from_any_folder(text, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("train", "--text", text, "--out", "run", *TINY, "--steps", 2).code == 0
    monkeypatch.chdir("/")
    ended = command("train", "--out", tmp_path / "run", "--resume")
    assert ended.code == 0, ended.err
    assert "resumed at step 2" in ended.err


def test_a_recipe_gives_sizes_and_settings_that_options_override(text, command, tmp_path):
    small = ["--width", 32, "--layers", 2, "--encoder", 1, "--steps", 2, "--batch", 4]
    ended = command("train", "--text", text, "--out", tmp_path, "--recipe", "lm1b-pgm-6-6-mean-200k", *small)
    assert ended.code == 0, ended.err
    config = json.loads((tmp_path / "run.json").read_text())
    assert config["network"]["queries"] == "mean"
    assert config["train"]["warmup"] == 2_500
    assert config["train"]["initial"] == "released"
    assert config["network"]["width"] == 32


def test_help_shows_an_example_of_every_command(command):
    for name in ("prepare", "train", "generate", "fill", "evaluate", "convert"):
        ended = command(name, "--help")
        assert ended.code == 0
        assert f"maskless {name} " in ended.out


# Mistakes


def one_line(ended: Ended) -> str:
    """What is wrong, said in one line and nothing else."""
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("\n")
    return ended.err.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--out", "{out}", "--text", "nowhere.txt"], "nowhere.txt: no such file or folder"),
        (["train", "--out", "{out}", "--text", "{empty}"], "the file is empty"),
        (["train", "--out", "{out}", "--text", "{binary}"], "not text, it holds NUL bytes"),
        (["train", "--out", "{out}", "--text", "{latin}"], "not UTF-8 text"),
        (["train", "--out", "{out}", "--text", "{short}"], "too little text for the"),
        (["train", "--out", "{out}"], "what to train on? expected either --text FILE or --data DIR"),
        (["train", "--out", "{out}", "--text", "{text}", "--data", "{data}"], "what to train on? expected either"),
        (["train", "--out", "{out}", "--data", "{tmp}"], "not a prepared folder"),
        (["train", "--out", "{out}", "--data", "{data}", "--length", "8"], "--length go with --text"),
        (["train", "--out", "{model}", "--text", "{text}"], "holds a run already: go on with --resume"),
        (
            ["train", "--out", "{out}", "--text", "{text}", "--vocab", "300", "--tokenizer", "bytes"],
            "exclude each other",
        ),
        (["train", "--out", "{out}", "--text", "{text}", "--vocab", "100"], "vocab is 100: expected at least 257"),
        (["train", "--out", "{out}", "--text", "{text}", "--length", "0"], "length is 0: expected 3 or more"),
        (["train", "--out", "{out}", "--resume"], "what to train on?"),
        (["train", "--out", "{text}", "--text", "{text}"], "is not a folder"),
        (["train", "--out", "{out}", "--data", "{data}", "--model", "gpt"], "pgm, mdlm, mdlm-complementary, ar"),
        (["train", "--out", "{out}", "--data", "{data}", "--weights", "fair"], "one of bounded, released, exact"),
        (["train", "--out", "{out}", "--data", "{data}", "--context", "half"], "expected one of full, ordered"),
        (
            ["train", "--out", "{out}", "--data", "{data}", "--queries", "max"],
            "expected one of position, mean, logsumexp",
        ),
        (["train", "--out", "{out}", "--data", "{data}", "--decay", "linear"], "one of constant, cosine"),
        (
            ["train", "--out", "{out}", "--data", "{data}", "--recipe", "gpt"],
            "unknown recipe 'gpt': expected one of lm1b",
        ),
        (["train", "--out", "{out}", "--data", "{data}", "--minutes", "-1"], "minutes -1.0 is out of range"),
        (["train", "--out", "{out}", "--data", "{data}", "--minutes", "nan"], "minutes nan is out of range"),
        (["train", "--out", "{out}", "--data", "{data}", "--steps", "0"], "steps 0 is out of range"),
        (
            ["train", "--out", "{out}", "--data", "{data}", "--batch", "9", "--accumulate", "2"],
            "batch 9 does not split",
        ),
        (["train", "--out", "{out}", "--data", "{data}", "--dropout", "2"], "dropout 2.0 is out of range"),
        (["train", "--out", "{out}", "--data", "{data}", "--width", "33"], "width 33 does not split"),
        (["train", "--out", "{out}", "--data", "{data}", "--layers", "1"], "layers 1 is out of range"),
        (["train", "--out", "{out}", "--data", "{data}", "--fsdp"], "fsdp shards over GPUs"),
        (["train", "--out", "{out}", "--data", "{data}", "--colour", "red"], "No such option: --colour"),
        (["train", "--out", "{out}", "--data", "{data}", "--steps", "many"], "--steps"),
        (["train", "--data", "{data}"], "Missing option '--out'"),
        (
            ["paint"],
            "unknown command 'paint': expected one of prepare, train, distill, generate, fill, evaluate, fid, ",
        ),
        (["--loud"], "No such option: --loud"),
        (["prepare", "{text}", "--out", "{out}", "--layout", "round"], "packed, wrapped, padded"),
        (["prepare", "{text}", "--out", "{out}", "--vocab", "300", "--tokenizer", "gpt2"], "exclude each other"),
        (["prepare", "{text}", "--out", "{out}", "--tokenizer", "klingon"], "gpt2, bert, bytes"),
        (["prepare", "{text}", "--out", "{data}", "--vocab", "300"], "exists already"),
        (["generate", "{tmp}"], "is not a model folder: it has no config.json"),
        (["generate", "{truncated}"], "model.safetensors is damaged or not a safetensors file"),
        (["generate", "{model}", "--order", "spiral"], f"expected one of {', '.join(ORDERS)}"),
        (["generate", "{model}", "--counts", "odd"], f"expected one of {', '.join(COUNTS)}"),
        (["generate", "{model}", "--steps", "0"], "steps 0 is out of range: expected 1 to"),
        (["generate", "{model}", "--steps", "99"], "steps 99 is out of range: expected 1 to"),
        (["generate", "{model}", "--n", "0"], "n 0 is out of range: expected 1 or more"),
        (["generate", "{model}", "--length", "99"], "length 99 is out of range"),
        (["generate", "{model}", "--temperature", "-1"], "temperature -1.0 is out of range"),
        (["generate", "{model}", "--top-p", "0"], "top_p 0.0 is out of range"),
        (["generate", "{model}", "--top-k", "0"], "top_k 0 is out of range"),
        (["generate", "{model}", "--guidance", "2"], "--guidance is for models of pictures: this is one of text"),
        (["generate"], "Missing argument"),
        (["fill", "{model}", "anna has [3] balls", "--steps", "0"], "steps 0 is out of range: expected 1 to 3"),
        (["fill", "{model}", "anna has [3] balls", "--steps", "4"], "steps 4 is out of range: expected 1 to 3"),
        (["fill", "{model}", "anna has [99] balls"], "at most the model's context of"),
        (["fill", "{model}", "anna has [0] balls"], "gap [0] in the template"),
        (["fill", "{model}", "anna has no gap"], "no gap in the template"),
        (["fill", "{model}", "anna [3]", "--box", "0,0,2,2"], "--box is for models of pictures: this is one of text"),
        (["evaluate", "{model}"], "this is a model of text: expected --data DIR"),
        (["evaluate", "{model}", "--reference", "{tmp}"], "--reference is for models of pictures: this is one of text"),
        (["evaluate", "{model}", "--guidance", "1,2"], "--guidance is for models of pictures: this is one of text"),
        (["evaluate", "{model}", "--data", "{other}"], "has another vocabulary"),
        (["evaluate", "{model}", "--data", "{long}"], "has a context of"),
        (["evaluate", "{model}", "--data", "{tmp}"], "not a prepared folder"),
        (["evaluate", "{model}", "--data", "{data}", "--split", "test"], "expected train or valid"),
        (["evaluate", "{model}", "--data", "{data}", "--sequences", "0"], "sequences 0 is out of range"),
        (["evaluate", "{model}", "--data", "{data}", "--samples", "0"], "samples 0 is out of range"),
        (["evaluate", "{model}", "--data", "nowhere.txt"], "nowhere.txt: no such file or folder"),
        (["evaluate", "{model}", "--data", "{data}", "--batch", "0"], "batch 0 is out of range"),
        (["convert", "nowhere.ckpt", "{out}"], "nowhere.ckpt is not a file"),
        (["convert", "{text}", "{out}"], "is damaged or not a checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, says, places, command):
    places = places | {"out": places["tmp"] / "out"}
    before = sorted(places["tmp"].rglob("*"))
    said = one_line(command(*(word.format(**places) if "{" in word else word for word in arguments)))
    assert says.format(**places) in said
    assert sorted(places["tmp"].rglob("*")) == before


@pytest.fixture
def places(tmp_path, text, model, other, folder) -> dict[str, Path]:
    """Files good and bad."""
    contents = {
        "empty": b"",
        "binary": b"anna\0ben" * 100,
        "latin": "Käse ".encode("latin-1") * 500,
        "short": b"anna gives ben the ball .\n",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    shutil.copytree(model / "model", tmp_path / "truncated")
    weights = tmp_path / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    if not (folder / "long").exists():
        prepare([text], folder / "long", codec=byte_codec(), length=100)
    bad = {name: tmp_path / f"{name}.txt" for name in contents}
    good = {"text": text, "model": model, "data": model / "data", "other": other, "long": folder / "long"}
    return bad | good | {"tmp": tmp_path, "truncated": tmp_path / "truncated"}


def test_no_command_shows_the_help(command):
    ended = command()
    assert ended.code == 2
    assert "Commands" in ended.out
    assert ended.err == ""


@pytest.mark.parametrize(
    ("error", "silent"), [(OSError(errno.ENOSPC, "No space left on device"), True), (ValueError("a bug"), False)]
)
def test_a_thread_that_meets_a_full_disk_leaves_the_word_to_the_command(error, silent, monkeypatch, capsys):
    def fail() -> None:
        raise error

    monkeypatch.setattr(threading, "excepthook", entry._thread_failed)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert (capsys.readouterr().err == "") == silent


@pytest.mark.parametrize("arguments", [["train", "--out", "run", "--text", "nowhere.txt"], ["paint"]])
def test_a_real_process_ends_with_one_line_too(arguments, tmp_path):
    one_line(really(*arguments, folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("train", "interrupted; a training run goes on with --resume"),
        ("evaluate", "interrupted"),
        ("serve", "interrupted"),
    ],
)
def test_an_interruption_speaks_of_resuming_only_where_that_can_be_done(word, says, monkeypatch, capsys):
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "app", interrupted)
    monkeypatch.setattr("sys.argv", ["maskless", word])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"{says}\n"
