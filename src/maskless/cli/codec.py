"""The command `train-codec`: an image tokenizer from one's own images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from maskless.cli import run_options, show
from maskless.cli.generate import JSON
from maskless.files import json_text


def train_codec(
    to: Annotated[Path, typer.Option("--out", help="The run's folder; the codec is made in OUT/codec.")],
    images: Annotated[
        list[str] | None,
        typer.Option(help="A folder or an archive of images, arrays, CIFAR-10, or hf:NAME; may be repeated."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Sizes and training by name, such as cifar10-codec.")] = None,
    size: Annotated[
        int | None, typer.Option(help="Cut images to squares of so many pixels. Default: as the first is, 64 at most.")
    ] = None,
    factor: Annotated[int | None, typer.Option(help="Pixels along a side of a token: 2, 4 (default) or 8.")] = None,
    codes: Annotated[int | None, typer.Option(help="How many different tokens. Default: 1024.")] = None,
    code_width: Annotated[int | None, typer.Option(help="Numbers in a code. Default: 8.")] = None,
    width: Annotated[int | None, typer.Option(help="Of the network, times 32. Default: 128 on CUDA, else 32.")] = None,
    latent: Annotated[
        int | None, typer.Option(help="Channels before the codes. Default: 256 on CUDA, else 64.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Residual blocks at each resolution. Default: 2.")] = None,
    minutes: run_options.MINUTES = None,
    steps: Annotated[int | None, typer.Option(help="Default: 20,000 on CUDA, else 500.")] = None,
    resume: run_options.RESUME = False,
    batch: Annotated[int | None, typer.Option(help="Images of a step. Default: 64 on CUDA, else 16.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="Default: 3e-4 on CUDA, else 1e-3.")] = None,
    adversarial: Annotated[float | None, typer.Option(help="Weight of the adversarial loss; 0: none.")] = None,
    adversarial_start: Annotated[float | None, typer.Option(help="The share of the run before it begins.")] = None,
    multiscale: Annotated[float | None, typer.Option(help="Weight of the multi-scale loss.")] = None,
    revive_after: Annotated[
        int | None, typer.Option(help="Put a code elsewhere that so many batches did not use; 0: never.")
    ] = None,
    ema: run_options.EMA = None,
    flip: Annotated[bool | None, typer.Option(help="Exchange left and right in half of the images.")] = None,
    seed: run_options.SEED = None,
    evaluate_every: run_options.EVERY = None,
    save_every: run_options.EVERY = None,
    log_every: run_options.LOG_EVERY = None,
    keep: run_options.KEEP = None,
    as_json: JSON = False,
) -> None:
    """Train an image tokenizer on your own images.

    maskless train-codec --images photos --size 64 --factor 4 --codes 1024 --out runs/codec --minutes 10
    """
    from maskless.recipes import recipe as find
    from maskless.train import codec
    from maskless.train.setup import run_folder

    known = find(recipe, "train-codec") if recipe else None
    sizes: dict[str, Any] = {
        "codes": codes,
        "code_width": code_width,
        "width": width,
        "latent": latent,
        "blocks": blocks,
    }
    training: dict[str, Any] = {
        "size": size,
        "minutes": minutes,
        "steps": steps,
        "batch": batch,
        "learning_rate": learning_rate,
        "adversarial": adversarial,
        "adversarial_start": adversarial_start,
        "multiscale": multiscale,
        "revive_after": revive_after,
        "ema": ema,
        "flip": flip,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "save_every": save_every,
        "log_every": log_every,
        "keep": keep,
    }
    going_on = resume and (to / "run.json").exists()
    if resume and not going_on and not images:
        raise ValueError(f"nothing to resume: {to} has no run.json; give --images to begin")
    given = (known.train if known else {}) | run_options.given(training)
    sizes = (known.network if known else {}) | run_options.given(sizes | {"factor": factor})
    given |= {"factor": sizes.pop("factor")} if "factor" in sizes else {}
    make = codec.resumed if going_on else codec.configure
    with run_folder(to, together=False):
        summary = codec.train_codec(to, make(to, images or [], codec=sizes, **given), show.err)
    if as_json:
        fields = {"steps": summary.steps, "seconds": summary.seconds, "images_per_second": summary.images_per_second}
        print(json_text(fields | dataclasses.asdict(summary.quality)))
        return
    made = f"codec: {to / 'codec'}   picture: {to / 'reconstructions.png'}"
    show.out.print(f"{codec.described(summary.quality)}\n{made}", highlight=False, soft_wrap=True, markup=False)
