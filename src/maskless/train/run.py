"""The run of a network: what it trains on, measures, shows and saves as its model; folder.py does the rest."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from maskless import flops, pictures
from maskless.api import Text, generate
from maskless.checkpoint import NETWORKS, Model
from maskless.data.image_tokens import ImageTokens, PreparedImages
from maskless.data.tokens import Prepared, TokenRows
from maskless.ema import EMA
from maskless.evaluate.likelihood import Likelihood, likelihood
from maskless.gpus import recognised
from maskless.images import generate_images, pixels_of
from maskless.mixture import Mixture
from maskless.nn.blocks import open_gates
from maskless.train import folder as folders
from maskless.train import state
from maskless.train.config import MODELS, TrainConfig
from maskless.train.data import open_data, same_data
from maskless.train.folder import TAIL, Milestone, RunFolder
from maskless.train.loop import Progress, checkpoint_layers, compile_layers, train
from maskless.train.processes import accelerator_of, check_processes, processes
from maskless.train.report import or_unknown, plot_losses
from maskless.train.sharded import Sharded
from maskless.train.spikes import IN_A_ROW, Spikes
from maskless.train.tasks import objective_of, tasks_of

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOOK = 256  # sequences that are measured between steps
PIECE = 8  # sequences that are measured to see how long one takes
COUNTED = 32  # sequences in which operations are counted


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run; stands in its run.json."""

    data: str  # a prepared folder
    network: dict[str, Any]  # the network's sizes
    train: TrainConfig
    fingerprint: str | None = None  # of the data; None: not looked at yet, or written by an earlier version

    def fields(self, folder: Path) -> dict[str, Any]:
        """As run.json in a folder has it: a run may move with its data."""
        data, home = Path(self.data), folder.resolve()
        inside = data.relative_to(home) if data.is_relative_to(home) else data
        return dataclasses.asdict(self) | {"data": str(inside)}

    def write(self, folder: Path) -> None:
        folders.write_config(folder / folders.CONFIG, self.fields(folder))

    @staticmethod
    def read(folder: Path) -> RunConfig:
        def build(fields: dict[str, Any]) -> RunConfig:
            if "distill" in fields:
                again = f"maskless distill --out {shlex.quote(str(folder.parent))} --resume"
                raise ValueError(f"{folder} is a round of a distillation: resume it with: {again}")
            data, train = str(folder.resolve() / fields["data"]), TrainConfig(**fields["train"])
            return RunConfig(data=data, network=fields["network"], train=train, fingerprint=fields.get("fingerprint"))

        return folders.read_config(folder / folders.CONFIG, "a run's configuration", build)


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    model: Model
    likelihood: Likelihood
    samples: list[Text]
    steps: int
    seconds: float
    tokens_per_second: float


class Run(RunFolder[tuple[Likelihood, list[Text]]]):
    """The run of a network in progress."""

    takes = "tokens"
    settings: TrainConfig
    accelerator: Accelerator

    def __init__(self, folder: Path, config: RunConfig, *, begun: float | None = None):
        settings = config.train
        self.how: dict[str, Any] = {}  # keywords of `generate` for the samples that are shown
        self.data = open_data(config.data)
        check_processes(settings, processes())
        self.config = dataclasses.replace(config, fingerprint=same_data(self.data, config.fingerprint, folder))
        _check_sizes(config, self.data)
        super().__init__(folder, settings, accelerator_of(settings, folder), begun=begun)
        self.seconds_each: float | None = None  # of a sequence that is measured
        network = self.build()
        if settings.activation_checkpointing:
            checkpoint_layers(network)
        compile_layers(network, settings, self.accelerator.device)
        self.parameters = sum(p.numel() for p in network.parameters())
        adam = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
        self.network, self.optimizer = self.accelerator.prepare(network, adam)
        self.ema = EMA(self.network.parameters(), settings.ema)
        self.spikes = Spikes(settings.skip_spikes, self.accelerator.device) if settings.skip_spikes else None
        self.sharded = Sharded(self.network, self.optimizer, self.ema) if settings.fsdp else None
        self.model = _model(self.accelerator.unwrap_model(self.network), self.data, settings.orders)
        self.accelerator.wait_for_everyone()  # all see the same states: the first may still be writing the last one
        self.open(self.config.fields(folder))
        # For TensorBoard the name is a folder of the run, for the others a project.
        self.accelerator.init_trackers("tensorboard" if settings.tracker == "tensorboard" else "maskless")

    def build(self) -> nn.Module:
        """The network with its first weights, the same in every process."""
        torch.manual_seed(self.settings.seed)
        make_config, make_network = NETWORKS[MODELS[self.settings.model][0]]
        network: nn.Module = make_network(make_config(**self.config.network))
        if self.settings.initial == "open":
            open_gates(network)
        return network

    def steps(self) -> Iterator[Progress]:
        given = self.network, self.optimizer, self.rows(), self.settings, self.accelerator
        grid = self.data.grid if isinstance(self.data, PreparedImages) else None
        return train(*given, **self.at, pad=self.data.pad, lead=self.lead, grid=grid)

    @property
    def at(self) -> dict[str, Any]:
        """Where the steps begin, as `take_steps` takes it."""
        return {"start": self.start, "clock": self.clock, "spikes": self.spikes}

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
        for step in self.steps():
            self.ema.update(self.network.parameters())
            yield step

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.network, self.optimizer, options=WHOLE)
        averages = [state.whole(average).cpu() for average in self.ema.averages]
        return {"weights": weights, "optimizer": moments, "averages": averages} | self.beside()

    def beside(self) -> dict[str, Any]:
        """What a state holds beside tensors."""
        spikes = {} if self.spikes is None else {"spikes": self.spikes.state()}
        return {"updates": self.ema.updates} | spikes

    def save_state(self, about: dict[str, Any]) -> None:
        if self.sharded is None:
            super().save_state(about)
        else:
            self.sharded.save(self.folder / "states", about | self.beside(), self.settings.keep)

    def settle(self) -> None:
        if self.sharded is not None:
            self.sharded.wait()

    def restore(self, found: dict[str, Any]) -> None:
        if self.sharded is not None and "shards" in found:
            self.sharded.load(found["shards"], found["files"])
            self.ema.updates = found["updates"]
        else:
            weights, optim = found["weights"], found["optimizer"]
            state.check_numbers([*weights.values(), *found["averages"]])
            set_state_dict(
                self.network, self.optimizer, model_state_dict=weights, optim_state_dict=optim, options=WHOLE
            )
            self.ema.restore(found["averages"], found["updates"])
        if self.spikes is not None and "spikes" in found:
            self.spikes.restore(found["spikes"])

    def write_losses(self) -> float | None:
        """As of every run; this one ends where many steps in a row were skipped."""
        last, loss = self.waiting[-1:], super().write_losses()
        if last and self.spikes is not None and self.spikes.row >= IN_A_ROW:
            said = f"the last {int(self.spikes.row)} steps were skipped as spikes"
            raise state.diverged(said, last[0].step, self.folder / "states")
        return loss

    def save_model(self) -> None:
        with self.averaged():
            weights = {name: state.whole(value) for name, value in self.model.network.state_dict().items()}
            if self.main:
                self.model.save_pretrained(self.folder / "model", weights)

    def bound(self, sequences: int) -> Likelihood:
        """The validation bound of the averaged weights on so many sequences at most, and how long one took."""
        with self.looking("evaluate"):
            network, rows, pad = self.model.network, self.data.split("valid"), self.data.pad
            measured = likelihood(network, rows, sequences=sequences, samples=4, pad=pad, lead=self.lead)
        self.seconds_each = self.agreed(self.took["evaluate"]) / measured.sequences
        return measured

    @property
    def most_measured(self) -> int:
        """Sequences that are measured in the end, if there is time."""
        return 2048 if self.accelerator.device.type == "cuda" else 512

    def within(self, seconds: float, most: int) -> int:
        """How many sequences can be measured in so many seconds; `most` where the run has no minutes."""
        if self.settings.minutes is None:
            return most
        if self.seconds_each is None:
            self.bound(PIECE)
        assert self.seconds_each is not None
        return max(PIECE, min(most, int(self.agreed(seconds) / self.seconds_each)))

    def evaluate(self, step: int, sequences: int) -> Likelihood:
        """The validation bound, noted."""
        measured = self.bound(sequences)
        if not math.isfinite(measured.nats):
            raise state.diverged(f"the validation bound is {measured.nats}", step, self.folder / "states")
        self.note(step, validation=measured.nats, error=measured.error, perplexity=measured.perplexity)
        return measured

    def samples(self, n: int) -> list[Text]:
        """Texts from the averaged weights; of an image model none, but samples.png in the run's folder."""
        with self.looking("samples"), torch.compiler.set_stance("force_eager"):
            if not isinstance(self.data, PreparedImages):
                return generate(self.model, n, seed=self.settings.seed, **self.how)
            model = self.model.to(self.accelerator.device)
            drawn = generate_images(model, n=16, seed=self.settings.seed, **self.how)
        if self.main:
            labels = [picture.label or "" for picture in drawn] if self.data.classes else None
            pictures.grid(pixels_of(drawn), self.folder / "samples.png", labels=labels, columns=8)
        return []

    def at_the_end(self) -> dict[str, float]:
        assert self.settings.minutes is not None
        full = math.inf if self.seconds_each is None else self.seconds_each * self.most_measured
        evaluation = min(0.05, full / (60 * self.settings.minutes))  # of as many sequences as there is time for
        return {"save": 0.02, "samples": 0.03, "final evaluation": evaluation}

    def facts(self) -> dict[str, float]:
        """How fast this process is: tokens, counted operations, and the share of its GPU's peak where we know that."""
        if self.speed is None:
            return {}
        pace = self.speed.look(self.waiting[-1].step, self.clock.seconds) / self.accelerator.num_processes
        found = {"tokens_per_second_per_device": pace}
        if self.operations is not None:
            found["tflops_per_device"] = pace * self.operations / 1e12
            if self.accelerator.device.type == "cuda":
                gpu = recognised(torch.cuda.get_device_name(self.accelerator.device))
                found |= {} if gpu is None else {"mfu": pace * self.operations / gpu.peak}
        return found

    @cached_property
    def operations(self) -> float | None:
        """Of a token, forward and backward, counted in a few sequences of the first batch, as `maskless plan` does."""
        n, grid = min(COUNTED, self.settings.batch), self.data.grid if isinstance(self.data, PreparedImages) else None
        few = dataclasses.replace(self.settings, batch=n, accumulate=1)
        (task,), _ = tasks_of(self.rows(), few, objective_of(few, self.lead, grid), 0, pad=self.data.pad)
        forward = flops.training(self.model.config, task.problems)
        return (1 + flops.BACKWARD) * forward / (n * self.data.length)

    def milestones(self) -> list[Milestone]:
        def look(step: int) -> str:
            found = self.evaluate(step, self.within(0.6 * (self.settings.minutes or 0), LOOK))  # a hundredth
            return f"validation perplexity {found.perplexity:.1f} ± {or_unknown(found.perplexity_error, '.1f')}"

        def show(step: int) -> str:
            return next((repr(str(text)[:300]) for text in self.samples(1)), f"see {self.folder / 'samples.png'}")

        return [(self.settings.evaluate_every, look), (self.settings.sample_every, show)]

    def finish(self, step: int, say: Callable[[str], None]) -> tuple[Likelihood, list[Text]]:
        say("evaluating")
        left = 60 * (self.settings.minutes or 0) - self.clock.wall - self.took.get("samples", 0.0) - TAIL
        measured = self.evaluate(step, self.within(left, self.most_measured))
        say("sampling")
        return measured, self.samples(2)

    def end(self) -> None:
        """Close the trackers and part from the other processes."""
        self.accelerator.end_training()

    def close(self) -> None:
        self.end()
        super().close()
        if self.main:
            plot_losses({self.settings.model: self.metrics.lines}, self.folder / "loss.png")


def run(
    folder: Path, config: RunConfig, console: Console, *, name: str = "training", begun: float | None = None
) -> Summary:
    """Train from the newest state in the folder, or from the start, to the end, showing progress.

    begun: the `time.monotonic()` from which on the minutes of the run count. Default: now.
    """
    with console.status("setting up ..."):
        this = Run(folder, config, begun=begun)
    return complete(this, console, name=name)


def complete(this: Run, console: Console, *, name: str) -> Summary:
    """Take a run to its end, showing progress."""
    settings, world = this.settings, this.accelerator.num_processes
    together = f", {world} processes" if world > 1 else ""
    opening = (
        f"[bold]{name}[/]: {settings.model}, {this.parameters / 1e6:.1f} M parameters, batch {settings.batch} x "
        f"{this.data.length}, {this.accelerator.device.type}{together}"
    )
    ended = folders.complete(this, console, opening, name=name, each=settings.batch * this.data.length)
    this.ema.moved_into(this.network.parameters())  # what is given back is what was measured and saved
    this.model.network.eval()
    return Summary(this.model, *ended.found, ended.steps, ended.seconds, ended.speed)


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
