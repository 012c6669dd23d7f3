"""The run of a codec: its pictures, and what it trains, measures and saves as its model; folder.py does the rest."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
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
from maskless.evaluate.images import fid, look
from maskless.evaluate.inception import Features
from maskless.nn import autocast
from maskless.train import folder as folders
from maskless.train import state
from maskless.train.codec_loop import CodecConfig, Trainer, train_steps
from maskless.train.data import evenly
from maskless.train.folder import Milestone, RunFolder
from maskless.train.interruption import StoppedError
from maskless.train.loop import Progress
from maskless.train.processes import processes
from maskless.train.report import or_unknown, progress_bar

MOST_TESTED = 1_024  # of the images that are held out
MOST_SEEN = 10_000  # of them by a feature network
LARGEST = 64  # pixels along a side, if nobody says
PICTURES = "pictures"  # in run.json, beside the configuration: how many, and their shape
SHOWN = 8  # images in the picture of reconstructions
MULTIPLIERS = {2: (1, 2), 4: (1, 2, 4), 8: (1, 2, 2, 4)}  # by factor


@dataclass(frozen=True)
class CodecQuality:
    """How well the averaged weights reconstruct, and how the last batches used the codes."""

    psnr: float  # dB, the mean over images
    psnr_error: float  # the standard error of that mean
    l1: float  # of values in [-1, 1]
    images: int
    held_out: bool  # False: too few images, so these were trained on
    codes_used: float  # share
    code_perplexity: float
    dead_codes: int = 0
    rfid: float | None = None  # FID of reconstructions and originals, where there is a feature network
    rfid_images: int = 0
    features: str | None = None  # what the feature network is called


@dataclass(frozen=True)
class CodecSummary:
    """How a run ended."""

    codec: VQ
    quality: CodecQuality
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
        raise StoppedError(f"{folder} holds a run already: resume it with --resume, or name another --out")
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
    """The configuration of a resumed run, with a new end or other milestones if they are named."""
    config = read_config(folder)
    own = dataclasses.asdict(config.codec) | dataclasses.asdict(config) | {"factor": config.codec.factor}
    given = (codec or {}) | training | ({} if factor is None else {"factor": factor})
    given |= {"images": _whole(images)} if images else {}
    return dataclasses.replace(config, **folders.changed(folder, own, given))


def _whole(images: list[str]) -> tuple[str, ...]:
    """Sources under names that hold in any folder."""
    return tuple(source if source.startswith("hf:") else str(Path(source).resolve()) for source in images)


def read_config(folder: Path) -> CodecConfig:
    """What run.json in a run's folder says."""

    def build(fields: dict[str, Any]) -> CodecConfig:
        fields.pop(PICTURES, None)
        return CodecConfig(**fields | {"codec": VQConfig(**fields["codec"])})

    return folders.read_config(folder / folders.CONFIG, "the configuration of a codec's run", build)


def find_device() -> torch.device:
    return torch.device(processes().device)


class CodecRun(RunFolder[CodecQuality]):
    """The run of a codec in progress, in one process."""

    takes = "images"

    def __init__(
        self,
        folder: Path,
        config: CodecConfig,
        images: np.ndarray,
        held_out: np.ndarray,
        features: Features | None = None,
        *,
        begun: float | None = None,
    ):
        """images: (N, H, W, C) uint8; held_out: (N,) bool, those to test on; where there are none, on the others."""
        super().__init__(folder, config, begun=begun)
        self.features = features
        self.images, self.held_out, trained = images, bool(held_out.any()), np.flatnonzero(~held_out)
        tested = np.flatnonzero(held_out) if self.held_out else trained
        self.tested = tested[evenly(len(tested), MOST_TESTED)]  # a folder is sorted by class
        self.seen = tested[evenly(len(tested), MOST_SEEN)]  # by the feature network
        if features is not None and len(self.seen) < 2:
            raise ValueError(f"rFID of {len(self.seen)} image(s) to test on: expected 2 or more, or no feature network")
        self.trainer = Trainer(config, images, trained, find_device())
        self.network, self.ema = self.trainer.codec, self.trainer.ema
        self.open(dataclasses.asdict(config) | {PICTURES: images.shape})

    def __iter__(self) -> Iterator[Progress]:
        return train_steps(self.trainer, start=self.start, clock=self.clock)

    def weights(self) -> list[Tensor]:
        return self.trainer.weights()

    def state(self) -> dict[str, Any]:
        return {"trainer": self.trainer.state()}

    def restore(self, found: dict[str, Any]) -> None:
        self.trainer.restore(found["trainer"])
        state.check_numbers(self.weights())

    def save_model(self) -> None:
        with self.averaged():
            self.trainer.codec.save(self.folder / "codec")

    def facts(self) -> dict[str, float]:
        """How the last batches used the codes."""
        return {"codes_used": self.trainer.use.used(), "code_perplexity": self.trainer.use.perplexity()}

    @torch.no_grad()
    def evaluate(self, step: int) -> CodecQuality:
        """PSNR of the averaged weights on images that were held out, and a picture of some of them."""
        decibels, differences, batch = [], [], self.settings.batch
        with self.looking("evaluate"):
            for first in range(0, len(self.tested), batch):
                images, out = self._rebuilt(self.tested[first : first + batch])
                decibels.append(psnr(out, images))
                differences.append((out.float().clamp(-1, 1) - images).abs().mean((1, 2, 3)))
            each = torch.cat(decibels).double().cpu()
            if not each.isfinite().all():
                raise state.diverged(f"the PSNR is {each.mean().item()}", step, self.folder / "states")
            some = self.tested[evenly(len(self.tested), SHOWN)]
            shown, rebuilt = (to_pixels(images).cpu() for images in self._rebuilt(some))
            pictures.reconstructions(shown, rebuilt, self.folder / "reconstructions.png")
        error = each.std().item() / math.sqrt(len(each)) if len(each) > 1 else math.nan
        l1 = torch.cat(differences).mean().item()
        use = self.trainer.use.used(), self.trainer.use.perplexity(), self.trainer.use.number_dead()
        quality = CodecQuality(each.mean().item(), error, l1, len(each), self.held_out, *use)
        self.note(step, **dataclasses.asdict(quality))
        return quality

    def _rebuilt(self, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images by their numbers, and what the codec makes of them.  (n,) -> (n, C, H, W) twice"""
        images = to_images(torch.from_numpy(self.images[numbers]).to(self.trainer.device))
        with autocast(self.trainer.device):
            out, _ = self.trainer.codec(images)
        return images, out

    def milestones(self) -> list[Milestone]:
        return [(self.settings.evaluate_every, lambda step: described(self.evaluate(step)))]

    def at_the_end(self) -> dict[str, float]:
        return super().at_the_end() | ({} if self.features is None else {"rfid": 0.05})

    def finish(self, step: int, say: Callable[[str], None]) -> CodecQuality:
        say("evaluating")
        quality = self.evaluate(step)
        if self.features is None:
            return quality
        say("looking at reconstructions")
        found = self.reconstruction_fid(self.features)
        self.note(step, rfid=found)
        return dataclasses.replace(quality, rfid=found, rfid_images=len(self.seen), features=self.features.name)

    @torch.no_grad()
    def reconstruction_fid(self, network: Features) -> float:
        """FID of the images to test on and of what the averaged weights make of them, as `maskless fid` computes it."""
        with self.looking("rfid"):
            numbers = [self.seen[i : i + self.settings.batch] for i in range(0, len(self.seen), self.settings.batch)]
            originals = (torch.from_numpy(self.images[some]) for some in numbers)
            rebuilt = (to_pixels(self._rebuilt(some)[1]) for some in numbers)
            real, made = (look(batches, network).statistics for batches in (originals, rebuilt))
            return fid(real, made)


def train_codec(
    folder: Path,
    config: CodecConfig,
    console: Console,
    *,
    features: Features | None = None,
    begun: float | None = None,
) -> CodecSummary:
    """Train from the newest state in the folder, or from the start, to the end, showing progress.

    features: the network that judges reconstructions at the end, by their FID.
    """
    images, held_out = read_pictures(config, console)
    _check_pictures(folder, images)
    with console.status("setting up ..."):
        run = CodecRun(folder, config, images, held_out, features, begun=begun)
    size = sum(p.numel() for p in run.trainer.codec.parameters()) / 1e6
    opening = (
        f"[bold]codec[/]: {size:.1f} M parameters, {len(images):,} images of {images.shape[1]} x {images.shape[2]}, "
        f"factor {config.codec.factor}, {config.codec.codes:,} codes, {run.trainer.device.type}"
    )
    ended = folders.complete(run, console, opening, name="training", each=config.batch)
    codec = read_codec(folder / "codec")
    assert isinstance(codec, VQ)
    return CodecSummary(codec, ended.found, ended.steps, ended.seconds, ended.speed)


def described(quality: CodecQuality) -> str:
    """One line for people."""
    kind = "images held out" if quality.held_out else "training images"
    return (
        f"PSNR {quality.psnr:.2f} ± {or_unknown(quality.psnr_error, '.2f')} dB on {quality.images:,} {kind}, "
        f"{quality.codes_used:.0%} of the codes used ({quality.dead_codes:,} dead), "
        f"perplexity {quality.code_perplexity:,.0f}"
        + ("" if quality.rfid is None else f"\nrFID {quality.rfid:.2f} of {quality.rfid_images:,}, {quality.features}")
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
        text = escape(f"  {len(broken):,} image(s) skipped that cannot be read: {named}")
        console.print(text, highlight=False, soft_wrap=True)
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
