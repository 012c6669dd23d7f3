"""The training loop of a VQ codec: a generator of steps, in one process on plain torch.

As in `loop.py`, everything random in a step is a function of the seed and the step's number: which images, which are
flipped, where dead codes are put. So a run resumes with nothing but what `Trainer.state` returns.

Shapes: N images, B batch, C channels, H x W pixels, K codes, E width of a code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maskless.codec.vq import VQ, VQConfig, check_size, to_images
from maskless.codec.vq_losses import (
    CodebookUse,
    PatchDiscriminator,
    adaptive_weight,
    entropy_loss,
    hinge_loss,
    multiscale_loss,
    reconstruction_loss,
)
from maskless.data.tokens import global_batch
from maskless.ema import EMA
from maskless.nn import autocast
from maskless.objective import mixed_seed
from maskless.train.config import Settings, check_ranges
from maskless.train.loop import Clock, Progress, share_done

FADE = 0.1  # the share of a run over which the adversarial loss comes in
FLIPS, REVIVALS = 1, 2  # what a step draws
PARTS = ("codec", "judge", "adam", "judge_adam")  # of a trainer that have a state


@dataclass(frozen=True, kw_only=True)
class CodecConfig(Settings):
    """Everything that determines the training of a codec; stands in its run.json."""

    images: tuple[str, ...]  # what `data.images.read_images` takes
    size: int | None = None  # pixels along a side; None: as the first image has them, 64 at most
    codec: VQConfig
    steps: int = 20_000
    batch: int = 64
    warmup: int = 100
    commitment: float = 0.25
    entropy: float = 0.0  # weight of the entropy loss, which makes latents sure and codes evenly used
    multiscale: float = 1.0  # weight of the multi-scale loss, beside 1 of the pixels
    adversarial: float = 0.2  # length of the adversarial gradient, beside 1 of both; 0: none
    adversarial_start: float = 0.5  # the share of the run after which it begins
    ema: float = 0.999
    flip: bool = True  # half of the images, left and right exchanged
    revive_after: int | None = None  # batches after which an unused code is put elsewhere; None: derived; 0: never

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", tuple(self.images))  # JSON has lists
        super().__post_init__()
        check_ranges(self, "0 or more", "commitment", "entropy", "multiscale", "adversarial", "revive_after")
        check_ranges(self, "0 to 1", "adversarial_start")


class Trainer:
    """A codec with what trains it: the discriminator, both optimisers, the averages, and the record of used codes."""

    def __init__(self, config: CodecConfig, images: np.ndarray, rows: np.ndarray, device: torch.device):
        """images: (N, H, W, C) uint8; rows: the numbers of those to train on."""
        check_size(images.shape[1], images.shape[2], config.codec.factor)
        self.config, self.images, self.rows, self.device = config, images, rows, device
        torch.manual_seed(config.seed)  # the first weights
        layout: Any = {"memory_format": torch.channels_last} if device.type == "cuda" else {}
        self.codec = VQ(config.codec).to(device, **layout)
        self.judge = PatchDiscriminator(config.codec.channels, min(images.shape[1:3])).to(device, **layout)
        self.adam, self.judge_adam = (_adam(network, config.learning_rate) for network in (self.codec, self.judge))
        self.ema = EMA(self.codec.parameters(), config.ema)
        tokens = config.batch * images.shape[1] * images.shape[2] // config.codec.factor**2
        derived = min(200, max(20, math.ceil(8 * config.codec.codes / tokens)))  # each code had eight chances or so
        self.use = CodebookUse(config.codec.codes, config.revive_after or derived, device)

    def step(self, step: int, share: float, rate: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Take one step; returns the loss, the norm of its gradient and the parts of the loss."""
        config, images = self.config, self.batch(step)
        with autocast(self.device):
            out, quantised = self.codec(images)
        parts = {"pixels": reconstruction_loss(out, images), "multiscale": multiscale_loss(out, images)}
        seen = parts["pixels"] + config.multiscale * parts["multiscale"]
        parts |= {"codebook": quantised.codebook, "commitment": quantised.commitment}
        loss = seen + quantised.codebook + config.commitment * quantised.commitment
        if config.entropy:
            latents = quantised.latents.permute(0, 2, 3, 1).flatten(0, 2)
            parts["entropy"] = entropy_loss(latents, self.codec.quantize.vectors())
            loss = loss + config.entropy * parts["entropy"]
        judged = config.adversarial > 0 and share >= config.adversarial_start
        if judged:
            self.judge.requires_grad_(False)
            with autocast(self.device):
                parts["adversarial"] = -self.judge(out).float().mean()
            self.judge.requires_grad_(True)
            strength = config.adversarial * min(1.0, (share - config.adversarial_start) / FADE)
            last = self.codec.decoder.conv_out.weight
            loss = loss + strength * adaptive_weight(seen, parts["adversarial"], last) * parts["adversarial"]
        gradient = _update(self.codec, self.adam, loss, rate, config.clip)
        if judged:
            with autocast(self.device):
                parts["discriminator"] = hinge_loss(self.judge(images), self.judge(out.detach()))
            _update(self.judge, self.judge_adam, parts["discriminator"], rate, config.clip)
        self.ema.update(self.codec.parameters())
        self.use.add(step, quantised.indices)
        if config.revive_after != 0 and (step + 1) % self.use.batches == 0:
            self.revive(step, quantised.latents.detach())
        return loss.detach(), gradient, {name: value.detach() for name, value in parts.items()}

    def batch(self, step: int) -> Tensor:
        """The images of a step, some of them flipped.  (B, C, H, W)"""
        rows = self.rows[global_batch(step, self.config.batch, len(self.rows), self.config.seed)]
        pixels = torch.from_numpy(self.images[rows])
        if self.config.flip:
            generator = torch.Generator().manual_seed(mixed_seed(self.config.seed, step, FLIPS))
            flipped = torch.rand(len(rows), generator=generator) < 0.5
            pixels = torch.where(flipped[:, None, None, None], pixels.flip(2), pixels)
        if self.device.type == "cuda":  # from pinned memory the copy does not wait for the steps before
            pixels = pixels.pin_memory().to(self.device, non_blocking=True)
        return to_images(pixels.to(self.device))

    @torch.no_grad()
    def revive(self, step: int, latents: Tensor) -> None:
        """Put codes that no recent batch used where latents are; their moments and averages are reset.

        latents (B, E, h, w)
        """
        generator = torch.Generator().manual_seed(mixed_seed(self.config.seed, step, REVIVALS))
        weight = self.codec.quantize.embedding.weight
        flat = latents.permute(0, 2, 3, 1).flatten(0, 2)
        numbers = self.codec.quantize.revive(self.use.dead(), flat, generator)
        for moment in ("exp_avg", "exp_avg_sq"):
            self.adam.state[weight][moment][numbers] = 0
        place = next(i for i, p in enumerate(self.codec.parameters()) if p is weight)
        self.ema.averages[place][numbers] = weight[numbers]

    def weights(self) -> list[Tensor]:
        """All numbers that steps change, but for the moments of the optimisers."""
        return [*self.codec.parameters(), *self.judge.parameters(), *self.ema.averages]

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, beside the step."""
        parts = {name: getattr(self, name).state_dict() for name in PARTS}
        return parts | {"averages": self.ema.averages, "updates": self.ema.updates, "use": self.use.counts}

    def restore(self, state: dict[str, Any]) -> None:
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        self.ema.restore(state["averages"], state["updates"])
        self.use.counts.copy_(state["use"])


def train_steps(trainer: Trainer, *, start: int = 0, clock: Clock | None = None) -> Iterator[Progress]:
    """Take steps from `start` on, until the last step or until the minutes are spent.

    clock: continues from earlier parts of the run.
    """
    config, clock, cuda = trainer.config, clock or Clock(0.0), trainer.device.type == "cuda"
    share = share_done(config, start, clock)
    for step in range(start, config.steps):
        if share >= 1:
            return
        rate = config.rate(step, share)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True) if cuda else nullcontext():
            loss, gradient, parts = trainer.step(step, share, rate)
        share = share_done(config, step + 1, clock)
        yield Progress(step + 1, loss, gradient, rate, share, parts)


def _adam(network: nn.Module, rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def _update(network: nn.Module, adam: torch.optim.Optimizer, loss: Tensor, rate: float, clip: float) -> Tensor:
    """Step along the clipped gradient; returns its norm before."""
    for group in adam.param_groups:
        group["lr"] = rate
    loss.backward()
    norm = nn.utils.clip_grad_norm_(network.parameters(), clip)
    adam.step()
    adam.zero_grad(set_to_none=True)
    return norm.detach()
