"""A training run as a folder: run.json, metrics.jsonl, states/, model/, loss.png; killed at any moment, it resumes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from torch import nn
from torch.distributed.fsdp import FSDPModule

from maskless import pictures
from maskless.api import Text, generate
from maskless.checkpoint import NETWORKS, Model
from maskless.data.image_tokens import ImageTokens, PreparedImages
from maskless.data.tokens import Prepared, TokenRows
from maskless.ema import EMA
from maskless.evaluate.likelihood import Likelihood, likelihood
from maskless.files import sweep, write_aside
from maskless.images import generate_images
from maskless.mixture import Mixture
from maskless.nn.blocks import open_gates
from maskless.train import state
from maskless.train.config import MODELS, TrainConfig
from maskless.train.data import open_data, same_data
from maskless.train.interruption import Interruption
from maskless.train.loop import Clock, Progress, compile_layers, is_due, share_done, train
from maskless.train.processes import accelerator_of, check_processes, processes
from maskless.train.report import Metrics, Speed, or_unknown, plot_losses, progress_bar


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run; stands in its run.json."""

    data: str  # a prepared folder
    network: dict[str, Any]  # the network's sizes
    train: TrainConfig
    fingerprint: str | None = None  # of the data; None: not looked at yet, or written by an earlier version

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        data, home = Path(self.data), folder.resolve()
        inside = data.relative_to(home) if data.is_relative_to(home) else data  # a run may move with its data
        text = json.dumps(dataclasses.asdict(self) | {"data": str(inside)}, indent=2) + "\n"
        write_aside(folder / "run.json", lambda path: path.write_text(text))

    @staticmethod
    def read(folder: Path) -> RunConfig:
        try:
            fields = json.loads((folder / "run.json").read_text())
            if "distill" in fields:
                raise ValueError(f"{folder} is a round of a distillation: go on with `maskless distill --resume`")
            data = str(folder.resolve() / fields["data"])
            train, known = TrainConfig(**fields["train"]), fields.get("fingerprint")
            return RunConfig(data=data, network=fields["network"], train=train, fingerprint=known)
        except FileNotFoundError:
            raise ValueError(f"nothing to resume: {folder} has no run.json") from None
        except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{folder / 'run.json'} is not a run's configuration: {error!r}") from None


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    model: Model
    likelihood: Likelihood
    samples: list[Text]
    steps: int
    seconds: float
    tokens_per_second: float


class Run:
    """A run in progress: what is trained, and what happens at its stations. Every process has one; rank 0 writes."""

    def __init__(self, folder: Path, config: RunConfig):
        self.folder, self.settings = folder, config.train
        self.how: dict[str, Any] = {}  # keywords of `generate` for the samples that are shown
        self.data = open_data(config.data)
        check_processes(self.settings, processes())
        known = same_data(self.data, config.fingerprint, folder)
        self.config = dataclasses.replace(config, fingerprint=known)
        _check_sizes(config, self.data)
        self.accelerator = accelerator_of(self.settings, folder)
        self.main = self.accelerator.is_main_process
        network = self.build()
        compile_layers(network, self.settings, self.accelerator.device)
        self.parameters = sum(p.numel() for p in network.parameters())
        adam = torch.optim.AdamW(
            network.parameters(),
            lr=self.settings.learning_rate,
            weight_decay=0.0,
            fused=True,
        )
        self.network, self.optimizer = self.accelerator.prepare(network, adam)
        self.ema = EMA(self.network.parameters(), self.settings.ema)
        self.start, spent = state.restore(folder / "states", self.network, self.optimizer, self.ema, self.accelerator)
        self.model = _model(self.accelerator.unwrap_model(self.network), self.data, self.settings.orders)
        if self.main:
            sweep(folder)
            self.config.write(folder)
            self.metrics = Metrics(folder / "metrics.jsonl", self.start)
        # For TensorBoard the name is a folder of the run, for the others a project.
        self.accelerator.init_trackers("tensorboard" if self.settings.tracker == "tensorboard" else "maskless")
        self.clock, self.waiting = Clock(spent), list[Progress]()

    def build(self) -> nn.Module:
        """The network with its first weights, the same in every process."""
        torch.manual_seed(self.settings.seed)
        make_config, make_network = NETWORKS[MODELS[self.settings.model][0]]
        network: nn.Module = make_network(make_config(**self.config.network))
        if self.settings.initial == "open":
            open_gates(network)
        return network

    def steps(self) -> Iterator[Progress]:
        """Optimiser steps from where the run stands."""
        given = self.network, self.optimizer, self.rows(), self.settings, self.accelerator
        grid = self.data.grid if isinstance(self.data, PreparedImages) else None
        return train(*given, start=self.start, clock=self.clock, pad=self.data.pad, lead=self.lead, grid=grid)

    @property
    def lead(self) -> int:
        """How many tokens begin every row and every order of a chain."""
        if isinstance(self.data, PreparedImages):
            return 1
        return len(self.model.lead) if self.model.mixture else 0

    def rows(self) -> TokenRows:
        """What is trained on; a dropped label is the one that means no class to the network."""
        rows = self.data.split("train")
        if isinstance(rows, ImageTokens):
            rows.classes = self.config.network.get("classes") or rows.classes
        return rows

    def __iter__(self) -> Iterator[Progress]:
        """Optimiser steps, with the averages kept up."""
        for step in self.steps():
            self.ema.update(self.network.parameters())
            yield step

    def log(self, step: Progress) -> float | None:
        """Note a step; every `log_every` steps write the losses since the last time. Returns the last loss, if read."""
        self.waiting.append(step)
        if step.step % self.settings.log_every and step.share < 1:
            return None
        return self._write_losses()

    def _write_losses(self) -> float | None:
        if not self.waiting:
            return None
        losses = torch.stack([torch.stack([s.loss.float(), s.gradient.float()]) for s in self.waiting])
        losses = self.accelerator.reduce(losses, "mean").cpu()
        for waited, (loss, gradient) in zip(self.waiting, losses.tolist(), strict=True):
            for name, value in (("loss", loss), ("gradient", gradient)):
                if not math.isfinite(value):
                    raise state.diverged(f"the {name} is {value}", waited.step, self.folder / "states")
            self._note(step=waited.step, loss=loss, gradient=gradient, rate=waited.rate)
        self.waiting.clear()
        return losses[-1, 0].item()

    def evaluate(self, step: int, sequences: int) -> Likelihood:
        """The validation bound of the averaged weights."""
        self._write_losses()  # one that is no number is named before it spoils what is measured
        with self.clock.paused(), self._averaged():
            network, rows, pad = self.model.network, self.data.split("valid"), self.data.pad
            measured = likelihood(network, rows, sequences=sequences, samples=4, pad=pad, lead=self.lead)
        if not math.isfinite(measured.nats):
            raise ValueError(f"the validation bound is {measured.nats} at step {step}: {state.DIVERGED}")
        numbers = {"validation": measured.nats, "error": measured.error, "perplexity": measured.perplexity}
        self._note(step=step, **numbers)
        return measured

    def samples(self, n: int) -> list[Text]:
        """Texts from the averaged weights; of a model of pictures none, but samples.png in the run's folder."""
        self._write_losses()
        with self.clock.paused(), self._averaged(), torch.compiler.set_stance("force_eager"):
            if not isinstance(self.data, PreparedImages):
                return generate(self.model, n, seed=self.settings.seed, **self.how)
            model = self.model.to(self.accelerator.device)
            drawn = generate_images(model, n=16, seed=self.settings.seed, **self.how)
        if self.main:
            pixels = torch.stack([torch.from_numpy(np.atleast_3d(np.array(picture.image))) for picture in drawn])
            labels = [picture.label or "" for picture in drawn] if self.data.classes else None
            pictures.grid(pixels, self.folder / "samples.png", labels=labels, columns=8)
        return []

    def stops(self, asked: bool, *, logged: bool) -> bool:
        """Whether Ctrl-C ends the run after this step. Several processes agree on it where they read losses anyway."""
        if self.accelerator.num_processes == 1:
            return asked
        return logged and self.accelerator.reduce(torch.tensor(float(asked), device=self.accelerator.device)).item() > 0

    def save(self, step: int) -> None:
        """Write the losses up to here, the training state, then the averaged model."""
        self._write_losses()  # the metrics of a run that resumes here have no gap
        whole = state.finite([*self.network.parameters(), *self.ema.averages])
        if self.accelerator.reduce((~whole).float()).item():  # a state of them would take the place of a good one
            raise state.diverged("weights are no finite numbers", step, self.folder / "states")
        with self.clock.paused():
            trained = self.network, self.optimizer, self.ema, self.accelerator
            state.save(self.folder / "states", step, self.clock.seconds, *trained, self.settings.keep)
            self.save_model()

    def save_model(self) -> None:
        """Write the averaged model."""
        with self._averaged():
            weights = {name: state.whole(value) for name, value in self.model.network.state_dict().items()}
            if self.main:
                self.model.save_pretrained(self.folder / "model", weights)

    def end(self) -> None:
        """Close the trackers and part from the other processes."""
        self.accelerator.end_training()

    def close(self) -> None:
        self.end()
        if self.main:
            self.metrics.close()
            plot_losses({self.settings.model: self.metrics.lines}, self.folder / "loss.png")

    def _note(self, **line: Any) -> None:
        if self.main:
            self.metrics.add(**line, seconds=round(self.clock.seconds, 3))
        self.accelerator.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        self.network.eval()
        with self.ema.swapped_into(self.network.parameters()):
            yield
            if isinstance(self.network, FSDPModule):  # its root stays gathered after a forward pass
                self.network.reshard()
        self.network.train()


def run(folder: Path, config: RunConfig, console: Console, *, name: str = "training") -> Summary:
    """Train from the newest state in the folder, or from the start, to the end, showing progress."""
    return complete(Run(folder, config), console, name=name)


def complete(this: Run, console: Console, *, name: str) -> Summary:
    """Go on with a run to its end, showing progress."""
    settings, folder = this.settings, this.folder
    resumed = f", resumed at step {this.start:,}" if this.start else ""
    together = f", {this.accelerator.num_processes} processes" if this.accelerator.num_processes > 1 else ""
    _say(
        this,
        console,
        f"[bold]{name}[/]: {settings.model}, {this.parameters / 1e6:.1f} M parameters, batch {settings.batch} x "
        f"{this.data.length}, {this.accelerator.device.type}{together}{resumed}",
    )
    done, speed = this.start, Speed(settings.batch * this.data.length, this.start, this.clock.seconds)
    share = share_done(settings, this.start, this.clock, this.accelerator)
    with progress_bar(console, enabled=this.main) as bar:
        task = bar.add_task(name, total=1.0, text="starting")
        with Interruption() as interruption:
            for step in this:
                done = step.step
                if (loss := this.log(step)) is not None:
                    tokens = speed.look(done, this.clock.seconds)
                    bar.update(task, completed=step.share, text=f"loss {loss:6.3f}  {tokens:>9,.0f} tokens/s")
                last = step.share >= 1
                if is_due(settings.evaluate_every, step, share) and not last:
                    measured = this.evaluate(done, 256)
                    _say(this, console, f"  step {done:,}: validation perplexity {_pm(measured)}")
                if is_due(settings.sample_every, step, share) and not last:
                    shown = [repr(str(text)[:300]) for text in this.samples(1)] or [f"see {folder / 'samples.png'}"]
                    _say(this, console, f"  step {done:,}: {escape(shown[0])}")
                interrupted = this.stops(interruption.asked, logged=loss is not None)
                if is_due(settings.save_every, step, share) or last or interrupted:
                    this.save(done)
                if interrupted:
                    raise KeyboardInterrupt
                share = step.share
        if done == this.start:  # all was done: a kill may have come between the last state and its model
            this.save_model()
        seconds = this.clock.seconds
        tokens = speed.look(done, seconds)
        bar.update(task, completed=1.0, text="evaluating")
        measured = this.evaluate(done, 2048 if this.accelerator.device.type == "cuda" else 512)
        bar.update(task, text="sampling")
        samples = this.samples(2)
        bar.update(task, text=f"{tokens:>9,.0f} tokens/s")
    this.close()
    this.ema.moved_into(this.network.parameters())  # what is given back is what was measured and saved
    this.model.network.eval()
    return Summary(this.model, measured, samples, done, seconds, tokens)


def _say(this: Run, console: Console, text: str) -> None:
    if this.main:
        console.print(text, highlight=False, soft_wrap=True)


def _pm(measured: Likelihood) -> str:
    return f"{measured.perplexity:.1f} ± {or_unknown(measured.perplexity_error, '.1f')}"


def _model(network: nn.Module, data: Prepared | PreparedImages, orders: str) -> Model:
    image = isinstance(data, PreparedImages)
    mixture = Mixture.parse(orders, image=image) if orders else None
    if isinstance(data, PreparedImages):
        return Model(network, data.codec(), "image", data.classes, mixture)
    return Model(network, data.codec(), data.layout, mixture=mixture)


def _check_sizes(config: RunConfig, data: Prepared | PreparedImages) -> None:
    vocab = data.codes if isinstance(data, PreparedImages) else data.vocab
    if config.network["vocab"] < vocab or config.network["length"] != data.length:
        raise ValueError(
            f"the data in {data.folder} has {vocab} ids and length {data.length}, "
            f"the network {config.network['vocab']} and {config.network['length']}"
        )
