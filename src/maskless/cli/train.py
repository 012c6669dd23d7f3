"""The command `train`: a model from your own text or pictures."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskless.cli import show
from maskless.cli.options import DEVICE, Given, Option, Options, with_tables
from maskless.terminal import say

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
    "fsdp": Option(bool, "Shard the weights over processes.", "--fsdp"),
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
