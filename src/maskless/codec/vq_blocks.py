"""The convolutional encoder and decoder of a VQ codec, with the names of LlamaGen's released weights.

Shapes: B batch, C channels, H x W pixels, h x w = H/f x W/f codes, Z latent channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 32  # of every norm, so all widths are multiples of it


def norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, width, eps=1e-6)


class ResBlock(nn.Module):
    """Two convolutions beside an identity, or beside a 1x1 convolution where the width changes."""

    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.norm1, self.conv1 = norm(inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = norm(outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.nin_shortcut(x) + h


class Attention(nn.Module):
    """Every place looks at every other, with one head."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).flatten(2).mT.unsqueeze(1) for part in (self.q, self.k, self.v))  # (B, 1, h*w, C)
        seen = F.scaled_dot_product_attention(q, k, v).squeeze(1).mT.unflatten(2, x.shape[2:])  # (B, C, h, w)
        return x + self.proj_out(seen)


class Halve(nn.Module):
    """Half the height and width; the border is padded on the right and at the bottom only."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Double(nn.Module):
    """Twice the height and width."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks at one resolution; at the lowest, an attention after each; then, by its name, what leads on."""

    def __init__(self, inner: int, outer: int, blocks: int, *, lowest: bool, **onward: type[nn.Module]):
        super().__init__()
        self.res = nn.ModuleList(ResBlock(inner if i == 0 else outer, outer) for i in range(blocks))
        self.attn = nn.ModuleList(Attention(outer) for _ in range(blocks if lowest else 0))
        self.onward = tuple(onward)
        for name, make in onward.items():
            self.add_module(name, make(outer))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        for name in self.onward:
            x = self.get_submodule(name)(x)
        return x


def middle(width: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(width, width), Attention(width), ResBlock(width, width)])


class ImageEncoder(nn.Module):
    """Images to latents.  (B, C, H, W) -> (B, Z, h, w)"""

    def __init__(self, channels: int, widths: list[int], blocks: int, latent: int):
        super().__init__()
        self.conv_in = nn.Conv2d(channels, widths[0], 3, padding=1)
        levels = [*zip([widths[0], *widths], widths, strict=False)]  # all but the lowest end at half the resolution
        halved = [Level(*sizes, blocks, lowest=False, downsample=Halve) for sizes in levels[:-1]]
        self.conv_blocks = nn.ModuleList([*halved, Level(*levels[-1], blocks, lowest=True)])
        self.mid = middle(widths[-1])
        self.norm_out = norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], latent, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_in(images)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class ImageDecoder(nn.Module):
    """Latents to images, with one residual block more at each level.  (B, Z, h, w) -> (B, C, H, W)"""

    def __init__(self, channels: int, widths: list[int], blocks: int, latent: int):
        super().__init__()
        self.conv_in = nn.Conv2d(latent, widths[-1], 3, padding=1)
        self.mid = middle(widths[-1])
        levels = [*zip([widths[-1], *widths[::-1]], widths[::-1], strict=False)]  # all but the last double it
        doubled = [Level(*sizes, blocks + 1, lowest=i == 0, upsample=Double) for i, sizes in enumerate(levels[:-1])]
        self.conv_blocks = nn.ModuleList([*doubled, Level(*levels[-1], blocks + 1, lowest=False)])
        self.norm_out = norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.conv_in(latents)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))
