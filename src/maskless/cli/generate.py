"""The commands `generate` and `fill`: texts to stdout, pictures to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskless.cli import show
from maskless.cli.checks import check_places, launched_together, refuse
from maskless.cli.options import DEVICE, JSON, MODEL, TOKENIZER, Given, Option, Options, options_of, with_tables
from maskless.how import How
from maskless.terminal import say

if TYPE_CHECKING:
    from maskless.checkpoint import Model
    from maskless.texts import Text

HOW = options_of(How)
TEXT: Options = {
    "prompt": Option(str, "What each text begins with."),
    "length": Option(int, "Tokens. Default: the model's context."),
}
PICTURES: Options = {
    "label": Option(list[str], "Pictures: a class, by name or number; repeat it."),
    "sheet": Option(bool, "Pictures: a captioned sheet even for a single one.", "--sheet"),
    "gif": Option(Path, "Pictures: a GIF of how they came."),
    "heat": Option(Path, "Pictures: a PNG of when each cell was decided."),
}
PICTURE: Options = {
    "known": Option(Path, "Pictures: a mask of the same size, white where it stays."),
    "box": Option(str, "Pictures: the pixels to draw again instead, LEFT,TOP,RIGHT,BOTTOM."),
    "label": Option(str, "Pictures: its class, by name or number."),
    "out": Option(Path, "Pictures: the PNG to write."),
    "compare": Option(Path, "Pictures: a PNG of before, what was kept, and after."),
}
BATCH = 128  # texts that are drawn together, and printed before the next ones


@with_tables
def generate(
    *,
    model: MODEL,
    n: Annotated[int | None, typer.Option(help="How many. Default: 4, or one for each --label.")] = None,
    text: Annotated[Given, TEXT],
    how: Annotated[Given, HOW],
    of_pictures: Annotated[Given, PICTURES],
    out: Annotated[
        Path | None,
        typer.Option(help="Text: a folder for JSONL files. Pictures: a PNG (a sheet for several), or a folder."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Generate only what is missing in --out.")] = False,
    tokenizer: TOKENIZER = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Write texts to stdout or into a folder, or pictures to a file.

    maskless generate runs/my --n 4 --steps 32 --seed 0 --temperature 1 --top-p 0.9

    maskless generate runs/photos --label cat --label ship --guidance 6 --out pictures.png

    accelerate launch --num_processes 8 -m maskless generate runs/my --n 100000 --out samples
    """
    if out is None and (resume or launched_together()):
        raise ValueError("--resume, and several processes, go with --out FOLDER")
    own: Any = device
    if launched_together():  # each process has a device of its own
        from maskless.train.processes import processes

        own = processes().device
    loaded = show.loading(model, tokenizer=tokenizer, device=own)
    _check_kind(loaded, text, of_pictures, as_json)
    if n is None and "label" not in of_pictures:
        n = 4
    if loaded.layout == "image":
        from maskless.cli import pictures

        pictures.draw(loaded, n, out=out, resume=resume, **of_pictures, **how)
        return
    from maskless import api

    assert n is not None
    if out is not None:
        _write(loaded, out, n, resume, **text, **how)
        return
    for first in range(0, max(1, n), BATCH):
        with show.watching("generating", loaded.text_codec.marks) as on_step:
            count = min(BATCH, n - first)
            texts = api.generate(loaded, count, first=first, batch=BATCH, on_step=on_step, **text, **how)
        for number, one in enumerate(texts, first):
            if n > 1 and not as_json:
                show.err.rule(f"sample {number}", style="dim")
            _say(one, as_json)


@with_tables
def fill(
    *,
    model: MODEL,
    what: Annotated[
        str,
        typer.Argument(help="Text with gaps of so many tokens: 'The \\[8] sat on \\[12].' Or the file of a picture."),
    ],
    n: Annotated[int | None, typer.Option(help="Text: how many fillings. Default: 1.")] = None,
    how: Annotated[Given, HOW],
    of_pictures: Annotated[Given, PICTURE],
    tokenizer: TOKENIZER = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Fill the gaps of a text, any number of them, in any order, onto stdout; or draw a part of a picture again.

    maskless fill runs/my "The \\[8] sat on \\[12]." --steps 16 --seed 0

    maskless fill runs/photos cat.png --box 16,0,48,32 --label cat --out new.png --compare both.png
    """
    loaded = show.loading(model, tokenizer=tokenizer, device=device)
    _check_kind(loaded, {} if n is None else {"n": n}, of_pictures, as_json)
    if loaded.layout == "image":
        from maskless.cli import pictures

        pictures.fill(loaded, Path(what), **of_pictures, **how)
        return
    from maskless import api

    with show.watching("filling", loaded.text_codec.marks) as on_step:
        filled = api.fill(loaded, what, n=1 if n is None else n, on_step=on_step, **how)
    for one in filled:
        _say(one, as_json)


def _write(model: Model, to: Path, n: int, resume: bool, **how: Any) -> None:
    """Texts into a folder, shared out over processes."""
    from maskless.shards import write_texts
    from maskless.train.processes import processes

    check_places(to)
    if to.suffix.lower() in (".png", ".txt", ".md", ".json", ".jsonl"):
        raise ValueError(f"--out {to}: expected a folder for texts; to write them to a file, redirect stdout: > FILE")
    if to.exists() and not to.is_dir():
        raise ValueError(f"{to} is a file: expected a folder for texts")
    with show.watching("generating", model.text_codec.marks) as on_step:
        files = write_texts(model, to, n, resume=resume, on_step=on_step, **how)
    if processes().is_main_process:
        say(f"{to}: {n} texts in {files} file{'s' * (files > 1)}")


def _check_kind(model: Model, text: Given, of_pictures: Given, as_json: bool) -> None:
    """Raise a ValueError about an option that does not concern models of this kind."""
    if model.layout == "image":
        refuse([*text, *["json"] * as_json], "text")
    else:
        refuse(of_pictures, "image")


def _say(text: Text, as_json: bool) -> None:
    say(json.dumps(text.as_dict()) if as_json else text)
