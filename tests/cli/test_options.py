"""Tables of options have the fields of the dataclasses that they stand for, and commands get what was given."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import typer
from typer.main import get_command

from maskless.bench.case import SampleCase, TrainCase
from maskless.cli import app, bench, generate, plan, train
from maskless.cli.options import Given, Option, Options, options_of, with_tables
from maskless.codec.vq import VQConfig
from maskless.how import How
from maskless.train.codec_loop import CodecConfig
from maskless.train.config import TrainConfig
from maskless.train.distill_run import DistillConfig
from maskless.train.plan import _sizes

COMMANDS: dict[str, Any] = get_command(app).commands
BENCH: dict[str, Any] = COMMANDS["bench"].commands


def types(of: Any) -> dict[str, Any]:
    """The type of each field of a dataclass, or of each keyword of a function, without the None that it may be."""
    hints = get_type_hints(of)
    if dataclasses.is_dataclass(of):
        names = [field.name for field in dataclasses.fields(of)]
    else:
        names = [one.name for one in inspect.signature(of).parameters.values() if one.kind is one.KEYWORD_ONLY]
    return {name: next(iter({*get_args(hints[name])} - {type(None)}), hints[name]) for name in names}


def without(of: dict[str, Any], *names: str) -> dict[str, Any]:
    assert {*names} <= of.keys()
    return {name: value for name, value in of.items() if name not in names}


NETWORK = (
    without(types(_sizes), "heads") | dict.fromkeys(("context", "queries", "swap", "rope"), str) | {"neighbours": int}
)
LISTS = dict.fromkeys(("length", "batch", "steps"), str)  # of a benchmark: several numbers
NOT_ASKED = ("images", "codec", "warmup", "clip", "commitment")


@pytest.mark.parametrize(
    ("commands", "table", "fields"),
    [
        ([COMMANDS["generate"], COMMANDS["fill"]], generate.HOW, types(How)),
        ([COMMANDS["train"]], train.TRAINING, types(TrainConfig)),
        ([COMMANDS["train"]], train.NETWORK, NETWORK),
        ([COMMANDS["distill"]], train.ROUND, without(types(TrainConfig), *train.OF_THE_MODEL)),
        (
            [COMMANDS["distill"]],
            train.DISTILLING,
            without(types(DistillConfig), "source", "data", "train", "fingerprint"),
        ),
        ([COMMANDS["train-codec"]], train.CODEC_TRAINING, without(types(CodecConfig), *NOT_ASKED)),
        (
            [COMMANDS["train-codec"]],
            train.CODEC_SIZES,
            {"factor": int} | without(types(VQConfig), "multipliers", "channels"),
        ),
        (
            [COMMANDS["plan"]],
            plan.SIZES,
            without(types(TrainCase), "precision") | {"steps": int, "tokens": float, "classes": int},
        ),
        ([BENCH["sample"]], bench.SAMPLING, without(types(SampleCase), "precision") | LISTS),
        ([BENCH["train"]], bench.TRAINING, without(types(TrainCase) | LISTS, "precision", "steps")),
    ],
    ids=lambda value: value[0].name if isinstance(value, list) else "",
)
def test_every_field_is_an_option_and_every_option_a_field(commands, table: Options, fields):
    assert {name: option.type for name, option in table.items()} == fields
    for command in commands:
        options = {one.name: one.opts for one in command.params}
        for name, option in table.items():
            assert options[name][0] == (option.name or f"--{name.replace('_', '-')}")


COMPUTING = {*COMMANDS} - {"convert", "models", "bench", "plan"}


def test_every_command_that_computes_takes_the_same_device():
    computing = {name: COMMANDS[name] for name in COMPUTING} | BENCH
    found = {name: [one for one in command.params if one.name == "device"] for name, command in computing.items()}
    assert [name for name, options in found.items() if len(options) != 1] == []
    assert len({(*options[0].opts, options[0].help) for options in found.values()}) == 1


@pytest.mark.parametrize("words", ["generate stories", "train --text a --out b", "fid a b", "serve", "bench sample"])
def test_a_device_that_is_not_here_is_one_line_before_anything_is_read(words, command):
    for device in ("gpu", "cuda:99"):
        ended = command(*words.split(), "--device", device)
        assert (ended.code, ended.out) == (2, "")
        assert re.fullmatch(f"error: device '{device}' cannot be used: expected cpu; .*cuda.*\n", ended.err, re.I)


def test_what_finds_a_device_by_itself_finds_the_one_that_was_chosen(command, monkeypatch):
    found = []
    monkeypatch.setattr("maskless.train_demo.show", lambda *_, **__: found.append(os.environ["ACCELERATE_USE_CPU"]))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert command("train-demo", "--device", "cpu").code == 0
    monkeypatch.setenv("MASKLESS_DEVICE", "abacus")
    assert command("train-demo").code == 2
    assert found == ["true"]


def test_every_option_has_a_help_text():
    params = [(command.name, one) for command in (*COMMANDS.values(), *BENCH.values()) for one in command.params]
    assert len(params) > 200
    assert [(name, one.name) for name, one in params if not (one.help or "").endswith((".", "..."))] == []


@dataclasses.dataclass
class Settings:
    steps: int | None = dataclasses.field(default=None, metadata={"help": "Steps. Default: as suits the model."})
    counts: str = dataclasses.field(default="uniform", metadata={"help": "Per step.", "of": ("uniform", "mdlm")})


def test_a_table_is_made_of_a_dataclass_that_says_what_its_fields_mean():
    assert options_of(Settings) == {
        "steps": Option(int, "Steps. Default: as suits the model."),
        "counts": Option(str, "Per step. One of uniform, mdlm. Default: uniform."),
    }


TABLE = {
    "steps": Option(int, "Steps."),
    "learning_rate": Option(float, "Rate.", "--lr"),
    "label": Option(list[str], "Labels."),
    "flip": Option(bool, "Mirror."),
}


def test_a_command_gets_what_was_given_and_nothing_else():
    calls = []

    @with_tables
    def run(*, name: str, how: Annotated[Given, TABLE], loud: bool = False) -> None:
        """Do it."""
        calls.append((name, how, loud))

    app = typer.Typer()
    app.command()(run)
    for words in ("a", "b --lr 0.5 --no-flip", "c --steps 0 --label x --label y --loud"):
        get_command(app)(words.split(), standalone_mode=False)
    assert calls == [
        ("a", {}, False),
        ("b", {"learning_rate": 0.5, "flip": False}, False),
        ("c", {"steps": 0, "label": ["x", "y"]}, True),
    ]
    assert run.__doc__ == "Do it."


LOADED = """
import sys
from maskless.cli import main
for words in (["--help"], ["train", "--help"], ["generate", "--help"], ["bench", "sample", "--help"], ["models"]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, words
print({"torch", "accelerate", "PIL", "transformers", "fastapi", "matplotlib"} & {*sys.modules})
"""


def test_help_and_the_list_of_models_load_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
