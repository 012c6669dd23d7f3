"""Options of the commands, as tables: a command takes a table whole, and gets those of its options that were given.

A table says of each field of a dataclass what the user may write and what it means, once. Where the module of the
dataclass loads without torch, `options_of` makes the table; --help must not wait for torch, so the others are written
beside the command, and tests hold the two together, field by field (tests/cli/test_options.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from maskless.cli import show
from maskless.train.interruption import Interruption

MODEL = Annotated[str, typer.Argument(help="A run or model folder, a shipped model, a hub id, or a released file.")]
TOKENIZER = Annotated[str | None, typer.Option(help="gpt2, bert, bytes, or a file; for models that bring none.")]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]


def _use(device: str | None) -> str | None:
    """The device that was named, if it is here; where Accelerate or torch choose one, they choose it too."""
    if device is None:
        return None
    with Interruption():
        import torch

        from maskless.api import check_device
    check_device(device)
    if torch.device(device).type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    elif torch.device(device).index is not None:
        torch.get_device_module(device).set_device(device)
    return device


DEVICE = Annotated[
    str | None,
    typer.Option(
        callback=_use,
        envvar="MASKLESS_DEVICE",
        show_envvar=False,
        help="cpu, cuda or cuda:1. Default: $MASKLESS_DEVICE, or the GPU where there is one.",
    ),
]

Given = dict[str, Any]  # options by their fields: those that were given


@dataclasses.dataclass(frozen=True)
class Option:
    """What may be given for a field; `name` where it is not the field's own, such as --lr."""

    type: Any
    help: str
    name: str | None = None
    metavar: str | None = None

    def parameter(self, field: str) -> inspect.Parameter:
        said = typer.Option(None, *filter(None, [self.name]), help=self.help, metavar=self.metavar, show_default=False)
        return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=said, annotation=self.type | None)


Options = dict[str, Option]


def options_of(settings: Any) -> Options:
    """The table of a dataclass whose fields say in their metadata what they mean (help), and what they may be (of)."""
    hints, table = get_type_hints(settings), {}
    for field in dataclasses.fields(settings):
        kinds = {*get_args(hints[field.name])} - {type(None)} or {hints[field.name]}  # int | None -> int
        words = [field.metadata["help"]]
        if names := field.metadata.get("of"):
            words.append(f"One of {', '.join(names)}.")
        if (default := field.default) is not None and default is not False:
            words.append(f"Default: {default:g}." if isinstance(default, float) else f"Default: {default}.")
        table[field.name] = Option(kinds.pop(), " ".join(words))
    return table


def with_tables(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: a parameter that is `Annotated[Given, TABLE]` becomes the options of the table."""
    hints = get_type_hints(command, include_extras=True)
    found = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    tables: dict[str, Options] = {name: table for name, table in found.items() if isinstance(table, dict)}
    parameters: list[inspect.Parameter] = []
    for name, own in inspect.signature(command).parameters.items():
        of_table = [option.parameter(field) for field, option in tables.get(name, {}).items()]
        parameters += of_table or [own.replace(annotation=hints[name])]

    @functools.wraps(command)
    def called(**options: Any) -> None:
        for name, table in tables.items():
            options[name] = {field: value for field in table if (value := options.pop(field)) not in (None, [])}
        command(**options)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


class NeedsTorch(TyperCommand):
    """A command that begins with loading torch; Ctrl-C waits for it, since in there it would abort the process."""

    def invoke(self, ctx: Any) -> Any:
        with Interruption(), show.waiting("starting"):
            import torch  # noqa: F401
        return super().invoke(ctx)
