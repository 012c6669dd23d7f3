"""What a VQ codec is trained on, with no downloaded network: a multi-scale reconstruction and a patch discriminator.

Shapes: B batch, C channels, H x W pixels, K codes, R batches that are remembered.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.codec.vq_blocks import norm

SCALES = 4  # resolutions that are compared, each half of the one before
SMALLEST = 4  # pixels along a side of the coarsest
SHARP = 100.0  # of the soft choice of a code: the inverse of a temperature
CHOICES = 1 << 24  # latents times codes that the entropy is computed of


def reconstruction_loss(out: Tensor, images: Tensor) -> Tensor:
    """Mean absolute plus mean squared difference of the pixels."""
    difference = out.float() - images
    return difference.abs().mean() + difference.square().mean()


def multiscale_loss(out: Tensor, images: Tensor) -> Tensor:
    """Stands in for a perceptual loss: edges at every scale, colours at the coarse ones.

    Both images are averaged over 2x2 pixels again and again. At each scale the differences between neighbours (what an
    edge is) are compared by their mean absolute difference, below the first scale the values too; scales are averaged.
    """
    difference = out.float() - images  # pooling and neighbours are linear: of the difference once, not of both images
    total, scales = difference.new_zeros(()), 0
    while scales < SCALES and min(difference.shape[2:]) >= SMALLEST:
        total = total + difference.diff(dim=2).abs().mean() + difference.diff(dim=3).abs().mean()
        if scales:
            total = total + difference.abs().mean()
        difference, scales = F.avg_pool2d(difference, 2), scales + 1
    return total / max(1, scales)


def psnr(out: Tensor, images: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, the reconstruction cut off at -1 and 1.  (B, C, H, W) -> (B,)"""
    error = (out.float().clamp(-1, 1) - images).square().mean((1, 2, 3))
    return 10 * torch.log10(4 / error.clamp_min(1e-10))


def entropy_loss(latents: Tensor, codes: Tensor) -> Tensor:
    """The mean entropy of each latent's choice of a code, less the entropy of all choices together.

    latents (N, E), codes (K, E), both on the sphere; a latent chooses by softmax(SHARP * cosine). At best -log K: each
    is sure, and all codes are used alike. Of many latents some stand for all.  Yu et al. 2023 (MAGVIT-v2), Sec. 3.1
    """
    some = latents[:: max(1, -(-len(latents) * len(codes) // CHOICES))]  # rounded up
    log_p = (SHARP * some @ codes.mT).log_softmax(-1)
    p = log_p.exp()
    mean = p.mean(0)
    return (mean * mean.clamp_min(1e-12).log()).sum() - (p * log_p).sum(-1).mean()  # log 0 has no gradient


class PatchDiscriminator(nn.Module):
    """How real each patch looks; no norm runs over the batch, so an image's scores are its own.

    (B, C, H, W) -> (B, 1, patches down, patches across)
    """

    def __init__(self, channels: int, size: int, width: int = 64):
        """size: the shorter side of the images; it decides how often they are halved."""
        super().__init__()
        halvings = min(3, max(1, int(math.log2(max(1, size))) - 3))
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for i in range(1, halvings + 1):
            inner, outer = width * min(8, 2 ** (i - 1)), width * min(8, 2**i)
            stride = 2 if i < halvings else 1
            layers += [nn.Conv2d(inner, outer, 3 + stride - 1, stride, 1), norm(outer), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(outer, 1, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def hinge_loss(real: Tensor, made: Tensor) -> Tensor:
    """Of the discriminator: real patches above 1, made ones below -1."""
    return 0.5 * (F.relu(1 - real.float()).mean() + F.relu(1 + made.float()).mean())


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor, last: Tensor) -> Tensor:
    """What makes the adversarial gradient as long as the other one at the decoder's last weights.  VQGAN, eq. 7"""
    one = torch.autograd.grad(reconstruction, last, retain_graph=True)[0].norm()
    other = torch.autograd.grad(adversarial, last, retain_graph=True)[0].norm()
    return (one / (other + 1e-4)).clamp(0, 1e4).detach()


class CodebookUse:
    """How often the last R batches used each code."""

    def __init__(self, codes: int, batches: int, device: torch.device | str = "cpu"):
        self.counts = torch.zeros(batches, codes, dtype=torch.int32, device=device)  # (R, K)

    @property
    def batches(self) -> int:
        return len(self.counts)

    def add(self, step: int, indices: Tensor) -> None:
        """Remember the batch of a step in the place of the one R steps before."""
        row, indices = self.counts[step % self.batches].zero_(), indices.flatten()
        row.scatter_add_(0, indices, torch.ones_like(indices, dtype=row.dtype))

    def dead(self) -> Tensor:
        """Codes that no batch used.  (K,)"""
        return self.counts.sum(0) == 0

    def used(self) -> float:
        """The share of codes that were used."""
        return 1 - self.dead().double().mean().item()

    def number_dead(self) -> int:
        return int(self.dead().sum())

    def perplexity(self) -> float:
        """As many codes, all used alike, would carry as much: exp of the entropy."""
        p = self.counts.sum(0).double()
        p = p / p.sum().clamp_min(1)
        return math.exp(-torch.xlogy(p, p).sum().item())
