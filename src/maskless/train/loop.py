"""The training loop: a generator of optimiser steps on Accelerate, for one process or many.

Everything random in a step is a function of the seed and the step's number: which rows, which times and groups, which
dropout. So a run resumes with nothing but weights, optimiser, averages and the step, and (dropout apart) its losses do
not depend on how the batch is shared out over processes.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch import Tensor, nn

from maskless.data.image_tokens import ImageTokens
from maskless.data.tokens import TokenRows, global_batch
from maskless.nn import autocast, maskgit
from maskless.nn.blocks import CrossBlock, SelfBlock
from maskless.nn.loss import cost
from maskless.nn.partition import GroupSwap
from maskless.objective import OBJECTIVES, Task, drop_labels, mixed_seed, noise
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
T = TypeVar("T")
WEIGHTS = {"bounded": "pgm", "released": "pgm-released", "exact": "pgm-exact", "arccos": "pgm-arccos"}
DECAYS = ("constant", "cosine")
INITIALS = ("open", "released")
TRACKERS = ("none", *sorted(LOGGER_TYPE_TO_CLASS))
SETTLED = 2  # steps that compile the layers; later ones must not


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults are the paper's where it has them (PGM, Sec. 5.1)."""

    model: str = "pgm"  # pgm, mdlm, mdlm-complementary, ar; maskgit for pictures
    weights: str = (
        "bounded"  # of two-group tasks: bounded, released (unbounded), exact (by group size), arccos (pictures)
    )
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
        for name in ("warmup", "seed", "evaluate_every", "sample_every", "save_every"):
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
    clock, device = clock or Clock(0.0), accelerator.device
    world, rank = accelerator.num_processes, accelerator.process_index
    tasks = (_tasks(rows, config, step, world, rank, pad, device) for step in range(start, config.steps))
    network.train()
    share = share_done(config, start, clock, accelerator)
    if share >= 1:
        return
    for step, (pieces, count) in enumerate(_ahead(tasks), start):
        rate = learning_rate(config, step, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(mixed_seed(config.seed, step, rank))  # dropout
        settled = _compiles(config, device) and step >= start + SETTLED
        with _compiling_noticed() if settled else nullcontext():
            loss = _backward(network, pieces, world / count, accelerator)
        norm = whole(accelerator.clip_grad_norm_(network.parameters(), config.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        share = share_done(config, done, clock, accelerator)
        yield Progress(done, loss, norm, rate, share)
        if share >= 1:
            return


def _backward(network: nn.Module, pieces: list[Task], scale: float, accelerator: Accelerator) -> Tensor:
    """The loss of all pieces times `scale`, its gradients added to the parameters'."""
    device = accelerator.device
    total = torch.zeros((), device=device)
    for number, task in enumerate(pieces, 1):
        task = task.map(lambda x: x.to(device, non_blocking=True))
        with nullcontext() if number == len(pieces) else accelerator.no_sync(network):
            with autocast(device):
                loss = network(task.problems, partial(cost, answers=task.answers, weights=task.weights))
            loss = loss * scale
            accelerator.backward(loss)
        total += loss.detach()
    return total


def learning_rate(config: TrainConfig, step: int, share: float) -> float:
    """Linear warm-up, then constant or a cosine to zero at the end of the run."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    fall = 1.0 if config.decay == "constant" else 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate * warm * fall


def compile_layers(network: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Compile each kind of layer once; all layers of a kind share the code, so it starts in seconds."""
    if _compiles(config, device):
        for module in network.modules():
            if isinstance(module, SelfBlock | CrossBlock | GroupSwap | maskgit.Block):
                module.compile()


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
    size = config.batch // (world * config.accumulate)
    first = rank * config.accumulate
    pieces = [slice((first + i) * size, (first + i + 1) * size) for i in range(config.accumulate)]
    build = OBJECTIVES[config.objective]
    tasks = []
    for piece in pieces:
        tokens = rows.rows(numbers[piece])
        task = build(tokens, t[piece], u[piece], _counts(rows, tokens, pad))
        if isinstance(rows, ImageTokens) and (labels := rows.labels(numbers[piece])) is not None:
            task = task.labelled(drop_labels(labels, u[piece, 0], config.label_dropout, rows.classes))
        tasks.append(task.map(Tensor.pin_memory) if device.type == "cuda" else task)
    if isinstance(rows, ImageTokens):
        return tasks, config.batch * (rows.length - 1)
    count = config.batch * rows.length if pad is None else int(_counts(rows, rows.rows(numbers), pad).sum())
    return tasks, count


def _counts(rows: TokenRows, tokens: Tensor, pad: int | None) -> Tensor:
    """Which tokens count in the loss: all but padding, and the BOS of a picture.  (B, L) -> (B, L) bool"""
    counts = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
    if isinstance(rows, ImageTokens):
        counts[:, 0] = False
    return counts


def _ahead(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """The same items, prepared by a thread a little ahead of their use."""
    ready: queue.Queue[T | Exception | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | Exception | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(None)
        except Exception as error:  # raised again where the items are used
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
