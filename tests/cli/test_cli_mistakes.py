"""The command line: for every mistake one line and exit code 2."""

import errno
import gzip
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from running import really

from in_process import one_line
from maskless.cli import commands, entry
from maskless.codec.text import byte_codec
from maskless.data.prepare import prepare
from maskless.order import COUNTS, ORDERS
from maskless.train.state import diverged


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train --out {out} --text nowhere.txt", "nowhere.txt: no such file or folder"),
        ("prepare {text} --out {out} --flips", "--flips is for pictures: this is text"),
        ("train --out {out} --text {latin}", "not UTF-8 text"),
        ("train --out {out} --text {short}", "too little text for the"),
        ("train --out {model} --text {text}", "another --out; continue with: maskless train --out {model} --resume"),
        ("train --out {out} --text {text} --vocab 300 --tokenizer bytes", "exclude each other"),
        ("train --out {out} --resume", "nothing to resume: {out} has no run.json; give --text or --data to begin"),
        ("distill --out {out} --resume", "nothing to resume: {out} has no distill.json; give MODEL and"),
        ("train-codec --out {out} --resume", "nothing to resume: {out} has no run.json; give --images"),
        ("train --out {text} --text {text}", "is not a folder"),
        ("train --out {out} --data {data} --model gpt", "pgm, mdlm, mdlm-complementary, ar"),
        ("train --out {out} --data {data} --recipe gpt", "unknown recipe 'gpt': expected one of lm1b"),
        ("train --out {out} --data {data} --minutes -1", "minutes -1.0 is out of range"),
        ("train --out {out} --text {text} --width -64", "width -64 is out of range"),
        ("train --out {out} --data {data} --colour red", "No such option: --colour"),
        ("train --out {out} --data {data} --steps many", "--steps"),
        ("train --data {data}", "Missing option '--out'"),
        ("paint", "unknown command 'paint': expected one of demo, prepare, train, distill, generate, fill, evaluate, "),
        ("'\x1b[31mred\x9b'", "unknown command '\\x1b[31mred\\x9b'"),
        ("train --out {out} --text '\x1b]0;title\x07'", "␛]0;title␇: no such file or folder"),
        ("--loud", "No such option: --loud"),
        ("prepare {text} --out {out} --vocab 300 --tokenizer gpt2", "exclude each other"),
        ("prepare {text} --out {data} --vocab 300", "exists already"),
        ("prepare {text} --out {out} --max-unpacked much", "'much' is no size: expected a number of"),
        ("prepare {lines} --out {out} --max-line 20", "line 1: longer than 20 bytes"),
        ("prepare {packed} --out {out} --max-unpacked 1kB", "it unpacks to more than 1 kB"),
        ("generate {tmp}", "is not a model folder: it has no config.json"),
        ("generate {truncated}", "model.safetensors is damaged or not a safetensors file"),
        ("generate {model}/model/model.safetensors", "is a part of a model: give its folder, {model}/model"),
        ("fill {text} 'a [3]'", "damaged or not a checkpoint: neither an archive nor a pickle that torch wrote"),
        ("generate {model} --order spiral", f"expected one of {', '.join(ORDERS)}"),
        ("generate {model} --counts odd", f"expected one of {', '.join(COUNTS)}"),
        ("generate {model} --steps 99", "steps 99 is out of range: expected 1 to"),
        ("generate {model} --guidance 2", "guidance 2.0 needs a network with class labels"),
        ("generate {model} --prompt 'caf\udce9'", "character 3 of a text is '\\udce9': expected UTF-8"),
        ("prepare {text} --out {loop} --vocab 300", "{loop}"),
        ("generate", "Missing argument"),
        ("fill {model} 'anna has [3] balls' --steps 4", "steps 4 is out of range: expected 1 to 3"),
        ("fill {model} 'anna has [99] balls'", "the gaps are 99 tokens long: expected at most"),
        ("fill {model} 'anna has no gap'", "no gap in the template"),
        ("fill {model} 'anna [3]' --box 0,0,2,2", "--box is for image models: this is a text model"),
        ("evaluate {model}", "this is a text model: expected --data DIR"),
        ("evaluate {model} --reference {tmp}", "--reference is for image models: this is a text model"),
        ("evaluate {model} --guidance 1,2", "--guidance is for image models: this is a text model"),
        ("evaluate {model} --data {other}", "has another vocabulary"),
        ("evaluate {model} --data {long}", "has a context of"),
        ("evaluate {model} --data {data} --split test", "expected train or valid"),
        ("convert nowhere.ckpt {out}", "nowhere.ckpt is not a file"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(line, says, places, command):
    places = places | {"out": places["tmp"] / "out"}
    before = sorted(places["tmp"].rglob("*"))
    said = one_line(command(*(word.format(**places) for word in shlex.split(line))))
    assert says.format(**places) in said
    assert sorted(places["tmp"].rglob("*")) == before


@pytest.fixture
def places(tmp_path, text, model, other, folder) -> dict[str, Path]:
    """Files good and bad."""
    contents = {"latin": "Käse ".encode("latin-1") * 500, "short": b"anna gives ben the ball .\n"}
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "a.jsonl").write_text('{"text": "anna gives ben the ball"}')
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(contents["short"] * 100))
    shutil.copytree(model / "model", tmp_path / "truncated")
    weights = tmp_path / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    if not (folder / "long").exists():
        prepare([text], folder / "long", codec=byte_codec(), length=100)
    bad = {name: tmp_path / f"{name}.txt" for name in contents}
    bad |= {"lines": tmp_path / "a.jsonl", "packed": tmp_path / "a.txt.gz", "loop": tmp_path / "loop"}
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
    ("error", "says"),
    [
        (lambda: torch.empty(2**50, dtype=torch.uint8), "can't allocate memory"),
        (lambda: np.empty(2**60, np.uint8), "Unable to allocate"),
        (lambda: bytearray(2**62), "no more could be had"),
        (raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")), "2 GiB.\n"),
    ],
    ids=["torch", "numpy", "python", "cuda"],
)
def test_too_little_memory_is_one_line_that_says_what_to_do(error, says, command, monkeypatch):
    monkeypatch.setattr(commands, "app", lambda **_: error())
    ended = command("train", "--text", "my.txt", "--out", "run", "--batch", 10**8)
    assert one_line(ended).startswith(
        "out of memory: try --accumulate, --activation-checkpointing or a smaller --batch; "
    )
    assert says in ended.err
    assert "smaller" not in command("bench").err


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (["train", "--text", "{text}"], "train.run.train"),
        (["distill", "{model}", "--data", "{model}/data"], "train.distill_run.take_steps"),
        (["train-codec", "--images", "{images}", "--width", "32"], "train.codec.train_steps"),
    ],
    ids=["train", "distill", "train-codec"],
)
def test_what_fails_before_its_first_step_leaves_nothing(arguments, steps, text, model, command, monkeypatch, tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((4, 8, 8, 3), np.uint8))
    monkeypatch.setattr(f"maskless.{steps}", raising(torch.OutOfMemoryError("CUDA out of memory.")))
    words = [word.format(text=text, model=model, images=tmp_path / "images.npy") for word in arguments]
    (own := tmp_path / "own").mkdir()
    (own / "notes.txt").write_text("mine")
    for out in (tmp_path / "new", own):
        ended = command(*words, "--out", out)
        assert ended.code == 2
        assert "\nerror: out of memory" in ended.err
    assert not (tmp_path / "new").exists()
    assert [path.name for path in own.iterdir()] == ["notes.txt"]


def test_another_error_of_torch_keeps_its_traceback(command, monkeypatch):
    monkeypatch.setattr(commands, "app", lambda **_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        command("train")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--out", "{run}"], "interrupted; continue with: maskless train --out {run} --resume"),
        (["train-codec", "--out={run}"], "interrupted; continue with: maskless train-codec --out {run} --resume"),
        (["distill", "--out", "{run}"], "interrupted"),
        (["train", "--out", "{run}/new"], "interrupted"),
        (["train"], "interrupted"),
        (["evaluate", "--out", "{run}/new.json"], "interrupted"),
        (["evaluate", "--out", "{run}/run.json"], "interrupted; continue with: maskless evaluate --out {run}/run.json"),
        (["reproduce", "table-5"], "interrupted; continue with: maskless reproduce table-5"),
        (["serve"], "interrupted"),
    ],
)
def test_an_interruption_ends_with_the_command_that_continues(words, says, command, monkeypatch, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(commands, "app", raising(KeyboardInterrupt))
    ended = command(*(word.format(run=tmp_path) for word in words))
    assert ended == (130, "", says.format(run=tmp_path) + "\n")


def test_a_run_that_diverges_ends_with_the_command_that_continues(command, monkeypatch, tmp_path):
    run = tmp_path / "run"
    (run / "states").mkdir(parents=True)
    for states, ends in (([], "in another --out\n"), (["step-00000003.pt"], f"maskless train --out {run} --resume\n")):
        for name in ("run.json", *(f"states/{state}" for state in states)):
            (run / name).touch()
        monkeypatch.setattr(commands, "app", raising(diverged("the loss is nan", 5, run / "states")))
        ended = command("train", "--out", run)
        assert (ended.code, ended.err.count("\n")) == (2, 1)
        assert ended.err.endswith(ends)


def test_an_interruption_inside_an_eval_keeps_the_exit_code(tmp_path):
    """Where typer reads the annotations of a command, and where classes are made of text."""
    (tmp_path / "pressed.py").write_text(
        "from maskless.cli import commands, main\n"
        "def press(): raise KeyboardInterrupt\n"
        "commands.app = lambda **_: eval('press()')\n"
        "main()\n"
    )
    words = [sys.executable, "-m", "pressed"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


STARTS = """
import os, signal, sys

class Pressed:  # Ctrl-C as soon as a module is looked for
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
sys.meta_path.insert(0, Pressed())
from maskless.cli import main
sys.argv[1:] = ["prepare", {text!r}, "--out", {out!r}]
try:
    main()
finally:
    print({last!r} in sys.modules)
"""


@pytest.mark.parametrize(
    ("module", "last"), [("typer", "maskless.cli.serve"), ("torch.distributed", "torch._meta_registrations")]
)
def test_an_interruption_waits_until_modules_are_loaded_and_is_one_line(module, last, text, tmp_path):
    """Where it does not wait, torch aborts now and then, in the start of what `torch.distributed` is made of."""
    script = STARTS.format(module=module, last=last, text=str(text), out=str(tmp_path / "data"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "True\n", "interrupted\n")
    assert list(tmp_path.iterdir()) == []
