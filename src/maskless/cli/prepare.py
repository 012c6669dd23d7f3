"""The commands `prepare` and `convert`: token files of text or pictures, a model folder of a released checkpoint."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maskless.cli import show
from maskless.cli.checks import flag, launched_together
from maskless.cli.options import DEVICE, TOKENIZER, Given, Option, Options, with_tables
from maskless.terminal import say

if TYPE_CHECKING:
    from accelerate import PartialState

PATIENCE = timedelta(days=30)
TEXT: Options = {
    "tokenizer": Option(str, "gpt2, bert, bytes, a hub id, or a file."),
    "vocab": Option(int, "Train a BPE with this vocabulary size instead."),
    "length": Option(int, "Tokens in a sequence. Default: 256."),
    "layout": Option(str, "packed (default), wrapped (BOS ... EOS) or padded (a document each)."),
    "field": Option(str, "The field of a JSON line with the text. Default: text."),
    "max_line": Option(str, "How long a JSON line may be. Default: 256MB.", metavar="SIZE"),
}
PICTURES: Options = {
    "codec": Option(str, "Pictures: a codec, or pixels:LEVELS."),
    "size": Option(int, "Pictures: pixels a side."),
    "flips": Option(bool, "Pictures: mirror them as well.", "--flips"),
}


@with_tables
def prepare(
    *,
    inputs: Annotated[list[str], typer.Argument(help="Files, folders, addresses, lm1b, openwebtext or hf:NAME.")],
    to: Annotated[Path, typer.Option("--out", help="The folder to make.")],
    text: Annotated[Given, TEXT],
    of_pictures: Annotated[Given, PICTURES],
    valid: Annotated[float, typer.Option(help="The share of documents held out for validation.")] = 0.05,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder prepared before.")] = False,
    max_unpacked: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a packed file may hold. Default: 100 times its size, at least 1GB."),
    ] = None,
    device: DEVICE = None,
) -> None:
    """Turn text, or pictures, into token files.

    maskless prepare reviews.jsonl.xz --out data/reviews --vocab 8192 --length 256

    maskless prepare photos/ --out data/photos --codec runs/codec --size 64

    torchrun --nproc-per-node 8 -m maskless prepare hf:NAME --out data/large --tokenizer gpt2 --length 1024
    """
    from maskless.codec.text import codec
    from maskless.data.images import looks_like_images
    from maskless.data.remote import is_address
    from maskless.data.unpack import InputLimits, in_bytes

    sizes = {"unpacked": max_unpacked, "line": text.get("max_line")}
    limits = InputLimits(**{name: in_bytes(size) for name, size in sizes.items() if size is not None})
    how: Given = {"valid": valid, "overwrite": overwrite, "limits": limits}
    local = [name for name in inputs if not name.startswith("hf:") and not is_address(name)]  # else --codec says it
    if "codec" in of_pictures or (local and looks_like_images(local, limits)):
        for name in text:
            raise ValueError(f"{flag(name)} is for text: these are pictures")
        if launched_together():
            raise ValueError("pictures are prepared by one process: start it without a launcher")
        from maskless.cli import pictures

        pictures.prepare(inputs, to, device=device, **of_pictures, **how)
        return
    for name in of_pictures:
        raise ValueError(f"{flag(name)} is for pictures: this is text")
    text.pop("max_line", None)
    if {"tokenizer", "vocab"} <= text.keys():
        raise ValueError("--tokenizer and --vocab exclude each other: take a tokenizer, or train one")
    encoding = {"codec": codec(text.pop("tokenizer"))} if "tokenizer" in text else {"vocab": 8192}
    together = _together() if launched_together() else None
    prepared = show.preparing(inputs, to, together=together, **{"length": 256} | encoding | text | how)
    if together is not None and not together.is_main_process:
        return
    splits = ", ".join(f"{s.rows:,} rows ({s.tokens:,} tokens) {name}" for name, s in prepared.splits.items())
    say(f"{to}: {splits}; vocabulary {prepared.vocab:,}, length {prepared.length}")


def _together() -> PartialState:
    """The processes that share the work. Who is done early waits for the others, however long they take."""
    from accelerate import PartialState

    return PartialState(cpu=True, timeout=PATIENCE)


def convert(
    file: Annotated[Path, typer.Argument(help="A checkpoint that the paper's authors released.")],
    to: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to make.")],
    weights: Annotated[str, typer.Option(help="ema or raw.")] = "ema",
    queries: Annotated[str | None, typer.Option(help="position, mean or logsumexp, if the file does not say.")] = None,
    tokenizer: TOKENIZER = None,
    image_codec: Annotated[
        str | None, typer.Option("--codec", help="Pictures: what made its tokens, such as vq_ds8_c2i.pt.")
    ] = None,
) -> None:
    """Turn a released checkpoint into a model folder, without running anything from it.

    maskless convert pgm_8_8.ckpt models/pgm-8-8 --tokenizer gpt2

    maskless convert pgm_12_12.pth models/imagenet --codec vq_ds8_c2i.pt
    """
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    converted = show.loading(file, weights=weights, queries=queries, tokenizer=tokenizer, device="cpu")
    if image_codec is not None:
        from maskless.cli import pictures

        pictures.give_codec(converted, image_codec)
    with show.waiting(f"writing {to}"):
        converted.save_pretrained(to)
    say(f"{to}: {converted.config}")
