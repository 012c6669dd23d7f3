"""A codec's training run as a folder: run.json, metrics.jsonl, states/, codec/, reconstructions.png; it resumes."""

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
from torch import Tensor

from maskless import pictures
from maskless.codec.vq import VQ, VQConfig, check_size, read_codec, to_images, to_pixels
from maskless.codec.vq_losses import psnr
from maskless.data.images import read_images
from maskless.files import sweep, write_aside
from maskless.nn import autocast
from maskless.train.codec_loop import CodecConfig, CodecStep, Trainer, share_done, train_steps
from maskless.train.interruption import Interruption
from maskless.train.loop import Clock, is_due
from maskless.train.report import Metrics, Speed, or_unknown, progress_bar
from maskless.train.state import (
    DIVERGED,
    UNREADABLE,
    check_end,
    check_numbers,
    diverged,
    dump,
    finite,
    saved,
    unreadable,
)

MOST_TESTED = 1_024  # of the images that are held out
LARGEST = 64  # pixels along a side, if nobody says
PICTURES = "pictures"  # in run.json, beside the configuration: how many, and their shape
SHOWN = 8  # images in the picture of reconstructions
MULTIPLIERS = {2: (1, 2), 4: (1, 2, 4), 8: (1, 2, 2, 4)}  # by factor
# What may change when a run goes on; everything else is as it began.
CHANGEABLE = ("steps", "minutes", "evaluate_every", "save_every", "log_every", "keep")


@dataclass(frozen=True)
class Quality:
    """How well the averaged weights reconstruct, and how the last batches used the codes."""

    psnr: float  # dB, the mean over images
    psnr_error: float  # the standard error of that mean
    l1: float  # of values in [-1, 1]
    images: int
    held_out: bool  # False: too few images, so these were trained on
    codes_used: float  # share
    code_perplexity: float


@dataclass(frozen=True)
class CodecSummary:
    """How a run ended."""

    codec: VQ
    quality: Quality
    steps: int
    seconds: float
    images_per_second: float


def configure(
    folder: Path, images: list[str], *, factor: int = 4, codec: dict[str, Any] | None = None, **training: Any
) -> CodecConfig:
    """A run's configuration; what is not given follows from the device.

    codec: keywords of `VQConfig`. training: keywords of `CodecConfig`.
    """
    if not images:
        raise ValueError("what to train on? expected --images with a folder, an archive or arrays")
    if factor not in MULTIPLIERS:
        raise ValueError(f"factor {factor} is out of range: expected one of {', '.join(map(str, MULTIPLIERS))}")
    if (folder / "run.json").exists():
        raise ValueError(f"{folder} holds a run already: go on with --resume, or name another --out")
    if (size := training.get("size")) is not None:
        if size < 1:
            raise ValueError(f"size is {size}: expected 1 or more pixels a side")
        check_size(size, size, factor)
    large = find_device().type == "cuda"
    sizes = {"codes": 1024, "width": 128 if large else 32, "latent": 256 if large else 64} | (codec or {})
    steps = 10_000_000 if training.get("minutes") else 20_000 if large else 500
    settings = {"steps": steps, "batch": 64 if large else 16, "learning_rate": 3e-4 if large else 1e-3} | training
    return CodecConfig(images=_whole(images), codec=VQConfig(multipliers=MULTIPLIERS[factor], **sizes), **settings)


def resumed(
    folder: Path, images: list[str], *, factor: int | None = None, codec: dict[str, Any] | None = None, **training: Any
) -> CodecConfig:
    """The configuration of a run that goes on, with a new end or other stations if they are named."""
    config = read_config(folder)
    own = dataclasses.asdict(config.codec) | dataclasses.asdict(config) | {"factor": config.codec.factor}
    given = (codec or {}) | training | ({} if factor is None else {"factor": factor})
    given |= {"images": _whole(images)} if images else {}
    for name, value in given.items():
        if name not in CHANGEABLE and own[name] != value:
            raise ValueError(f"{name} is {own[name]} in {folder}, not {value}: a run goes on as it began")
    if "steps" in training:
        check_end(folder, training["steps"])
    return dataclasses.replace(config, **{name: value for name, value in training.items() if name in CHANGEABLE})


def _whole(images: list[str]) -> tuple[str, ...]:
    """Sources under names that hold in any folder."""
    return tuple(source if source.startswith("hf:") else str(Path(source).resolve()) for source in images)


def read_config(folder: Path) -> CodecConfig:
    """What run.json in a run's folder says."""
    try:
        fields = json.loads((folder / "run.json").read_text())
        fields.pop(PICTURES, None)
        return CodecConfig(**fields | {"codec": VQConfig(**fields["codec"])})
    except FileNotFoundError:
        raise ValueError(f"nothing to resume: {folder} has no run.json") from None
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{folder / 'run.json'} is not the configuration of a codec's run: {error!r}") from None


def find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class CodecRun:
    """A run in progress: what is trained, and what happens at its stations."""

    def __init__(self, folder: Path, config: CodecConfig, images: np.ndarray, held_out: np.ndarray):
        """images: (N, H, W, C) uint8; held_out: (N,) bool, those to test on; where there are none, on the others."""
        self.folder, self.config, self.images = folder, config, images
        self.held_out, trained = bool(held_out.any()), np.flatnonzero(~held_out)
        tested = np.flatnonzero(held_out) if self.held_out else trained
        count = min(MOST_TESTED, len(tested))
        self.tested = tested[np.arange(count) * len(tested) // count]  # evenly: a folder is sorted by class
        self.trainer = Trainer(config, images, trained, find_device())
        self.start, spent = self._restore()
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        text = json.dumps(dataclasses.asdict(config) | {PICTURES: images.shape}, indent=2) + "\n"
        write_aside(folder / "run.json", lambda path: path.write_text(text))
        self.metrics = Metrics(folder / "metrics.jsonl", self.start)
        self.clock, self.waiting = Clock(spent), list[CodecStep]()

    def __iter__(self) -> Iterator[CodecStep]:
        return train_steps(self.trainer, start=self.start, clock=self.clock)

    def log(self, step: CodecStep) -> float | None:
        """Note a step; every `log_every` steps write the losses since the last time. Returns the last loss, if read."""
        self.waiting.append(step)
        return None if step.step % self.config.log_every and step.share < 1 else self._write_losses()

    def _write_losses(self) -> float | None:
        if not self.waiting:
            return None
        found = [{"loss": step.loss, **step.parts, "gradient": step.gradient} for step in self.waiting]
        values = iter(torch.stack([value.float() for line in found for value in line.values()]).tolist())  # one wait
        for step, names in zip(self.waiting, found, strict=True):
            line = {name: next(values) for name in names}
            if wrong := [name for name, value in line.items() if not math.isfinite(value)]:
                said = f"the {wrong[0]} is {line[wrong[0]]}"  # the loss comes first, then its parts, then the gradient
                raise diverged(said, step.step, self.folder / "states")
            use = self._use() if step is self.waiting[-1] else {}
            self._note(step.step, **line, rate=step.rate, **use)
        self.waiting.clear()
        return line["loss"]

    @torch.no_grad()
    def evaluate(self, step: int) -> Quality:
        """PSNR of the averaged weights on images that were held out, and a picture of some of them."""
        self._write_losses()  # one that is no number is named before it spoils what is measured
        decibels, differences = [], []
        batch, count = self.config.batch, min(SHOWN, len(self.tested))
        with self.clock.paused(), self._averaged():
            for first in range(0, len(self.tested), batch):
                images, out = self._rebuilt(self.tested[first : first + batch])
                decibels.append(psnr(out, images))
                differences.append((out.float().clamp(-1, 1) - images).abs().mean((1, 2, 3)))
            each = torch.cat(decibels).double().cpu()
            if not each.isfinite().all():
                raise ValueError(f"the PSNR is {each.mean().item()} at step {step}: {DIVERGED}")
            shown, rebuilt = self._rebuilt(self.tested[np.arange(count) * len(self.tested) // count])
            pictures.reconstructions(
                to_pixels(shown).cpu(), to_pixels(rebuilt).cpu(), self.folder / "reconstructions.png"
            )
        error = each.std().item() / math.sqrt(len(each)) if len(each) > 1 else math.nan
        l1 = torch.cat(differences).mean().item()
        quality = Quality(each.mean().item(), error, l1, len(each), self.held_out, **self._use())
        self._note(step, **dataclasses.asdict(quality))
        return quality

    def _rebuilt(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images by their numbers, and what the codec makes of them.  (n,) -> (n, C, H, W) twice"""
        images = to_images(torch.from_numpy(self.images[numbers]).to(self.trainer.device))
        with autocast(self.trainer.device):
            out, _ = self.trainer.codec(images)
        return images, out

    def save(self, step: int) -> None:
        """Write the losses up to here, the training state, then the averaged codec."""
        self._write_losses()  # the metrics of a run that resumes here have no gap
        if not finite(self.trainer.weights()):  # a state of them would take the place of a good one
            raise diverged("weights are no finite numbers", step, self.folder / "states")
        with self.clock.paused():
            folder = self.folder / "states"
            state = {"step": step, "seconds": self.clock.seconds, "trainer": self.trainer.state()}
            folder.mkdir(exist_ok=True)
            write_aside(folder / f"step-{step:08d}.pt", lambda path: dump(state, path))
            for old in saved(folder)[: -self.config.keep]:
                old.unlink()
            with self._averaged():
                self.trainer.codec.save(self.folder / "codec")

    def close(self) -> None:
        self.metrics.close()

    def _restore(self) -> tuple[int, float]:
        """Put the newest state in place; returns its step and the seconds spent, or zeros where there is none."""
        states = saved(self.folder / "states")
        if not states:
            return 0, 0.0
        try:
            state = torch.load(states[-1], map_location="cpu", weights_only=True)
            self.trainer.restore(state["trainer"])
            check_numbers(self.trainer.weights())
            return state["step"], state["seconds"]
        except UNREADABLE as error:
            raise unreadable(states, error) from None

    def _use(self) -> dict[str, float]:
        return {"codes_used": self.trainer.use.used(), "code_perplexity": self.trainer.use.perplexity()}

    def _note(self, step: int, **line: Any) -> None:
        self.metrics.add(step=step, **line, seconds=round(self.clock.seconds, 3))

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        with self.trainer.ema.swapped_into(self.trainer.codec.parameters()):
            yield


def train_codec(folder: Path, config: CodecConfig, console: Console) -> CodecSummary:
    """Train from the newest state in the folder, or from the start, to the end, showing progress."""
    images, held_out = read_pictures(config, console)
    _check_pictures(folder, images)
    run = CodecRun(folder, config, images, held_out)
    size = sum(p.numel() for p in run.trainer.codec.parameters()) / 1e6
    resumed = f", resumed at step {run.start:,}" if run.start else ""
    _say(
        console,
        f"[bold]codec[/]: {size:.1f} M parameters, {len(images):,} images of {images.shape[1]} x {images.shape[2]}, "
        f"factor {config.codec.factor}, {config.codec.codes:,} codes, {run.trainer.device.type}{resumed}",
    )
    share, done = share_done(config, run.start, run.clock), run.start
    speed = Speed(config.batch, run.start, run.clock.seconds)
    with progress_bar(console) as bar:
        task = bar.add_task("training", total=1.0, text="starting")
        with Interruption() as interruption:
            for step in run:
                done, last = step.step, step.share >= 1
                if (loss := run.log(step)) is not None:
                    seen = speed.look(done, run.clock.seconds)
                    bar.update(task, completed=step.share, text=f"loss {loss:6.3f}  {seen:>7,.0f} images/s")
                if is_due(config.evaluate_every, step, share) and not last:
                    _say(console, f"  step {done:,}: {described(run.evaluate(done))}")
                interrupted = interruption.asked  # read once: Ctrl-C may come between the lines
                if is_due(config.save_every, step, share) or last or interrupted:
                    run.save(done)
                if interrupted:
                    raise KeyboardInterrupt
                share = step.share
        if done == run.start:  # all was done: a kill may have come between the last state and its codec
            run.save(done)
        seconds = run.clock.seconds
        seen = speed.look(done, seconds)
        bar.update(task, completed=1.0, text="evaluating")
        quality = run.evaluate(done)
        bar.update(task, text=f"{seen:>7,.0f} images/s")
    run.close()
    codec = read_codec(folder / "codec")
    assert isinstance(codec, VQ)
    return CodecSummary(codec, quality, done, seconds, seen)


def described(quality: Quality) -> str:
    """One line for people."""
    kind = "images held out" if quality.held_out else "training images"
    return (
        f"PSNR {quality.psnr:.2f} ± {or_unknown(quality.psnr_error, '.2f')} dB on {quality.images:,} {kind}, "
        f"{quality.codes_used:.0%} of the codes used, perplexity {quality.code_perplexity:,.0f}"
    )


def read_pictures(config: CodecConfig, console: Console) -> tuple[np.ndarray, np.ndarray]:
    """All pictures of a run as squares, and which of them are held out.  (N, s, s, 3) uint8, (N,) bool

    Held out is what the data holds out, or one in 20.
    """
    found, broken = read_images(config.images), list[str]()
    factor = config.codec.factor
    size = config.size or max(factor, min(LARGEST, found.side()) // factor * factor)
    images, held_out = np.empty((found.total, size, size, 3), np.uint8), np.zeros(found.total, dtype=bool)
    count = 0
    with progress_bar(console) as bar:
        task = bar.add_task("reading", total=found.total, text="")
        for square, _, side in found.pictures(size, on_broken=broken.append):
            images[count], held_out[count] = square, side == "valid"
            count += 1
            if count % 1_000 == 0:
                bar.update(task, completed=count, text=f"{count:,} images")
        bar.update(task, completed=found.total, text=f"{count:,} images")
    if broken:
        named = "; ".join(broken[:5]) + ("; ..." if len(broken) > 5 else "")
        _say(console, escape(f"  {len(broken):,} image(s) skipped that cannot be read: {named}"))
    return images[:count], held_out[:count]


def _check_pictures(folder: Path, images: np.ndarray) -> None:
    """Whether there are as many as when the run in a folder began, of the same size."""
    path = folder / "run.json"
    known = json.loads(path.read_text()).get(PICTURES) if path.exists() else None
    if known not in (None, list(images.shape)):
        then, now = (f"{n:,} of {h} x {w}" for n, h, w, _ in (known, images.shape))
        raise ValueError(
            f"the images changed since {folder} began, from {then} to {now} pixels: a run goes on as it began"
        )


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
