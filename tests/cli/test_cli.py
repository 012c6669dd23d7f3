"""The command line: results on stdout, the rest on stderr."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import maskless
from command_inputs import noise
from maskless.cli import show
from maskless.terminal import Screen
from maskless.train.report import read_metrics
from nn.reference import parameters, random_state

TINY = ["--width", "32", "--layers", "2", "--length", "16", "--tokenizer", "bytes", "--batch", "8"]


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


@pytest.mark.parametrize("asked", [["fill", "anna \x1b[2J has [2] balls"], ["generate", "--prompt", "anna \x1b[2J"]])
def test_a_text_does_not_steer_a_terminal_and_a_pipe_has_it_as_it_is(model, command, monkeypatch, asked):
    words = [asked[0], model, *asked[1:], "--steps", 2]
    assert "anna \x1b[2J" in command(*words).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    on_terminal = command(*words)
    assert on_terminal.code == 0
    assert "anna ␛[2J" in on_terminal.out
    assert "\x1b" not in on_terminal.out


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may have no such names")
def test_a_name_that_is_not_utf8_is_told_as_it_is(text, tmp_path):
    name = b"caf\xe9"
    words = [sys.executable, "-m", "maskless", "prepare", text, "--out", os.fsdecode(name), "--tokenizer", "bytes"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8"}  # as in most languages that a system speaks
    done = subprocess.run([*words, "--length", "16"], capture_output=True, cwd=tmp_path, env=strict, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(name + b": ")
    assert os.listdir(os.fsencode(tmp_path)) == [name]


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_texts_are_the_same_in_batches(model, command, monkeypatch, how):
    asked = ["generate", model, "--n", 5, "--steps", 4, "--seed", 3, *how]
    whole = command(*asked)
    monkeypatch.setattr("maskless.cli.generate.BATCH", 2)
    assert command(*asked) == whole


def test_texts_are_printed_before_the_next_batch_is_drawn(model, command, monkeypatch):
    texts, draw, drawn = maskless.generate(maskless.load(model), 4, steps=4), maskless.api.generate, []

    def interrupted(loaded, n, **how):
        if len(drawn) == 4:
            raise KeyboardInterrupt
        drawn.extend(draw(loaded, n, **how))
        return drawn[-n:]

    monkeypatch.setattr("maskless.cli.generate.BATCH", 2, raising=False)
    monkeypatch.setattr("maskless.api.generate", interrupted)
    ended = command("generate", model, "--n", 5, "--steps", 4)
    assert ended.code == 130
    assert ended.out == "".join(f"{text}\n" for text in texts)


def test_options_of_sampling_arrive(model, command):
    given = {"steps": 3, "seed": 5, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "order": "left", "counts": "mdlm"}
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
    ways = maskless.fill(maskless.load(model), "anna [3] the [4].", n=3, steps=7)
    assert command("fill", model, "anna [3] the [4].", "--steps", 7, "--n", 3).out == "".join(
        f"{way}\n" for way in ways
    )


def test_evaluation_gives_the_likelihood_in_each_order(model, command):
    ended = command("evaluate", model, "--data", model / "data", "--sequences", 8, "--json")
    results = json.loads(ended.out)
    exact = ["left to right", "8 strands", "8 strands, in parallel"]
    assert list(results) == ["any order", *exact, "gaps, given the rest"]
    for result in results.values():
        assert set(result) >= {"nats", "error", "sequences", "tokens", "perplexity", "perplexity_error"}
        assert result["bits_per_byte"] > 0
        assert result["sequences"] == 8
    assert ended.err == ""
    shown = command("evaluate", model, "--data", model / "data", "--sequences", 8)
    assert f"{results['any order']['perplexity']:.2f}" in shown.out


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
    one = command("generate", tmp_path / "released.ckpt", "--tokenizer", "bytes")
    other = command("generate", tmp_path / "model")
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate {model} --n 1 --steps 2", ["starting", "loading {model}", "generating"]),
        ("evaluate {model} --what leak", ["starting", "loading {model}", "looking for leaks"]),
        ("train --text {text} --out {out} --steps 1 --tokenizer bytes", ["starting", "preparing", "setting up"]),
        ("distill {model} --data {model}/data --out {out} --rounds 1 --steps-per-round 1", ["starting", "setting up"]),
    ],
)
def test_a_terminal_is_told_what_takes_its_time(words, says, model, text, command, monkeypatch, tmp_path):
    screen = Screen(file=io.StringIO(), force_terminal=True, width=500)
    monkeypatch.setattr(show, "err", screen)
    places = {"model": model, "text": text, "out": tmp_path / "out"}
    assert command(*words.format(**places).split()).code == 0
    for what in says:
        assert what.format(**places) in screen.file.getvalue()


def test_a_run_resumes_from_any_folder(text, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("train", "--text", text, "--out", "run", *TINY, "--steps", 2).code == 0
    monkeypatch.chdir("/")
    ended = command("train", "--out", tmp_path / "run", "--resume", "--steps", 3)
    assert ended.code == 0, ended.err
    assert "resumed at step 2" in ended.err


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("end", [("--steps", 2), ("--minutes", 0.01)])
def test_a_finished_run_says_so_and_how_to_go_on_and_nothing_is_rewritten(end, text, command, tmp_path, steady_clock):
    run = tmp_path / "a run"
    assert command("train", "--text", text, "--out", run, *TINY, *end).code == 0
    before = contents(run)
    ended = command("train", "--out", run, "--resume")
    assert (ended.code, ended.err, contents(run)) == (0, "", before)
    step = read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert ended.out.startswith(
        f"{run} is finished, at step {step:,}; train on with a later end: maskless train --out "
    )
    more = shlex.split(ended.out.partition("maskless ")[2])
    assert more[:4] == ["train", "--out", str(run), "--resume"]
    assert command(*more).code == 0
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] > step


def test_a_finished_codec_and_a_finished_distillation_say_so(text, command, tmp_path):
    np.save(images := tmp_path / "images.npy", noise(12, 8, 8, 3))
    codec = ["train-codec", "--out", tmp_path / "codec"]
    tiny = ["--images", images, "--width", 32, "--latent", 8, "--codes", 8, "--blocks", 1, "--batch", 4]
    assert command(*codec, *tiny, "--steps", 1).code == 0
    before, ended = contents(tmp_path / "codec"), command(*codec, "--resume")
    assert (ended.code, ended.err, contents(tmp_path / "codec")) == (0, "", before)
    assert ended.out.endswith(f"maskless train-codec --out {tmp_path / 'codec'} --resume --steps 2\n")
    assert command("train", "--text", text, "--out", tmp_path / "run", *TINY, "--steps", 2).code == 0
    how = ["--rounds", 1, "--teacher-steps", 8, "--steps-per-round", 1, "--batch", 4, "--tracker", "none"]
    distill = ["distill", "--out", tmp_path / "fast"]
    assert command(*distill, tmp_path / "run", "--data", tmp_path / "run" / "data", *how).code == 0
    before, ended = contents(tmp_path / "fast"), command(*distill, "--resume")
    assert (ended.code, ended.err, contents(tmp_path / "fast")) == (0, "", before)
    assert ended.out.endswith(f"maskless distill --out {tmp_path / 'fast'} --resume --rounds 2\n")


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


def test_the_version_is_shown(command):
    assert command("--version") == (0, f"maskless {maskless.__version__}\n", "")


def test_the_public_names_are_listed():
    done = "import maskless, sys; print({*maskless.__all__} <= {*dir(maskless)}, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", done], capture_output=True, text=True).stdout == "True False\n"


def test_what_to_try_next_can_be_pasted(text, command, tmp_path):
    to = tmp_path / "my [new] run"
    ended = command("train", "--text", text, "--out", to, *TINY, "--steps", 1, "--evaluate-every", 0)
    tried = shlex.split(ended.out.splitlines()[-1].partition("try: maskless ")[2])
    assert tried == ["generate", str(to)]
