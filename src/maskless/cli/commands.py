"""The commands: each unpacks its options, calls one procedure and shows the result.

Heavy imports stand inside the commands, so that --help answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from maskless.cli import pictures, run_options, show
from maskless.cli.bench import bench
from maskless.cli.codec import train_codec
from maskless.cli.distill import distill
from maskless.cli.evaluate import evaluate, fid
from maskless.cli.generate import TOKENIZER, fill, generate
from maskless.cli.models import demo, models
from maskless.cli.reproduce import reproduce
from maskless.cli.serve import serve
from maskless.version import __version__

if TYPE_CHECKING:
    from maskless.data.unpack import InputLimits


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


@app.command()
def prepare(
    inputs: Annotated[list[str], typer.Argument(help="Files, folders, lm1b, openwebtext or hf:NAME.")],
    to: Annotated[Path, typer.Option("--out", help="The folder to make.")],
    tokenizer: Annotated[str | None, typer.Option(help="gpt2, bert, bytes, a hub id, or a file.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Train a BPE of this size on the text instead.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a sequence. Default: 256.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="packed (default), wrapped (BOS ... EOS) or padded (a document each).")
    ] = None,
    valid: Annotated[float, typer.Option(help="The share of documents held out for validation.")] = 0.05,
    field: Annotated[str | None, typer.Option(help="The field of a JSON line with the text. Default: text.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a folder prepared before.")] = False,
    image_codec: Annotated[str | None, typer.Option("--codec", help="Pictures: a codec, or pixels:LEVELS.")] = None,
    size: Annotated[int | None, typer.Option(help="Pictures: pixels a side.")] = None,
    flips: Annotated[bool, typer.Option("--flips", help="Pictures: mirror them as well.")] = False,
    max_unpacked: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a packed file may hold. Default: 100 times its size, at least 1GB."),
    ] = None,
    max_line: Annotated[
        str | None, typer.Option(metavar="SIZE", help="How long a JSON line may be. Default: 256MB.")
    ] = None,
) -> None:
    """Turn text, or pictures, into token files.

    maskless prepare reviews.jsonl.xz --out data/reviews --vocab 8192 --length 256

    maskless prepare photos/ --out data/photos --codec runs/codec --size 64
    """
    from maskless.codec.text import codec
    from maskless.data.unpack import InputLimits, in_bytes

    said = run_options.given({"unpacked": max_unpacked, "line": max_line})
    limits = InputLimits(**{name: in_bytes(value) for name, value in said.items()})
    of_text = {"tokenizer": tokenizer, "vocab": vocab, "length": length, "layout": layout, "field": field}
    of_text |= {"max-line": max_line}
    are_images = image_codec is not None or _are_images(inputs, limits)
    foreign = of_text if are_images else {"size": size, "flips": flips or None}
    kinds = ("text", "these are pictures") if are_images else ("pictures", "this is text")
    for name, value in foreign.items():
        if value is not None:
            raise ValueError(f"--{name} is for {kinds[0]}: {kinds[1]}")
    if are_images:
        pictures.prepare(inputs, to, image_codec, size, flips=flips, valid=valid, overwrite=overwrite, limits=limits)
        return
    if tokenizer is not None and vocab is not None:
        raise ValueError("--tokenizer and --vocab exclude each other: take a tokenizer, or train one")
    prepared = show.preparing(
        inputs,
        to,
        codec=None if tokenizer is None else codec(tokenizer),
        vocab=8192 if tokenizer is None and vocab is None else vocab,
        length=256 if length is None else length,
        layout=layout or "packed",
        valid=valid,
        field=field or "text",
        overwrite=overwrite,
        limits=limits,
    )
    sizes = ", ".join(f"{s.rows:,} rows ({s.tokens:,} tokens) {name}" for name, s in prepared.splits.items())
    show.out.print(
        f"{to}: {sizes}; vocabulary {prepared.vocab:,}, length {prepared.length}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@app.command()
def train(
    to: Annotated[Path, typer.Option("--out", help="The run's folder.")],
    text: Annotated[list[str] | None, typer.Option(help="Text to train on; everything else has a default.")] = None,
    data: Annotated[Path | None, typer.Option(help="A prepared folder.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A row of the paper's tables, by name; needs --data.")] = None,
    model: Annotated[
        str | None, typer.Option(help="pgm (default), mdlm, mdlm-complementary, ar; pictures: maskgit.")
    ] = None,
    minutes: run_options.MINUTES = None,
    resume: run_options.RESUME = False,
    objective: Annotated[
        str | None, typer.Option(help="pgm: chain (default), or partition (two groups, as in the paper).")
    ] = None,
    orders: Annotated[
        str | None, typer.Option(help="Chain: shares of orders (also left). Default: random=25,strands=50,gaps=25.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="pgm with two groups: full, or ordered (can be cached, as a chain always is).")
    ] = None,
    queries: Annotated[str | None, typer.Option(help="pgm: position (default), mean or logsumexp.")] = None,
    swap: Annotated[
        str | None, typer.Option(help="pgm: gated (default of a chain), released (of two groups) or residual.")
    ] = None,
    rope: Annotated[str | None, typer.Option(help="pgm of pictures: 1d (default), or 2d, by row and column.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Loss weights: bounded (default), released, exact; pictures: arccos.")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Of the network. Default: 512 on CUDA, else 128.")] = None,
    layers: Annotated[int | None, typer.Option(help="In all; pgm has half of them in its encoder.")] = None,
    encoder: Annotated[int | None, typer.Option(help="pgm: how many of the layers.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Default: 0.1.")] = None,
    vocab: Annotated[int | None, typer.Option(help="With --text: the size of the BPE.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="With --text: gpt2, bert, bytes, or a file.")] = None,
    length: Annotated[int | None, typer.Option(help="With --text: tokens in a sequence.")] = None,
    steps: Annotated[int | None, typer.Option(help="Default: as many as suit the text.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, over all processes.")] = None,
    accumulate: run_options.ACCUMULATE = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="Default: 1e-3 on CUDA, else 2e-3.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps. Default: a twentieth; 100 with --minutes.")] = None,
    decay: Annotated[str | None, typer.Option(help="constant or cosine.")] = None,
    initial: Annotated[str | None, typer.Option(help="First weights: open (default) or released.")] = None,
    ema: run_options.EMA = None,
    seed: run_options.SEED = None,
    compile: run_options.COMPILE = None,
    fsdp: Annotated[bool | None, typer.Option("--fsdp", help="Shard the weights over processes.")] = None,
    evaluate_every: run_options.EVERY = None,
    sample_every: run_options.SAMPLE_EVERY = None,
    save_every: run_options.EVERY = None,
    log_every: run_options.LOG_EVERY = None,
    keep: run_options.KEEP = None,
    tracker: run_options.TRACKER = None,
) -> None:
    """Train on your own text, with everything derived from it, or as you say.

    maskless train --text my.txt --out runs/my --minutes 5

    torchrun --nproc-per-node 8 -m maskless train --data data/owt --out runs/owt --recipe owt-pgm-8-8
    """
    from maskless.recipes import recipe as find
    from maskless.train.setup import Request, configure, resumed, run_folder

    known = find(recipe) if recipe else None
    network = {
        "context": context,
        "queries": queries,
        "swap": swap,
        "rope": rope,
        "width": width,
        "layers": layers,
        "encoder": encoder,
        "dropout": dropout,
    }
    training = {
        "model": model,
        "objective": objective,
        "orders": orders,
        "weights": weights,
        "minutes": minutes,
        "steps": steps,
        "batch": batch,
        "accumulate": accumulate,
        "learning_rate": learning_rate,
        "warmup": warmup,
        "decay": decay,
        "initial": initial,
        "ema": ema,
        "seed": seed,
        "compile": compile,
        "fsdp": fsdp,
        "evaluate_every": evaluate_every,
        "sample_every": sample_every,
        "save_every": save_every,
        "log_every": log_every,
        "keep": keep,
        "tracker": tracker,
    }
    request = Request(
        text=text,
        data=data,
        vocab=vocab,
        tokenizer=tokenizer,
        length=length,
        network=(known.network if known else {}) | run_options.given(network),
        train=(known.train if known else {}) | run_options.given(training),
    )
    going_on = resume and (to / "run.json").exists()
    if resume and not going_on and text is None and data is None:
        raise ValueError(f"nothing to resume: {to} has no run.json; give --text or --data to begin")
    with run_folder(to):
        show.training(to, resumed(to, request) if going_on else configure(to, request, show.preparing))


app.command()(distill)
app.command()(generate)
app.command()(fill)
app.command()(evaluate)
app.command()(fid)


@app.command()
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
    from maskless import api

    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    converted = api.load(file, weights=weights, queries=queries, tokenizer=tokenizer, device="cpu")
    if image_codec is not None:
        pictures.give_codec(converted, image_codec)
    converted.save_pretrained(to)
    show.out.print(f"{to}: {converted.config}", highlight=False, markup=False, soft_wrap=True)


@app.command("train-demo")
def train_demo(
    minutes: Annotated[float, typer.Option(help="For training both models.")] = 1.7,
    seed: int = 0,
) -> None:
    """Train a small PGM and an MDLM of the same size on a toy language, and compare them."""
    from maskless import train_demo as demonstration

    demonstration.show(show.out, minutes=minutes, seed=seed)


app.command()(models)
app.command()(demo)
app.command()(reproduce)
app.command()(serve)
app.command("train-codec")(train_codec)
app.add_typer(bench, name="bench", cls=Commands)


def _are_images(inputs: list[str], limits: InputLimits) -> bool:
    from maskless.data.images import looks_like_images

    local = [
        name for name in inputs if not name.startswith("hf:")
    ]  # of the hub's data --codec says that it is pictures
    return bool(local) and looks_like_images(local, limits)
