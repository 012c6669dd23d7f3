"""The training loop: a generator of optimiser steps on Accelerate, for one process or many.

Everything random in a step is a function of the seed and the step's number: which rows, which times and groups, which
dropout. So a run resumes with nothing but weights, optimiser, averages and the step, and (dropout apart) its losses do
not depend on how the batch is shared out over processes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maskless.data.tokens import TokenRows
from maskless.nn import autocast, maskgit
from maskless.nn.blocks import CrossBlock, Head, Normalised, SelfBlock
from maskless.nn.loss import cost
from maskless.nn.partition import GroupSwap
from maskless.objective import Task, mixed_seed
from maskless.train.captured import Captured, Piece
from maskless.train.config import RAGGED, Settings, TrainConfig
from maskless.train.prefetch import prefetch
from maskless.train.processes import Meeting
from maskless.train.spikes import Spikes
from maskless.train.state import whole
from maskless.train.tasks import objective_of, tasks_of

SETTLED = 2  # steps that compile the layers; later ones must not


@dataclass(frozen=True)
class Progress:
    """What a step gave. The loss stays on the device: reading it waits for the step."""

    step: int  # how many are done
    loss: Tensor  # nats per token, this process's share
    gradient: Tensor  # norm before clipping
    rate: float
    share: float  # of the whole run that is done, 0 to 1
    parts: dict[str, Tensor] = field(default_factory=dict)  # of the loss, by name; and how many steps were skipped


def is_due(every: int | None, step: Progress, before: float) -> bool:
    """Whether a milestone of the run is reached: every so many steps, or the default (see `TrainConfig`).

    before: the share of the run that was done a step earlier.
    """
    if every is None:
        return step.step % 1_000 == 0 or int(10 * step.share) > int(10 * before)
    return every > 0 and step.step % every == 0


class Clock:
    """Seconds of training, without evaluation and saving; and wall time, with all of it, which `minutes` limit."""

    reserve = 0.0  # seconds that the end of the run will take

    def __init__(self, trained: float, used: float | None = None, *, begun: float | None = None):
        """trained, used: by earlier parts of the run, in training and in all. begun: when its set-up was."""
        self.made = time.monotonic()
        self.begin, self.used = self.made - trained, trained if used is None else used
        self.setup = 0.0 if begun is None else self.made - begun
        self.pauses = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def since_setup(self) -> float:
        """Wall time without the set-up of this part."""
        return self.used + time.monotonic() - self.made

    @property
    def wall(self) -> float:
        return self.setup + self.since_setup

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.monotonic()
        yield
        pause = time.monotonic() - before
        self.begin += pause
        self.pauses += pause


@dataclass(frozen=True)
class Workload:
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
    spikes: Spikes | None = None,
    pad: int | None = None,
    lead: int = 0,
    grid: tuple[int, int] | None = None,
) -> Iterator[Progress]:
    """Take optimiser steps from `start` on, until the last step or until the minutes are spent.

    network, optimizer: as prepared by the accelerator. clock: continues from earlier parts of the run. lead: so many
    tokens begin every row (a BOS), and come first in every order. grid: of images. spikes: finds the steps to skip.
    """
    build, share = objective_of(config, lead, grid), own_share(accelerator)
    work = Workload(
        lambda step: tasks_of(rows, config, build, step, pad=pad, **share), _cost, config.task not in RAGGED
    )
    return take_steps(network, optimizer, work, config, accelerator, start=start, clock=clock, spikes=spikes)


def take_steps(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Workload,
    config: TrainConfig,
    accelerator: Accelerator,
    *,
    start: int = 0,
    clock: Clock | None = None,
    spikes: Spikes | None = None,
) -> Iterator[Progress]:
    """As `train`, on any work."""
    clock, device = clock or Clock(0.0), accelerator.device
    world, rank = accelerator.num_processes, accelerator.process_index
    network.train()
    alone = world == 1 and config.accumulate == 1 and not (config.fsdp or config.activation_checkpointing)
    once = Captured(
        partial(_pass, network, accelerator, work),
        network.parameters(),
        device,
        enabled=alone and _compiles(config, device) and work.of_one_shape,
    )
    share = share_done(config, start, clock, accelerator)
    if share >= 1:
        return
    meet = Meeting(world)
    for step, (pieces, count) in enumerate(prefetch(map(work.pieces, range(start, config.steps))), start):
        meet(step)
        rate = config.rate(step, share)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(mixed_seed(config.seed, step, 1 + rank))  # dropout; 0 would be the seed of the noise
        settled = _compiles(config, device) and step >= start + SETTLED
        with _compiling_noticed() if settled else nullcontext():
            loss = _backward(network, once, work.ready, pieces, world / count, accelerator)
        norm = whole(accelerator.clip_grad_norm_(network.parameters(), config.clip))
        if spikes is not None:  # the fused Adam leaves out a step that is marked so, as mixed precision marks overflows
            own: Any = getattr(optimizer, "optimizer", optimizer)  # not Accelerate's around it
            own.found_inf = spikes.found(norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        share = share_done(config, done, clock, accelerator)
        yield Progress(done, loss, norm, rate, share, {} if spikes is None else {"skipped": spikes.total})
        if share >= 1:
            return


def own_share(accelerator: Accelerator) -> dict[str, Any]:
    """Which part of a batch this process has, as `pieces_of` takes it."""
    pinned = accelerator.device.type == "cuda"
    return {"world": accelerator.num_processes, "rank": accelerator.process_index, "pinned": pinned}


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


def _pass(network: nn.Module, accelerator: Accelerator, work: Workload, piece: Piece, scale: Tensor) -> Tensor:
    """The loss of a piece times `scale`, its gradients added to the parameters'."""
    with autocast(accelerator.device):
        loss = work.loss(network, piece)
    loss = loss * scale
    accelerator.backward(loss)
    return loss


def _cost(network: nn.Module, task: Task) -> Tensor:
    return network(task.problems, partial(cost, answers=task.answers, weights=task.weights))


def checkpoint_layers(network: nn.Module) -> None:
    """Let each layer keep its inputs alone, and compute the rest again in the backward pass; gradients are the same."""
    for module in network.modules():
        if isinstance(module, SelfBlock | CrossBlock | maskgit.Block):
            module.forward = MethodType(_recomputed, module)  # type: ignore[method-assign]  # bound: copies have theirs


def _recomputed(layer: nn.Module, *given: Any) -> Any:
    return checkpoint(type(layer).forward, layer, *given, use_reentrant=False)


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


def room(minutes: float, clock: Clock) -> float:
    """The seconds between set-up and end; a run that is set up slowly still has half of its minutes."""
    return max(30 * minutes, 60 * minutes - clock.setup - clock.reserve)


def share_done(config: Settings, step: int, clock: Clock, accelerator: Accelerator | None = None) -> float:
    """How much of the run is done; all processes get the same, so that they agree on the rate and on when to stop."""
    if config.minutes is None:
        return step / config.steps
    most = room(config.minutes, clock)
    next_step = min(clock.seconds / max(1, step), most / 10)  # as long as the mean; the first ones compile
    share = max(step / config.steps, (clock.since_setup + next_step / 2) / most)
    if accelerator is None or accelerator.num_processes == 1:
        return share
    return float(accelerator.reduce(torch.tensor(share, device=accelerator.device, dtype=torch.float64), "mean"))
