"""Image codecs: pixels to a grid of tokens and back, by a vector-quantised network or level by level.

Shapes: B batch, C channels, H x W pixels, f factor, h x w = H/f x W/f tokens, K codes, E width of a code, N = B*h*w.
Images are floats in [-1, 1], (B, C, H, W). The network and its names are LlamaGen's (PGM, Sec. 5.2 uses its VQ-8).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from maskless.codec.vq_blocks import GROUPS, ImageDecoder, ImageEncoder
from maskless.files import whole_folder, write_aside
from maskless.nn import autocast
from maskless.nn.sizes import check_fields, whole
from maskless.weights import read_network

TABLE = 1 << 27  # cosines of places and codes that are held at a time
MOST_CODES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class VQConfig:
    """Sizes of a VQ codec. The defaults are LlamaGen's VQ-8."""

    codes: int = 16_384
    code_width: int = 8
    latent: int = 256  # channels between the network and the codes
    width: int = 128
    multipliers: tuple[int, ...] = (1, 2, 2, 4)  # of the width, one for each resolution
    blocks: int = 2  # residual blocks at each resolution; the decoder has one more
    channels: int = 3

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width % GROUPS:
            raise ValueError(f"width {self.width} does not fit: expected a multiple of {GROUPS}")
        object.__setattr__(self, "multipliers", tuple(self.multipliers))  # JSON has lists
        if not 2 <= len(self.multipliers) <= 5 or self.multipliers[0] != 1:
            raise ValueError(f"multipliers {list(self.multipliers)}: expected 1 first, then 1 to 4 whole numbers")

    @property
    def factor(self) -> int:
        """Pixels along a side of a token."""
        return 2 ** (len(self.multipliers) - 1)

    @property
    def widths(self) -> list[int]:
        return [self.width * m for m in self.multipliers]


@dataclass(frozen=True)
class Quantised:
    """What a codebook makes of latents."""

    vectors: Tensor  # (B, E, h, w), the codes themselves; gradients pass straight through to the latents
    indices: Tensor  # (B, h, w)
    latents: Tensor  # (B, E, h, w), normalised
    codebook: Tensor  # how far the codes are from the latents, with gradients for the codes alone
    commitment: Tensor  # the same distance, with gradients for the latents alone


class Codebook(nn.Module):
    """Codes on the unit sphere: the stored vectors are normalised wherever they are used."""

    def __init__(self, codes: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        with torch.no_grad():
            self.embedding.weight.copy_(F.normalize(self.embedding.weight, dim=-1))  # evenly over the sphere

    def vectors(self) -> Tensor:
        """(K, E)"""
        return F.normalize(self.embedding.weight.float(), dim=-1)

    @torch.no_grad()
    def nearest(self, latents: Tensor) -> Tensor:
        """The code that is nearest to each latent on the sphere.  (N, E) -> (N,)"""
        vectors = self.vectors().mT
        rows = max(1, TABLE // vectors.shape[1])
        return torch.cat([(part @ vectors).argmax(-1) for part in latents.split(rows)])

    def indices(self, latents: Tensor) -> Tensor:
        """The nearest code at each place.  (B, E, h, w), normalised -> (B, h, w)"""
        return self.nearest(latents.permute(0, 2, 3, 1).flatten(0, 2)).view(-1, *latents.shape[2:])

    def lookup(self, indices: Tensor) -> Tensor:
        """(B, h, w) -> (B, E, h, w)"""
        return F.normalize(self.embedding(indices).float(), dim=-1).permute(0, 3, 1, 2)

    def forward(self, latents: Tensor) -> Quantised:
        """(B, E, h, w), in float32 whatever the network computes in."""
        with autocast(latents.device, enabled=False):
            latents = F.normalize(latents.float(), dim=1)
            indices = self.indices(latents)
            codes = self.lookup(indices)
            through = latents - latents.detach() + codes.detach()
            codebook = F.mse_loss(codes, latents.detach())
            return Quantised(through, indices, latents, codebook, F.mse_loss(latents, codes.detach()))

    @torch.no_grad()
    def revive(self, dead: Tensor, latents: Tensor, generator: torch.Generator) -> Tensor:
        """Put dead codes where latents are, drawn without replacement; returns which codes moved.

        dead (K,) bool, latents (N, E)
        """
        numbers = dead.nonzero().flatten()[: len(latents)]
        drawn = torch.randperm(len(latents), generator=generator)[: len(numbers)].to(latents.device)
        self.embedding.weight[numbers] = F.normalize(latents[drawn].float(), dim=-1)
        return numbers


class VQ(nn.Module):
    """A convolutional codec with a codebook."""

    def __init__(self, config: VQConfig):
        super().__init__()
        self.config = config
        self.codes, self.factor, self.channels = config.codes, config.factor, config.channels
        sizes = (config.channels, config.widths, config.blocks, config.latent)
        self.encoder, self.decoder = ImageEncoder(*sizes), ImageDecoder(*sizes)
        self.quantize = Codebook(config.codes, config.code_width)
        self.quant_conv = nn.Conv2d(config.latent, config.code_width, 1)
        self.post_quant_conv = nn.Conv2d(config.code_width, config.latent, 1)

    @property
    def device(self) -> torch.device:
        return self.quantize.embedding.weight.device

    def latents(self, images: Tensor) -> Tensor:
        """What is quantised, before it is normalised.  (B, C, H, W) -> (B, E, h, w)"""
        return self.quant_conv(self.encoder(images))

    def from_vectors(self, vectors: Tensor) -> Tensor:
        """Images from codes as vectors.  (B, E, h, w) -> (B, C, H, W)"""
        return self.decoder(self.post_quant_conv(vectors))

    def forward(self, images: Tensor) -> tuple[Tensor, Quantised]:
        """The reconstruction, with gradients, and what the codebook made of the images."""
        quantised = self.quantize(self.latents(images))
        return self.from_vectors(quantised.vectors), quantised

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [-1, 1] -> (B, h, w)"""
        check_images(images, self.channels, self.factor)
        return self.quantize.indices(F.normalize(self.latents(images.to(self.device, torch.float32)), dim=1))

    @torch.no_grad()
    def decode(self, indices: Tensor) -> Tensor:
        """(B, h, w) -> (B, C, H, W); not clamped: values may pass -1 and 1 a little"""
        check_indices(indices, self.codes)
        return self.from_vectors(self.quantize.lookup(indices.to(self.device, torch.int64)))

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors; a new folder appears whole, in an old one each file does."""
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        _save(Path(folder), {"kind": "vq", "codec": dataclasses.asdict(self.config)}, state)


class PixelCodec(nn.Module):
    """Tokens without a network: a pixel's level is its token, or its levels, channel by channel, as one number."""

    factor = 1

    def __init__(self, levels: int, channels: int = 1):
        super().__init__()
        few = whole(levels, 2) and whole(channels) and levels <= MOST_CODES and channels < MOST_CODES.bit_length()
        if not few or levels**channels > MOST_CODES:
            expected = f"2 levels or more, 1 channel or more, at most {MOST_CODES:,} tokens"
            raise ValueError(f"{levels} levels of {channels} channel(s): expected {expected}")
        self.levels, self.channels, self.codes = levels, channels, levels**channels

    def encode(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [-1, 1] -> (B, H, W)"""
        check_images(images, self.channels, self.factor)
        levels = ((images.float().clamp(-1, 1) + 1) / 2 * (self.levels - 1)).round().long()
        return (levels * self._places(images.device)).sum(1)

    def decode(self, indices: Tensor) -> Tensor:
        """(B, H, W) -> (B, C, H, W) in [-1, 1]"""
        check_indices(indices, self.codes)
        levels = indices.long()[:, None] // self._places(indices.device) % self.levels
        return levels * (2 / (self.levels - 1)) - 1

    def save(self, folder: str | Path) -> None:
        _save(Path(folder), {"kind": "pixels", "codec": {"levels": self.levels, "channels": self.channels}})

    def _places(self, device: torch.device) -> Tensor:
        powers = torch.arange(self.channels - 1, -1, -1, device=device)
        return (self.levels**powers)[None, :, None, None]


ImageCodec = VQ | PixelCodec
CODECS: dict[str, Callable[..., VQConfig | PixelCodec]] = {"vq": VQConfig, "pixels": PixelCodec}


def read_codec(folder: str | Path) -> ImageCodec:
    """The codec in a folder that `save` wrote, or in a run of `train-codec`; ready to use."""
    folder = Path(folder)
    if not (folder / "config.json").exists() and (folder / "codec").is_dir():
        folder = folder / "codec"
    try:
        config = json.loads((folder / "config.json").read_text())
        codec = CODECS[config["kind"]](**config["codec"])
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is not a codec folder: it has no config.json") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a codec's configuration: {error!r}") from None
    if isinstance(codec, VQConfig):
        return read_network(folder / "model.safetensors", VQ, codec, kind="codec").eval()
    return codec.eval()


def to_images(pixels: Tensor | np.ndarray) -> Tensor:
    """Bytes to floats in [-1, 1].  (B, H, W, C) uint8 -> (B, C, H, W)"""
    pixels = torch.as_tensor(pixels)
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise ValueError(f"pixels are {_kind(pixels)}: expected uint8 of shape (B, H, W, C)")
    return pixels.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def to_pixels(images: Tensor) -> Tensor:
    """Floats to bytes; what passes -1 and 1 is cut off.  (B, C, H, W) -> (B, H, W, C) uint8"""
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def check_images(images: Tensor, channels: int, factor: int) -> None:
    """Raise a ValueError about what an encoder cannot take."""
    if not images.is_floating_point() or images.ndim != 4 or images.shape[1] != channels:
        raise ValueError(f"images are {_kind(images)}: expected floats in [-1, 1] of shape (B, {channels}, H, W)")
    check_size(images.shape[2], images.shape[3], factor)
    if not images.numel():
        raise ValueError(f"images are {_kind(images)}: expected at least one image")
    if not bool((images.abs() <= 1 + 1e-3).all()):
        low, high = images.min().item(), images.max().item()
        raise ValueError(f"images have values from {low:g} to {high:g}: expected -1 to 1")


def check_size(height: int, width: int, factor: int) -> None:
    """Raise a ValueError if images of this size do not fall into whole tokens."""
    if height % factor or width % factor:
        raise ValueError(f"images of {height} x {width} pixels: expected multiples of the codec's factor {factor}")


def check_indices(indices: Tensor, codes: int) -> None:
    """Raise a ValueError about what a decoder cannot take."""
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool or indices.ndim != 3:
        raise ValueError(f"tokens are {_kind(indices)}: expected whole numbers of shape (B, h, w)")
    numbers = indices.long()  # tokens from disk may be uint16, which torch hardly compares
    wrong = numbers[(numbers < 0) | (numbers >= codes)]
    if len(wrong):
        raise ValueError(f"a token is {int(wrong[0])}: expected 0 to {codes - 1}")


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)}"


def _save(folder: Path, config: dict[str, Any], state: dict[str, Tensor] | None = None) -> None:
    """Write a codec into a folder; one that is new is filled aside and renamed into place."""
    with nullcontext(folder) if folder.is_dir() else whole_folder(folder) as place:
        if state is not None:
            write_aside(place / "model.safetensors", lambda path: save_file(state, path, {"format": "pt"}))
        write_aside(place / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))
