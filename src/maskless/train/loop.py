"""The training loop: a generator of optimiser steps on Accelerate, for one process or many.

Everything random in a step is a function of the seed and the step's number: which rows, which times and groups, which
dropout. So a run resumes with nothing but weights, optimiser, averages and the step, and (dropout apart) its losses do
not depend on how the batch is shared out over processes.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch import Tensor, nn

from maskless.data.image_tokens import ImageTokens
from maskless.data.tokens import TokenRows, global_batch
from maskless.logits import check_seed
from maskless.nn import autocast, maskgit
from maskless.nn.blocks import CrossBlock, Head, Normalised, SelfBlock
from maskless.nn.loss import cost
from maskless.nn.partition import GroupSwap
from maskless.objective import OBJECTIVES, Task, drop_labels, mixed_seed, noise
from maskless.train.ahead import ahead
from maskless.train.captured import Captured, Piece
from maskless.train.state import whole

# What `--model` names: the network that is built and the task it is trained on.
MODELS = {
    "pgm": ("partition", "pgm"),
    "mdlm": ("masked", "mdlm"),
    "mdlm-complementary": ("masked", "pgm"),
    "ar": ("causal", "causal"),
    "maskgit": ("maskgit", "maskgit"),
}
TEXT_MODELS = ("pgm", "mdlm", "mdlm-complementary", "ar")
IMAGE_MODELS = ("pgm", "maskgit")
WEIGHTS = {"bounded": "pgm", "released": "pgm-released", "exact": "pgm-exact", "arccos": "pgm-arccos"}
DECAYS = ("constant", "cosine")
INITIALS = ("open", "released")
TRACKERS = ("none", *sorted(LOGGER_TYPE_TO_CLASS))
OF_ONE_SHAPE = {name for name in OBJECTIVES if name not in ("mdlm", "maskgit")}  # whose targets vary in number
SETTLED = 2  # steps that compile the layers; later ones must not


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults are the paper's where it has them (PGM, Sec. 5.1)."""

    model: str = "pgm"  # pgm, mdlm, mdlm-complementary, ar; maskgit for pictures
    weights: str = "bounded"  # of two groups: bounded, released (unbounded), exact (by group size), arccos (pictures)
    steps: int = 1_000_000
    minutes: float | None = None  # stop after this long (evaluating and saving not counted), if before the last step
    batch: int = 512  # sequences of an optimiser step, over all processes
    accumulate: int = 1  # each process takes its share in this many pieces
    learning_rate: float = 3e-4
    initial: str = "open"  # first weights: open gates (blocks.py), or as the released networks start
    warmup: int = 2_500
    decay: str = "constant"
    clip: float = 1.0
    ema: float = 0.9999
    label_dropout: float = 0.1  # of pictures: the share of labels that are hidden, for guidance
    seed: int = 0
    compile: bool | None = None  # by default on CUDA
    fsdp: bool = False  # shard the weights over processes
    evaluate_every: int | None = None  # steps; None: every 1,000 and at each tenth of the run; 0: only at the end
    sample_every: int | None = 0
    save_every: int | None = None
    log_every: int = 10
    keep: int = 2  # training states that stay on disk
    tracker: str = "tensorboard"  # or any other that Accelerate knows (wandb, mlflow, ...), or none

    def __post_init__(self) -> None:
        for what, name, known in (
            ("model", self.model, MODELS),
            ("weights", self.weights, WEIGHTS),
            ("decay", self.decay, DECAYS),
            ("initial", self.initial, INITIALS),
            ("tracker", self.tracker, TRACKERS),
        ):
            if name not in known:
                raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}")
        for name in ("steps", "batch", "accumulate", "log_every", "keep", "learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: expected more than 0")
        check_seed(self.seed)
        for name in ("warmup", "evaluate_every", "sample_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} {value} is out of range: expected 0 or more")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes {self.minutes} is out of range: expected more than 0")
        for name in ("ema", "label_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: expected at least 0 and less than 1")

    @property
    def objective(self) -> str:
        task = MODELS[self.model][1]
        return WEIGHTS[self.weights] if task == "pgm" else task


@dataclass(frozen=True)
class Progress:
    """What a step gave. The loss stays on the device: reading it waits for the step."""

    step: int  # how many are done
    loss: Tensor  # nats per token, this process's share
    gradient: Tensor  # norm before clipping
    rate: float
    share: float  # of the whole run that is done, 0 to 1


def is_due(every: int | None, step: Progress, before: float) -> bool:
    """Whether a station of the run is reached: every so many steps, or the default (see `TrainConfig`).

    before: the share of the run that was done a step earlier.
    """
    if every is None:
        return step.step % 1_000 == 0 or int(10 * step.share) > int(10 * before)
    return every > 0 and step.step % every == 0


class Clock:
    """Seconds of training, with the time of evaluation and saving left out."""

    def __init__(self, spent: float):
        self.begin = time.monotonic() - spent

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        yield
        self.begin += time.monotonic() - before


@dataclass(frozen=True)
class Work:
    """What steps work on: the tasks of training, or the lessons of a teacher."""

    pieces: Callable[[int], tuple[list[Any], int]]  # of a step: this process's share, and what the whole batch counts
    loss: Callable[[nn.Module, Any], Tensor]  # the sum over a piece
    of_one_shape: bool = False  # whether all pieces are, so that a pass can be captured
    ready: Callable[[Any], Piece] = lambda piece: piece  # what is done to a piece before the pass over it


def train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: TokenRows,
    config: TrainConfig,
    accelerator: Accelerator,
    *,
    start: int = 0,
    clock: Clock | None = None,
    pad: int | None = None,
) -> Iterator[Progress]:
    """Take optimiser steps from `start` on, until the last step or until the minutes are spent.

    network, optimizer: as prepared by the accelerator. clock: goes on from earlier parts of the run.
    """
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    work = Work(
        lambda step: _tasks(rows, config, step, world, rank, pad, device), _cost, config.objective in OF_ONE_SHAPE
    )
    return take_steps(network, optimizer, work, config, accelerator, start=start, clock=clock)


def take_steps(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Work,
    config: TrainConfig,
    accelerator: Accelerator,
    *,
    start: int = 0,
    clock: Clock | None = None,
) -> Iterator[Progress]:
    """As `train`, on any work."""
    clock, device = clock or Clock(0.0), accelerator.device
    world, rank = accelerator.num_processes, accelerator.process_index
    network.train()
    alone = world == 1 and config.accumulate == 1 and not config.fsdp
    once = Captured(
        partial(_pass, network, accelerator, work),
        network.parameters(),
        device,
        enabled=alone and _compiles(config, device) and work.of_one_shape,
    )
    share = share_done(config, start, clock, accelerator)
    if share >= 1:
        return
    for step, (pieces, count) in enumerate(ahead(map(work.pieces, range(start, config.steps))), start):
        rate = learning_rate(config, step, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(mixed_seed(config.seed, step, 1 + rank))  # dropout; 0 would be the seed of the noise
        settled = _compiles(config, device) and step >= start + SETTLED
        with _compiling_noticed() if settled else nullcontext():
            loss = _backward(network, once, work.ready, pieces, world / count, accelerator)
        norm = whole(accelerator.clip_grad_norm_(network.parameters(), config.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        share = share_done(config, done, clock, accelerator)
        yield Progress(done, loss, norm, rate, share)
        if share >= 1:
            return


def _backward(
    network: nn.Module,
    once: Captured,
    ready: Callable[[Any], Piece],
    pieces: list[Any],
    scale: float,
    accelerator: Accelerator,
) -> Tensor:
    """The loss of all pieces times `scale`, its gradients added to the parameters'."""
    losses = []
    for number, piece in enumerate(pieces, 1):
        with nullcontext() if number == len(pieces) else accelerator.no_sync(network):
            losses.append(once(ready(piece), scale))
    return torch.stack(losses).sum()


def _pass(network: nn.Module, accelerator: Accelerator, work: Work, piece: Piece, scale: Tensor) -> Tensor:
    """The loss of a piece times `scale`, its gradients added to the parameters'."""
    with autocast(accelerator.device):
        loss = work.loss(network, piece)
    loss = loss * scale
    accelerator.backward(loss)
    return loss


def _cost(network: nn.Module, task: Task) -> Tensor:
    return network(task.problems, partial(cost, answers=task.answers, weights=task.weights))


def learning_rate(config: TrainConfig, step: int, share: float) -> float:
    """Linear warm-up, then constant or a cosine to zero at the end of the run."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    fall = 1.0 if config.decay == "constant" else 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate * warm * fall


def compile_layers(network: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Compile each kind of layer once; all layers of a kind share the code, so it starts in seconds."""
    if _compiles(config, device):
        for module in network.modules():
            if isinstance(module, SelfBlock | CrossBlock | GroupSwap | Normalised | maskgit.Block):
                module.compile()
            elif isinstance(module, Head):  # of it only what stands before the loss, which walks in chunks
                module.operands = torch.compile(module.operands)  # type: ignore[method-assign]


def _compiles(config: TrainConfig, device: torch.device) -> bool:
    return device.type == "cuda" if config.compile is None else config.compile


@contextmanager
def _compiling_noticed() -> Iterator[None]:
    """Warn if something is compiled within; Python shows the line once in a run."""
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    yield
    if counts["unique_graphs"] > before:
        text = "layers were compiled again after the first steps, which costs time: TORCH_LOGS=recompiles says why"
        warnings.warn(text, stacklevel=3)


def share_done(config: TrainConfig, step: int, clock: Clock, accelerator: Accelerator) -> float:
    """How much of the run is done; all processes get the same, so that they agree on the rate and on when to stop."""
    if config.minutes is None:
        return step / config.steps
    share = max(step / config.steps, clock.seconds / (60 * config.minutes))
    if accelerator.num_processes == 1:
        return share
    return float(accelerator.reduce(torch.tensor(share, device=accelerator.device, dtype=torch.float64), "mean"))


def _tasks(
    rows: TokenRows, config: TrainConfig, step: int, world: int, rank: int, pad: int | None, device: torch.device
) -> tuple[list[Task], int]:
    """This process's pieces of a step's global batch, and how many tokens of the whole batch count."""
    numbers = global_batch(step, config.batch, len(rows), config.seed)
    t, u = noise(config.batch, rows.length, seed=config.seed, step=step)
    build = OBJECTIVES[config.objective]
    tasks = []
    for piece in pieces_of(config, world, rank):
        tokens = rows.rows(numbers[piece])
        task = build(tokens, t[piece], u[piece], counts(rows, tokens, pad))
        task = task.labelled(labels_of(rows, numbers[piece], u[piece, 0], config.label_dropout))
        tasks.append(task.map(Tensor.pin_memory) if device.type == "cuda" else task)
    if isinstance(rows, ImageTokens):
        return tasks, config.batch * (rows.length - 1)
    count = config.batch * rows.length if pad is None else int(counts(rows, rows.rows(numbers), pad).sum())
    return tasks, count


def pieces_of(config: TrainConfig, world: int, rank: int) -> list[slice]:
    """Which rows of the global batch each piece of a process's share has."""
    size, first = config.batch // (world * config.accumulate), rank * config.accumulate
    return [slice((first + i) * size, (first + i + 1) * size) for i in range(config.accumulate)]


def labels_of(rows: TokenRows, numbers: np.ndarray, u: Tensor, dropped: float) -> Tensor | None:
    """The labels of some rows, a share of them dropped; None where there are no classes.  (n,), (n,) -> (n,)"""
    if not isinstance(rows, ImageTokens) or (labels := rows.labels(numbers)) is None:
        return None
    return drop_labels(labels, u, dropped, rows.classes)


def counts(rows: TokenRows, tokens: Tensor, pad: int | None) -> Tensor:
    """Which tokens count in the loss: all but padding, and the BOS of a picture.  (B, L) -> (B, L) bool"""
    counted = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
    if isinstance(rows, ImageTokens):
        counted[:, 0] = False
    return counted
