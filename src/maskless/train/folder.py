"""A run as a folder, whatever it trains: run.json, metrics.jsonl, states/; killed at any moment, it resumes.

A network, a student and a codec are three kinds of run. A kind says what a step is, what is measured, what a state
holds and what is saved as the model; opening the folder, resuming, logging, saving, reporting and stopping are here.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from maskless.ema import EMA
from maskless.files import sweep, write_aside
from maskless.train import state
from maskless.train.config import CHANGEABLE, Settings
from maskless.train.interruption import Interruption
from maskless.train.loop import Clock, Progress, is_due, room, share_done
from maskless.train.report import MetricsFile, Throughput, progress_bar, read_metrics

CONFIG = "run.json"
ASIDE = 0.1  # of a run of so many minutes: what its default milestones may take
TAIL = 3.0  # seconds that the curve and the end of the process take
T = TypeVar("T")
Milestone = tuple[int | None, Callable[[int], str]]  # every so many steps; what is done there, and what it has to say


class RunFolder(ABC, Generic[T]):
    """A run in progress; T: what it finds out in the end. Every process has one, and the first of them writes.

    A kind first makes all that is trained, its network and the averages of it, then calls `open`.
    """

    takes: ClassVar[str]  # what a step takes, as the speed is shown: "tokens", "images"
    network: nn.Module
    ema: EMA

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        accelerator: Accelerator | None = None,
        *,
        begun: float | None = None,
    ):
        """accelerator: of the processes that train together; None: this one is alone. begun: when the command did."""
        self.folder, self.settings, self.accelerator = folder, settings, accelerator
        self.begun = time.monotonic() if begun is None else begun
        self.took: dict[str, float] = {}  # seconds of what is done between steps, the last time
        self.main = accelerator is None or accelerator.is_main_process
        self.waiting: list[Progress] = []
        self.speed: Throughput | None = None  # once it runs

    @abstractmethod
    def __iter__(self) -> Iterator[Progress]:
        """Optimiser steps from where the run stands, with the averages kept up."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, beside the step and the seconds."""

    @abstractmethod
    def restore(self, found: dict[str, Any]) -> None:
        """Put a state in place; an error if it does not fit, or is of no finite numbers."""

    @abstractmethod
    def save_model(self) -> None:
        """Write the averaged model."""

    @abstractmethod
    def milestones(self) -> list[Milestone]:
        """What is done between steps, and said."""

    @abstractmethod
    def finish(self, step: int, say: Callable[[str], None]) -> T:
        """What the end of the run brings; say: told what is done just now."""

    def weights(self) -> list[Tensor]:
        """All numbers that steps change, but for the moments of optimisers."""
        return [*self.network.parameters(), *self.ema.averages]

    def facts(self) -> dict[str, float]:
        """What is noted beside the last of some losses."""
        return {}

    def open(self, config: Mapping[str, Any]) -> None:
        """Resume from the newest state, or begin; config: what run.json is to say."""
        self.start, *spent = state.load(self.folder / "states", self.restore)
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            write_config(self.folder / CONFIG, config)
            self.metrics = MetricsFile(self.folder / "metrics.jsonl", self.start)
        self.clock = Clock(*spent, begun=self.begun)
        self.keep_time_for_the_end()

    def log(self, step: Progress) -> float | None:
        """Note a step; every `log_every` steps write the losses since the last time. Returns the last loss, if read."""
        self.waiting.append(step)
        return None if step.step % self.settings.log_every and step.share < 1 else self.write_losses()

    def write_losses(self) -> float | None:
        """Write what waits, before something else is noted: the metrics of a run that resumes here have no gap."""
        if not self.waiting:
            return None
        found = [{"loss": step.loss, **step.parts, "gradient": step.gradient} for step in self.waiting]
        values = torch.stack([value.float() for line in found for value in line.values()])
        numbers = iter(self.together(values, "mean").tolist())  # one wait for the device
        for step, names in zip(self.waiting, found, strict=True):
            line = {name: next(numbers) for name in names}
            for name, value in line.items():
                if not math.isfinite(value):
                    raise state.diverged(f"the {name} is {value}", step.step, self.folder / "states")
            self.note(step.step, **line, rate=step.rate, **(self.facts() if step is self.waiting[-1] else {}))
        self.waiting.clear()
        return line["loss"]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averages stand in the place of the weights."""
        self.network.eval()
        with self.ema.swapped_into(self.network.parameters()):
            yield
            if isinstance(self.network, FSDPModule):  # its root stays gathered after a forward pass
                self.network.reshard()
        self.network.train()

    @contextmanager
    def looking(self, what: str) -> Iterator[None]:
        """A look at the averages, which is no time of training; a loss that is no number is named before it."""
        self.write_losses()
        with self.aside(what), self.averaged():
            yield

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Something that is not training; how long it takes is noted."""
        before = self.clock.pauses
        with self.clock.paused():
            yield
        self.took[what] = self.clock.pauses - before

    def keep_time_for_the_end(self) -> None:
        """Note how long the end will take: as long as its parts took before, or else about a tenth of the minutes."""
        if self.settings.minutes is not None:
            budget = 60 * self.settings.minutes
            parts = sum(self.took.get(what, share * budget) for what, share in self.at_the_end().items())
            self.clock.reserve = min(0.3 * budget, parts + min(TAIL, 0.05 * budget))

    def at_the_end(self) -> dict[str, float]:
        """What the end of the run consists of, and about which share of its minutes each part takes."""
        return {"save": 0.02, "evaluate": 0.08}

    def has_time_for(self, every: int | None) -> bool:
        """Whether a milestone that is due is taken: if it was asked for, or if the others did not take too long yet."""
        if every is not None or self.settings.minutes is None:
            return True
        return self.agreed(self.clock.pauses - ASIDE * self.clock.since_setup) <= 0

    def agreed(self, value: float) -> float:
        """The mean over all processes, so that they decide alike."""
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return value
        return float(self.together(torch.tensor(value, device=self.accelerator.device, dtype=torch.float64), "mean"))

    def save(self, step: int, *, last: bool = False) -> None:
        """Write the losses up to here, the training state, then the averaged model."""
        self.write_losses()
        if self.together((~state.finite(self.weights())).float()).item():  # it would take the place of a good state
            raise state.diverged("weights are no finite numbers", step, self.folder / "states")
        used = self.clock.wall
        if last and self.settings.minutes is not None:  # with its end, which is yet to come
            used = max(60 * self.settings.minutes, used + self.clock.reserve)
        with self.aside("save"):
            self.save_state({"step": step, "seconds": self.clock.seconds, "wall_seconds": used})
            self.save_model()
            if last:
                self.settle()

    def save_state(self, about: dict[str, Any]) -> None:
        """Write a training state; about: its step and seconds."""
        held = about | self.state()
        if self.main:
            state.save(self.folder / "states", held, self.settings.keep)

    def settle(self) -> None:
        """Wait until what was saved is on the disk."""

    def note(self, step: int, **line: Any) -> None:
        """Write a line of metrics, and tell the trackers."""
        if self.main:
            self.metrics.add(step=step, **line, seconds=round(self.clock.seconds, 3))
        if self.accelerator is not None:
            self.accelerator.log(line, step=step)

    def together(self, values: Tensor, how: str = "sum") -> Tensor:
        """The sum or mean over all processes."""
        return values if self.accelerator is None else self.accelerator.reduce(values, how)

    def stops(self, asked: bool, *, logged: bool) -> bool:
        """Whether Ctrl-C ends the run after this step. Several processes agree on it where they read losses anyway."""
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return asked
        return logged and self.together(torch.tensor(float(asked), device=self.accelerator.device)).item() > 0

    def close(self) -> None:
        if self.main:
            self.metrics.close()


@dataclass(frozen=True)
class Ended(Generic[T]):
    """How a run ended."""

    found: T
    steps: int
    seconds: float
    speed: float  # tokens or images in a second


def complete(run: RunFolder[T], console: Console, opening: str, *, name: str, each: int) -> Ended[T]:
    """Take a run to its end, showing progress. opening: what is said first; each: tokens or images of a step."""

    def say(text: str) -> None:
        if run.main:
            console.print(text, highlight=False, soft_wrap=True)

    settings, done = run.settings, run.start
    say(opening + (f", resumed at step {done:,}" if done else ""))
    if settings.minutes is not None and run.clock.setup > 15 * settings.minutes:
        whole, left = 60 * settings.minutes, room(settings.minutes, run.clock)
        say(f"  the set-up took {run.clock.setup:,.0f} of {whole:,.0f} seconds, which leaves {left:,.0f} for training")
    speed, share = Throughput(each, done, run.clock.seconds), share_done(settings, done, run.clock, run.accelerator)
    run.speed = speed
    with progress_bar(console, enabled=run.main) as bar:
        task = bar.add_task(name, total=1.0, text="starting")
        with Interruption() as interruption:
            for step in run:
                done, last = step.step, step.share >= 1
                if (loss := run.log(step)) is not None:
                    pace = f"{speed.look(done, run.clock.seconds):>9,.0f} {run.takes}/s"
                    bar.update(task, completed=step.share, text=f"loss {loss:6.3f}  {pace}")
                for every, work in run.milestones():
                    if is_due(every, step, share) and not last and run.has_time_for(every):
                        say(f"  step {done:,}: {escape(work(done))}")
                        run.keep_time_for_the_end()
                interrupted = run.stops(interruption.asked, logged=loss is not None)  # read once
                due = is_due(settings.save_every, step, share) and run.has_time_for(settings.save_every)
                if due or last or interrupted:
                    run.save(done, last=last)
                    run.keep_time_for_the_end()
                if interrupted:
                    run.settle()
                    raise KeyboardInterrupt
                share = step.share
        if done == run.start:  # all was done: a kill may have come between the last state and its model
            run.save_model()
        seconds = run.clock.seconds
        reached = speed.look(done, seconds)
        bar.update(task, completed=1.0)
        found = run.finish(done, lambda text: bar.update(task, text=text))
        bar.update(task, text=f"{reached:>9,.0f} {run.takes}/s")
    run.close()
    return Ended(found, done, seconds, reached)


def finished(folder: Path, settings: Settings, model: str) -> tuple[int, float] | None:
    """The last step and the seconds of a run that is at its end, saved and measured; None: something is left to do."""
    step, seconds = state.reached(folder / "states")
    if step < settings.steps and (settings.minutes is None or seconds < 60 * settings.minutes):
        return None
    measured = any(line["step"] == step and "loss" not in line for line in read_metrics(folder / "metrics.jsonl"))
    return (step, seconds) if measured and (folder / model / "config.json").is_file() else None


# The configuration


def write_config(path: Path, fields: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(fields, indent=2) + "\n"
    write_aside(path, lambda aside: aside.write_text(text))


def read_config(path: Path, what: str, build: Callable[[dict[str, Any]], T]) -> T:
    """What a file says; where it is none or says something else, a ValueError. what: "a run's configuration" """
    try:
        return build(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ValueError(f"nothing to resume: {path.parent} has no {path.name}") from None
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not {what}: {error!r}") from None


def changed(
    folder: Path, own: Mapping[str, Any], given: Mapping[str, Any], *, also: tuple[str, ...] = (), what: str = "a run"
) -> dict[str, Any]:
    """Which of the given settings are new in a resumed run: its end and its milestones may be, and no others.

    own: as the run began; also: what else may be new.
    """
    for name, value in given.items():
        if name not in (*CHANGEABLE, *also) and own[name] != value:
            raise ValueError(f"{name} is {own[name]} in {folder}, not {value}: {what} goes on as it began")
    new = {name: value for name, value in given.items() if name in CHANGEABLE and name in own}
    if "steps" in new:
        state.check_end(folder, new["steps"])
    return new
