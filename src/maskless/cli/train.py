"""The commands `train`, `train-codec` and `distill`: a model of your own data, a codec for images, a faster model."""

from __future__ import annotations

import dataclasses
import math
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from maskless.cli import entry, show
from maskless.cli.evaluate import FEATURES
from maskless.cli.options import DEVICE, JSON, TOKENIZER, Given, Option, Options, with_tables
from maskless.files import json_text
from maskless.terminal import say
from maskless.train.report import or_unknown

if TYPE_CHECKING:
    from maskless.train.config import Settings

EVERY = Option(int, "Steps; 0: at the end only. Default: 1,000, and a tenth of the run.")
TRAINING: Options = {  # the fields of `TrainConfig`
    "model": Option(str, "pgm (default), mdlm, mdlm-complementary, ar; pictures: maskgit."),
    "objective": Option(str, "pgm: chain (default of text), or partition (two groups, as in the paper)."),
    "orders": Option(
        str,
        "Chain: shares of orders (also left). Default: random=25,strands=50,gaps=25; "
        "pictures (also raster, regions4): random=50,halton=25,regions=25.",
    ),
    "weights": Option(str, "Loss weighting: bounded (default), released, exact; pictures: arccos."),
    "steps": Option(int, "Training steps. Default: as many as suit the text."),
    "minutes": Option(float, "Time budget: wall time of the command, from its start to its end."),
    "batch": Option(int, "Global batch size: sequences of a step, over all processes."),
    "accumulate": Option(int, "Gradient accumulation steps."),
    "learning_rate": Option(float, "Learning rate. Default: 1e-3 on CUDA, else 2e-3.", "--lr"),
    "initial": Option(str, "Initialisation: open (default) or released."),
    "warmup": Option(int, "Warm-up steps. Default: a twentieth of the run."),
    "decay": Option(str, "Learning-rate schedule: constant or cosine."),
    "clip": Option(float, "Gradient clipping norm. Default: 1."),
    "ema": Option(float, "EMA decay."),
    "skip_spikes": Option(float, "Skip steps whose gradient norm exceeds this multiple of its median, such as 10."),
    "label_dropout": Option(float, "Pictures: label dropout, for guidance. Default: 0.1."),
    "seed": Option(int, "Random seed. Default: 0."),
    "compile": Option(bool, "torch.compile; by default on CUDA."),
    "activation_checkpointing": Option(
        bool, "Recompute activations: less memory, a third more time.", "--activation-checkpointing"
    ),
    "fsdp": Option(bool, "Shard the weights over processes.", "--fsdp"),
    "shard_size": Option(int, "With --fsdp: shard over so many processes, such as a machine's (HSDP). Default: all."),
    "evaluate_every": EVERY,
    "sample_every": Option(int, "Steps between live samples; 0: none."),
    "save_every": EVERY,
    "log_every": Option(int, "Steps between log lines. Default: 10."),
    "keep": Option(int, "Checkpoints kept on disk. Default: 2."),
    "tracker": Option(str, "tensorboard (default), wandb, ... or none."),
}
NETWORK: Options = {  # keywords of `network_config` and `image_network_config`
    "width": Option(int, "Hidden size. Default: 512 on CUDA, else 128."),
    "layers": Option(int, "Layers in all; pgm has half of them in its encoder."),
    "encoder": Option(int, "pgm: encoder layers."),
    "dropout": Option(float, "Dropout rate. Default: 0.1."),
    "context": Option(str, "pgm with two groups: full, or ordered (can be cached, as a chain always is)."),
    "queries": Option(str, "pgm: position (default), mean or logsumexp."),
    "swap": Option(str, "pgm: gated (default of a chain), released (of two groups) or residual."),
    "neighbours": Option(
        int,
        "pgm: neighbours on each side whose states a target starts from. Default: 2 of text chains on a CPU, 1 of "
        "pictures (above, below, left, right), else 0.",
    ),
    "rope": Option(str, "pgm of pictures: 2d (default), by row and column, or 1d."),
}
DATA: Options = {  # fields of `Request`
    "text": Option(list[str], "Text to train on; everything else has a default."),
    "data": Option(Path, "A prepared folder."),
    "vocab": Option(int, "With --text: the size of the BPE."),
    "tokenizer": Option(str, "With --text: gpt2, bert, bytes, or a file."),
    "length": Option(int, "With --text: tokens in a sequence."),
}
CODEC_SIZES: Options = {  # the factor, and fields of `VQConfig`
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
DISTILLING: Options = {  # fields of `DistillConfig`
    "rounds": Option(int, "Each halves the sampling steps. Default: 3."),
    "teacher_steps": Option(int, "Sampling steps of the first teacher. Default: one for each token."),
    "ratio": Option(int, "Teacher's steps for one of the student. Default: 2."),
    "loss": Option(str, "Distillation loss: kl-backward (default), kl-forward or tv."),
    "groups": Option(str, "one (the paper's), or two: both groups teach. Default: two for pgm."),
}
OF_THE_MODEL = ("model", "objective", "orders", "weights", "initial", "label_dropout")  # settled by the teacher
ROUND: Options = {name: option for name, option in TRAINING.items() if name not in OF_THE_MODEL} | {
    "steps": Option(int, "Training steps. Default: 10,000.", "--steps-per-round"),
    "minutes": Option(float, "Time budget: wall time of a round.", "--minutes-per-round"),
    "batch": Option(int, "Global batch size. Default: 128."),
    "learning_rate": Option(float, "Learning rate. Default: 3e-4.", "--lr"),
    "warmup": Option(int, "Warm-up steps, in each round."),
    "decay": Option(str, "Learning-rate schedule in each round: constant (default) or cosine."),
    "ema": Option(float, "EMA decay; the averaged weights teach the next round."),
    "fsdp": Option(bool, "Shard the student's weights over processes.", "--fsdp"),
    "keep": Option(int, "Checkpoints kept on disk, of each round."),
}
RESUME = Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")]


@with_tables
def train(
    *,
    to: Annotated[Path, typer.Option("--out", help="The run's folder.")],
    data: Annotated[Given, DATA],
    recipe: Annotated[str | None, typer.Option(help="A row of the paper's tables, by name; needs --data.")] = None,
    resume: RESUME = False,
    training: Annotated[Given, TRAINING],
    network: Annotated[Given, NETWORK],
    device: DEVICE = None,
) -> None:
    """Train on your own text, with everything derived from it, or as you say.

    maskless train --text my.txt --out runs/my --minutes 5

    torchrun --nproc-per-node 8 -m maskless train --data data/owt --out runs/owt --recipe owt-pgm-8-8
    """
    with show.waiting("starting"):
        from maskless.recipes import recipe as find
        from maskless.train.setup import Request, configure, resumed, run_folder

    if recipe:
        known = find(recipe)
        network, training = known.network | network, known.train | training
    request = Request(network=network, train=training, **data)
    again = resume and goes_on(to, "run.json", {"text", "data"} & data.keys(), "--text or --data")
    if again and is_finished("train", to, resumed(to, request).train, "model"):
        return
    with run_folder(to):
        show.training(to, resumed(to, request) if again else configure(to, request, show.preparing))


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
    sizes: Annotated[Given, CODEC_SIZES],
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


@with_tables
def distill(
    *,
    to: Annotated[Path, typer.Option("--out", help="The folder to make; each student is in OUT/round-1, ...")],
    model: Annotated[
        str | None, typer.Argument(help="A model folder, a run folder, a hub id, or a released checkpoint file.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A prepared folder with the model's vocabulary.")] = None,
    resume: RESUME = False,
    how: Annotated[Given, DISTILLING],
    training: Annotated[Given, ROUND],
    tokenizer: TOKENIZER = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Teach a model to do in one step what it does in two, round after round.

    maskless distill runs/my --data runs/my/data --out runs/my-fast --teacher-steps 64 --rounds 3

    maskless distill --out runs/my-fast --resume
    """
    with show.waiting("starting"):
        from maskless.data.image_tokens import holds_images
        from maskless.train import distill_run
        from maskless.train.processes import processes
        from maskless.train.setup import run_folder

    again = resume and goes_on(to, distill_run.CONFIG, model or data, "MODEL and --data")
    asked = distill_run.DistillRequest(source=model, data=data, tokenizer=tokenizer, how=how, train=training)
    done = distill_run.finished(to, distill_run.resumed(to, asked)) if again else None
    if done is None:
        with run_folder(to):
            with show.waiting("setting up"):
                config = (distill_run.resumed if again else distill_run.begin)(to, asked)
            done = distill_run.distill(to, config, show.err)
    elif not as_json and processes().is_main_process:
        more = shlex.join(["maskless", "distill", "--out", str(to), "--resume", "--rounds", str(len(done) + 1)])
        say(f"{to} is finished, after {len(done)} rounds; go on with more of them: {more}")
        return
    if not processes().is_main_process:
        return
    if as_json:
        print(json_text([dataclasses.asdict(each) for each in done]))
        return
    table = Table("round", "sampling steps", "steps", "seconds", "validation perplexity (bound)")
    for each in done:
        measured = f"{each.perplexity:.2f} ± {or_unknown(each.perplexity_error, '.2f')}"
        table.add_row(str(each.round), f"{each.sampling_steps:g}", f"{each.steps:,}", f"{each.seconds:,.0f}", measured)
    show.out.print(table)
    last = max(1, round(done[-1].sampling_steps))
    tried = f"maskless generate {shlex.quote(str(to))} --steps {last}" + " --out new.png" * holds_images(config.data)
    students = f"students: {to}/round-1 to round-{len(done)}" if len(done) > 1 else f"student: {to}/round-1"
    say(f"{students}   try: {tried}")


def is_finished(command: str, folder: Path, settings: Settings, model: str) -> bool:
    """Whether nothing is left to do in a run, which is said together with the command that continues it."""
    from maskless.train.folder import finished
    from maskless.train.processes import processes

    ended = finished(folder, settings, model)
    if ended is None:
        return False
    step, seconds = ended
    if settings.minutes is None or step == settings.steps:
        later = f"--steps {2 * step}"
    else:  # a run that was set up slowly took longer than its minutes
        later = f"--minutes {max(2 * settings.minutes, math.ceil(100 * (settings.minutes + seconds / 60)) / 100):g}"
    again = f"maskless {command} --out {shlex.quote(str(folder))} --resume {later}"
    if processes().is_main_process:
        say(f"{folder} is finished, at step {step:,}; train on with a later end: {again}")
    return True


def goes_on(folder: Path, config: str, begins: Any, needs: str) -> bool:
    """Whether there is a run to resume; a ValueError where there is none, and nothing to begin one with."""
    found = (folder / config).exists()
    if not found and not begins:
        raise ValueError(f"nothing to resume: {folder} has no {config}; give {needs} to begin")
    return found
