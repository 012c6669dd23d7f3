"""The commands `models`, `demo` and `train-demo`: what is shipped with the package, and what it does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from maskless.cli import show
from maskless.cli.options import DEVICE, JSON
from maskless.terminal import say

TEXT = (
    "Once upon a time, there was a dog named Max. Max loved to [8]. One day, Max saw a [4] and [10]. Max was sad "
    "because [10]. Then his friend [16]. They were both very happy."
)

TRY = {  # a line to copy; the settings are each model's own
    "stories": "maskless generate stories",
    "stories-ar": "maskless generate stories-ar",
    "stories-mdlm": "maskless generate stories-mdlm",
    "cifar10": "maskless generate cifar10 --label ship --label horse --out new.png",
}


def models(
    name: Annotated[str | None, typer.Argument(help="A shipped model, to read its card.")] = None,
    as_json: JSON = False,
) -> None:
    """List the models that come with the package, or print the card of one.

    maskless models stories
    """
    from maskless import shipped

    if name is not None:
        text = shipped.card(name)
        say(json.dumps({"name": name, "card": text}) if as_json else text.rstrip())
        return
    found = [shipped.describe(each) for each in shipped.names()]
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
        return
    if not found:
        print("no models are shipped with this version; train one: maskless train --text my.txt --out runs/my")
        return
    table = Table("model", "kind", "parameters", "size", "about")
    for each in found:
        parameters, size = f"{each.parameters / 1e6:.1f} M", f"{each.bytes / 2**20:.1f} MiB"
        table.add_row(each.name, each.kind, parameters, size, each.about)
    show.out.print(table)
    say("try:")
    for each in found:
        say(TRY.get(each.name, f"maskless generate {each.name}"))


def demo(
    model: Annotated[str, typer.Option(help="What writes: a shipped model, or a folder.")] = "stories",
    rival: Annotated[
        list[str] | None,
        typer.Option(help="What it races against; may be repeated. Default: stories-ar, stories-mdlm."),
    ] = None,
    pictures: Annotated[str, typer.Option(help="What draws.")] = "cifar10",
    prompt: Annotated[str, typer.Option(help="What the story begins with.")] = "Once upon a time",
    text: Annotated[str, typer.Option(help="Text with gaps of so many tokens.", show_default=False)] = TEXT,
    to: Annotated[Path, typer.Option("--out", help="The PNG of what is drawn.")] = Path("pictures.png"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same sample.")] = 0,
    device: DEVICE = None,
) -> None:
    """Show the shipped models at work: a story, gaps filled, pictures, and how fast it went.

    maskless demo --text "The \\[3] dog ran to \\[8]."
    """
    from maskless import demo as shown

    models: dict[str, Any] = {"model": model, "drawing": pictures, "rivals": rival or ["stories-ar", "stories-mdlm"]}
    shown.show(show.out, **models, prompt=prompt, text=text, picture=to, seed=seed, device=device)


def train_demo(
    minutes: Annotated[float, typer.Option(help="For training both models.")] = 1.7,
    seed: Annotated[int, typer.Option(help="The same seed gives the same models.")] = 0,
    device: DEVICE = None,
) -> None:
    """Train a small PGM and an MDLM of the same size on a toy language, and compare them."""
    from maskless import train_demo as demonstration

    demonstration.show(show.out, minutes=minutes, seed=seed)
