"""The commands, all of them: each unpacks its options, calls one procedure and shows the result.

Heavy imports stand inside the commands, so that --help answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from maskless.cli.bench import bench
from maskless.cli.evaluate import evaluate, fid
from maskless.cli.generate import fill, generate
from maskless.cli.models import demo, models, train_demo
from maskless.cli.options import NeedsTorch
from maskless.cli.plan import plan
from maskless.cli.prepare import convert, prepare
from maskless.cli.reproduce import reproduce
from maskless.cli.serve import serve
from maskless.cli.train import distill, train, train_codec
from maskless.version import __version__


class Commands(TyperGroup):
    """The commands; an unknown name lists them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise ValueError(f"unknown command {args[0]!r}: expected one of {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="maskless",
    cls=Commands,
    help="Partition generative models: text in parallel and in any order, without a mask token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"maskless {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


of_models = (prepare, train, distill, generate, fill, evaluate, fid, convert)
for command in (demo, *of_models, train_demo, models, plan, reproduce, serve, train_codec):
    kind = None if command is models else NeedsTorch  # models are listed by their cards alone
    app.command(command.__name__.replace("_", "-"), cls=kind)(command)
app.add_typer(bench, name="bench", cls=Commands)
