"""The command `train-codec`: an image tokenizer from one's own images."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from maskless.cli import entry, show
from maskless.cli.evaluate import FEATURES
from maskless.cli.options import DEVICE, JSON, Given, Option, Options, with_tables
from maskless.cli.train import RESUME, TRAINING, goes_on, is_finished
from maskless.files import json_text
from maskless.terminal import say

SIZES: Options = {  # the factor, and fields of `VQConfig`
    "factor": Option(int, "Pixels along a side of a token: 2, 4 (default) or 8."),
    "codes": Option(int, "Codebook size. Default: 1024."),
    "code_width": Option(int, "Code dimension. Default: 8."),
    "width": Option(int, "Base channels, a multiple of 32. Default: 128 on CUDA, else 32."),
    "latent": Option(int, "Latent channels. Default: 256 on CUDA, else 64."),
    "blocks": Option(int, "Residual blocks at each resolution. Default: 2."),
}
CODEC_TRAINING: Options = {  # fields of `CodecConfig`
    "size": Option(int, "Cut images to squares of so many pixels. Default: as the first is, 64 at most."),
    "minutes": TRAINING["minutes"],
    "steps": Option(int, "Training steps. Default: 20,000 on CUDA, else 500."),
    "batch": Option(int, "Batch size. Default: 64 on CUDA, else 16."),
    "learning_rate": Option(float, "Learning rate. Default: 3e-4 on CUDA, else 1e-3.", "--lr"),
    "adversarial": Option(float, "Weight of the adversarial loss; 0: none."),
    "adversarial_start": Option(float, "The share of the run before it begins."),
    "entropy": Option(float, "Weight of the entropy loss: sure latents, evenly used codes. Default: 0."),
    "multiscale": Option(float, "Weight of the multi-scale loss."),
    "revive_after": Option(int, "Reset a code that so many batches did not use; 0: never."),
    "flip": Option(bool, "Random horizontal flips."),
} | {name: TRAINING[name] for name in ("ema", "seed", "evaluate_every", "save_every", "log_every", "keep")}

JUDGE: Options = {  # by which reconstructions are judged at the end
    "features": Option(str, "For rFID: the file of a feature network, or torch-fidelity. Default: none."),
    "feature_input": FEATURES["feature_input"],
}


@with_tables
def train_codec(
    *,
    to: Annotated[Path, typer.Option("--out", help="The run's folder; the codec is made in OUT/codec.")],
    images: Annotated[
        list[str] | None,
        typer.Option(help="A folder or an archive of images, arrays, CIFAR-10, or hf:NAME; may be repeated."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Sizes and training by name, such as cifar10-codec.")] = None,
    resume: RESUME = False,
    sizes: Annotated[Given, SIZES],
    training: Annotated[Given, CODEC_TRAINING],
    judge: Annotated[Given, JUDGE],
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Train an image tokenizer on your own images.

    maskless train-codec --images photos --size 64 --factor 4 --codes 1024 --out runs/codec --minutes 10
    """
    with show.waiting("starting"):
        from maskless.evaluate import inception
        from maskless.recipes import recipe as find
        from maskless.train import codec
        from maskless.train.setup import run_folder

    if recipe:
        known = find(recipe, "train-codec")
        sizes, training = known.network | sizes, known.train | training
    if "factor" in sizes:
        training["factor"] = sizes.pop("factor")
    if "feature_input" in judge and "features" not in judge:
        raise ValueError("--feature-input is of a feature network: expected --features beside it")
    name, takes = judge.get("features"), judge.get("feature_input")
    features = None if name is None else inception.features(name, input=takes, device=codec.find_device())
    again = resume and goes_on(to, "run.json", images, "--images")
    make = partial(codec.resumed if again else codec.configure, to, images or [], codec=sizes, **training)
    if again and not as_json and is_finished("train-codec", to, make(), "codec"):
        return
    with run_folder(to, together=False):
        config = make()
        summary = codec.train_codec(to, config, show.err, features=features, begun=entry.begun)
    if as_json:
        fields = {"steps": summary.steps, "seconds": summary.seconds, "images_per_second": summary.images_per_second}
        print(json_text(fields | dataclasses.asdict(summary.quality)))
        return
    say(f"{codec.described(summary.quality)}\ncodec: {to / 'codec'}   picture: {to / 'reconstructions.png'}")
    if features is None:
        say("rFID, which no FID of a model with this codec gets below: train-codec --resume --features FILE")
