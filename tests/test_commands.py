"""Every command in the README and the pages of docs/ runs, at toy scale, or is excused with a reason.

A command runs in an empty folder of its own, where only what it names is there: the files of INPUTS, and what another
documented command makes (runs/my, data/reviews), which is run for it. It keeps its options but for those that TOY sets.
Launchers are asked whether they understand their own options, and what they launch runs as one process.
"""

import contextlib
import io
import itertools
import re
import runpy
import shlex
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest

from command_inputs import INPUTS
from maskless.bench import machine
from maskless.cli import app, main
from maskless.evaluate import harness
from maskless.paper import TABLES
from test_docs import ROOT, lines_of, words_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HARNESS = "maskless.evaluate.harness"
TINY = "--width 32 --layers 2 --steps 2 --batch 4 --tracker none --evaluate-every 0"
SEEN = "--features inception.pt --feature-input pixels"
TIMED = "--width 32 --layers 2 --length 16 --vocab 64 --batch 2 --repeat 1 --device cpu"

# What makes a command small: the first row whose words are all in it counts. An option takes the place of one with its
# name, or is added; OLD=NEW replaces a word.
FAR = ("hf:HuggingFaceFW/fineweb-edu@sample-10BT", "s3://bucket/shards", "hf:NAME")
TOY = {
    "prepare --codec": "--size 16",
    "prepare --vocab": "--vocab 300 --length 64",
    **{f"prepare {far}": f"{far}=my.txt --tokenizer bytes --length 64" for far in FAR},
    "prepare openwebtext": "openwebtext=my.txt --tokenizer bytes --length 64",
    "prepare --tokenizer": "--tokenizer bytes --length 64",
    "train --resume": "--steps 3",
    "train --text": f"{TINY} --tokenizer bytes --length 96",
    "train stories-ar": TINY,
    "train stories-mdlm": TINY,
    "train --recipe": f"{TINY} --encoder 1",
    "train": TINY,
    "train-codec": "--size 16 --factor 4 --codes 16 --width 32 --latent 8 --blocks 1 --steps 2 --batch 4",
    "distill --resume": "",
    "distill": "--rounds 1 --steps-per-round 2 --batch 4 --tracker none",
    "convert": "--tokenizer bytes",
    "models": "",
    "plan": "",
    "demo": "--rival stories-ar",
    "generate samples": "--n 3 --steps 4",
    "generate --strands": "",
    "generate --exact": "",
    "generate": "--steps 4",
    "fill --box": "--steps 1",
    "fill": "",
    "evaluate --reference": f"{SEEN} --samples 10 --steps 4",
    "evaluate bound,genppl,orders,leak,variance": "--steps 2,4 --texts 3 --sequences 4 --samples 2 --pairs 2 --batch 2",
    "evaluate genppl": "--judge judge --steps 2,4 --texts 3",
    "evaluate orders": "--steps 2,4 --texts 3 --sequences 4 --samples 2",
    "evaluate variance": "--pairs 2 --batch 2",
    "evaluate leak": "",
    "evaluate parallel": "--texts 2",
    "evaluate": "--sequences 4 --samples 2",
    "fid": SEEN,
    "bench sample": f"{TIMED} --encoder 1 --steps 2,4",
    "bench train": TIMED,
    "reproduce --features": "--scale toy --feature-input pixels",
    "reproduce --dry-run": "",
    "reproduce paper": "--dry-run",
    "reproduce --data": "--scale toy",
    "reproduce": "",
    "serve": "--port 0 --device cpu",
    f"{HARNESS} mine": "--device cpu",
}

# What no toy can stand in for, by how its line begins, and why.
NOT_RUN = {
    "make ": "sets up an environment from the network first; what it runs then has tests of its own",
    "pip install": "installs from the network",
    "maskless serve runs/my --devices": "needs four GPUs; tests/serve/test_workers.py has two workers on the CPU",
    "torchrun --nproc-per-node 8 -m maskless train --data data/reviews --out runs/reviews --fsdp": (
        "shards over GPUs; tests/train/test_sharded.py has such a run on the CPU"
    ),
    "python tools/stories.py": "its model comes from the network; tests/test_stories.py runs it with a small one",
    f"python -m {HARNESS} --model_args pretrained=runs/my --tasks paper": "its eleven data sets come from a hub",
    f"accelerate launch -m {HARNESS} --model_args pretrained=runs/my,form=joint --tasks lambada_openai": (
        "its data set comes from a hub"
    ),
}

# What a page has at hand, and no command in the pages makes.
MADE_BY = {
    "runs/my-mdlm": "maskless train --text my.txt --out runs/my-mdlm --model mdlm",
    "runs/my-ar": "maskless train --text my.txt --out runs/my-ar --model ar",
    "runs/digits": "maskless train --data data/photos --out runs/digits",
}


# Lines of the pages

FOUND = [(line, page.name) for page in PAGES for line in lines_of(page)]
PAGE = dict(reversed(FOUND))  # the first that has a line
LINES = list(dict.fromkeys(line for line, _ in FOUND))
RUN = [line for line in LINES if not line.startswith(tuple(NOT_RUN))]


def launched(line: str) -> list[str]:
    """The words that maskless gets, after its name; of another module or a script, after that."""
    words = words_of(line)
    match words:
        case ["torchrun", *rest]:
            from torch.distributed.run import parse_args

            given = parse_args(rest)
        case ["accelerate", "launch", *rest]:
            from accelerate.commands.launch import launch_command_parser

            given = launch_command_parser().parse_args(rest)
        case ["maskless", *rest] | ["python", "-m", "maskless", *rest]:
            return rest
        case ["python", "-m", module, *rest] | ["python", module, *rest]:
            return [module, *rest]
        case _:
            return words
    assert given.module, f"{line}: expected -m before a module"
    name = [] if given.training_script == "maskless" else [given.training_script]
    return [*name, *given.training_script_args]


def row_for(words: list[str]) -> str:
    """The row of TOY that makes a command small."""
    return next((row for row in TOY if row.split()[0] == words[0] and set(row.split()) <= {*words}), "")


def small(line: str) -> list[str]:
    """The words of a command at toy scale."""
    words = launched(line)
    if words[0].startswith("examples/"):
        return words  # they take a model, and that is small
    row = row_for(words)
    assert row, (
        f"`{line}` in {PAGE.get(line)} is in no table of {Path(__file__).name}: give TOY a row that makes it small "
        "(and INPUTS what it reads), or NOT_RUN the reason why it cannot run here"
    )
    changes = TOY[row].split()
    for change, value in itertools.zip_longest(changes, changes[1:], fillvalue="--"):
        if not change.startswith("--"):
            old, is_swap, new = change.partition("=")
            words = [new if is_swap and word == old else word for word in words]
        elif value.startswith("--") or "=" in value:
            words = [*words, *([] if change in words else [change])]
        elif change in words:
            at = words.index(change) + 1
            words = [*words[:at], value, *words[at + 1 :]]
        else:
            words = [*words, change, value]
    return words


def made(words: list[str]) -> str | None:
    """The folder that a command makes for others to use."""
    match words:
        case ["convert", _, folder, *_]:
            return folder
        case ["prepare" | "train" | "train-codec" | "distill", *_] if "--out" in words and "--resume" not in words:
            return words[words.index("--out") + 1].rstrip("/")
    return None


ALONE = [line for line in RUN if line.startswith("maskless ")]  # by no launcher
MAKER = {folder: line for line in reversed(ALONE) if (folder := made(launched(line)))} | MADE_BY


def read_by(words: list[str]) -> set[str]:
    """The inputs and made folders that a command names, but for the one that it makes."""
    parts = [part.removesuffix(":train").removesuffix(":valid") for word in words for part in re.split("[=,]", word)]
    known = {*INPUTS, *MAKER} - {made(words)}
    return {root for root in known for part in parts if part.rstrip("/") == root or part.startswith(f"{root}/")}


# Running them

LEFT = ("--out", "--gif", "--heat", "--plot", "--compare", "--save-statistics", "--output_path")  # each names a result


class House:
    """Runs commands, each once, and keeps what they made for those that need it."""

    def __init__(self, folder: Path):
        self.folder, self.inputs, self.numbers = folder, folder / "inputs", itertools.count()
        self.done: dict[tuple[str, ...], Path] = {}
        self.inputs.mkdir()

    def place(self, name: str) -> Path:
        """Where an input or a made folder is."""
        if name not in INPUTS:
            return self.run(MAKER[name]) / name
        path = self.inputs / name
        if not path.exists():
            INPUTS[name](path)
        return path

    def run(self, line: str, *asks: str) -> Path:
        """Run a command at toy scale and return its folder; asks: requests to the server that it starts."""
        if (line, *asks) in self.done:
            return self.done[line, *asks]
        words = small(line)
        sources = {name: self.place(name) for name in sorted(read_by(words))}
        folder = self.folder / str(next(self.numbers))
        for name, source in sources.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if "--resume" in words:
                shutil.copytree(source, folder / name)
            else:
                (folder / name).symlink_to(source)
        folder.mkdir(exist_ok=True)
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.chdir(folder)
            code = run_here(patch, words, asks)
        assert code == 0, f"`{line}` run as `{shlex.join(words)}` ended with {code}: {err.getvalue()[-2000:]}"
        for option, value in itertools.pairwise(words):
            assert option not in LEFT or (folder / value).exists(), f"`{line}` left no {value}"
        self.done[line, *asks] = folder
        return folder


def run_here(patch: pytest.MonkeyPatch, words: list[str], asks: tuple[str, ...]) -> int:
    """Run a command in this process; returns its exit code."""
    patch.setattr(sys, "argv", ["maskless", *words])
    patch.setattr(threading, "excepthook", threading.excepthook)
    patch.setattr("maskless.reproduce.run.child", in_turn)
    patch.setattr("maskless.train.run.plot_losses", lambda *_: None)  # tests/cli has a run that draws them
    patch.setattr("maskless.demo.PICTURE_STEPS", 2)
    patch.setattr("maskless.demo.RACE_TEXTS", 1)
    patch.setattr(machine, "SIDE", {"cpu": 128})  # what `bench` measures the ceilings of a machine with
    patch.setattr(machine, "COPIED", {"cpu": 2**22})
    for name, table in TABLES.items():  # of a table a few lines, from all over it
        patch.setitem(TABLES, name, replace(table, lines=table.lines[:: 1 + len(table.lines) // 3]))
    try:
        if words[0].startswith("examples/"):
            patch.setattr(sys, "argv", words)
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        elif words[0] == HARNESS:
            tasks = pytest.importorskip("lm_eval.tasks", reason="needs lm-eval: pip install 'maskless[lm-eval]'")
            patch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))  # 14,000 of them
            patch.setenv("HF_DATASETS_OFFLINE", "1")
            harness.main(words[1:])
        else:
            if words[0] == "serve":
                uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'maskless[web]'")
                patch.setattr(uvicorn.Server, "run", partialmethod(asked, uvicorn.Server.run, asks))
            main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def in_turn(command: Any) -> str:
    """What `reproduce` would run in a process of its own."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app(list(command[1:]), standalone_mode=False)
    return out.getvalue()


def asked(server: Any, run: Callable[..., None], asks: tuple[str, ...], sockets: list[Any]) -> None:
    """Let a server run beside, ask it for its page or what the lines of curl say, and stop it."""
    thread = threading.Thread(target=run, args=(server, sockets))
    thread.start()
    try:
        for _ in range(6000):
            if server.started:
                break
            time.sleep(0.01)
        host = f"127.0.0.1:{sockets[0].getsockname()[1]}"
        for words in [words_of(ask) for ask in asks] or [["curl", "localhost:8000/"]]:
            url = next(word for word in words if word.startswith("localhost:8000/"))
            body = words[words.index("--json") + 1].encode() if "--json" in words else None
            request = urllib.request.Request(
                url.replace("localhost:8000", f"http://{host}"), body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200
                assert answer.read()
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> House:
    return House(tmp_path_factory.mktemp("commands"))


@pytest.mark.parametrize("line", RUN, ids=RUN)
def test_a_command_of_the_pages_runs(house, line):
    if line.startswith("curl "):
        serve = next(other for other in RUN if other.startswith("maskless serve") and PAGE[other] == PAGE[line])
        house.run(serve, line)
    else:
        house.run(line)


def test_a_wrong_line_is_noticed(house):
    with pytest.raises(AssertionError, match="ended with 2: error: No such option: --nosuch"):
        house.run("maskless fid photos photos --nosuch")
    with pytest.raises(AssertionError, match="ended with 2: error: nowhere: no such file or folder"):
        house.run("maskless fid photos nowhere")
