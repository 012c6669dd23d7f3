"""The transformer of MaskGIT, the masked baseline for images, as released: it answers problems with mask tokens.

Each problem is laid out as the whole image, with a mask id wherever nothing is known. A sequence is a BOS and then the
image; the network has no use for the BOS, and its register (which has no position of its own) stands in that place.

Shapes: S problems, L length with BOS, U targets, D width, H width inside the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.nn.blocks import (
    ClassCondition,
    Head,
    Modulation,
    Norm,
    Operands,
    Read,
    dropout,
    gated,
    lowered,
    modulated,
    read_logits,
    spread,
)
from maskless.nn.sizes import check_fields
from maskless.problems import Offsets, Problems


@dataclass(frozen=True, kw_only=True)
class MaskGITConfig:
    """Sizes of a MaskGIT."""

    vocab: int  # rows of the embedding, which is also the head: the codes and the mask
    mask: int  # the id that stands for an unknown token, and is never predicted
    length: int  # positions: BOS and the image
    classes: int  # labels 0 to classes - 1, and `classes` for a dropped one
    width: int = 1024
    heads: int = 16
    layers: int = 24
    hidden: int | None = None  # inside the MLP; by default 8/3 of the width, up to a multiple of 256
    dropout: float = 0.1
    grid: tuple[int, int] | None = None  # rows and columns of the image

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads")
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))  # JSON has no tuples
            if self.length != 1 + math.prod(self.grid):
                raise ValueError(f"length {self.length} does not hold a BOS and a grid of {self.grid} tokens")

    @property
    def inner(self) -> int:
        """H: two thirds of four times the width, since the MLP has three matrices and not two."""
        return self.hidden or 256 * math.ceil(8 * self.width // 3 / 256)


class MaskGIT(nn.Module):
    """Logits at the targets of each problem; every position is processed, known or not."""

    def __init__(self, config: MaskGITConfig):
        super().__init__()
        self.config = config
        D = config.width
        self.condition = ClassCondition(config.classes, D)
        self.places = nn.Parameter(0.02 * torch.randn(config.length - 1, D))
        self.register = nn.Parameter(0.02 * torch.randn(1, D))
        self.blocks = nn.ModuleList(Block(D, config.heads, config.inner, config.dropout) for _ in range(config.layers))
        self.head = TiedHead(D, config.vocab, D, never=config.mask)

    def forward(self, problems: Problems, read: Read = read_logits) -> Tensor:
        """Problems -> (U, V); read: (head, x, condition) -> what is asked for, where training puts its loss."""
        condition = F.silu(self.condition(problems.labels))  # (1 or S, D)
        x = self.states(problems, condition)
        return read(self.head, x, spread(condition, problems.target_offsets))

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
        """What the head reads at the targets; BOS is no target.  -> (U, D)"""
        problems.check_whole("a masked network")
        S, L = len(problems), self.config.length
        known = problems.offsets.owner * L + problems.positions
        tokens = torch.full((S * L,), self.config.mask, device=known.device).index_copy(0, known, problems.tokens)
        image = F.embedding(tokens.view(S, L)[:, 1:], self.head.linear.weight) + self.places
        x = lowered(torch.cat([self.register.expand(S, 1, -1), image], 1)).flatten(0, 1)  # (S*L, D)
        offsets = Offsets.regular(S, L, x.device)
        for block in self.blocks:
            x = block(x, offsets, condition)
        return x.index_select(0, problems.target_offsets.owner * L + problems.targets)


class Block(nn.Module):
    """Attention with normalised queries and keys, then a gated MLP (SwiGLU), both modulated.  (S*L, D) -> (S*L, D)"""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)  # what is gated by its SiLU, and what it gates
        self.down = nn.Linear(hidden, width, bias=False)
        self.modulation = Modulation(width, width, 6)
        joined = {self.qkv: 3, self.out: 1, self.up: 2, self.down: 1}  # how many matrices each is made of
        for part in (part for linear, parts in joined.items() for part in linear.weight.data.chunk(parts)):
            nn.init.xavier_uniform_(part)

    def forward(self, x: Tensor, offsets: Offsets, condition: Tensor) -> Tensor:
        """x: segments of equal length; condition (1 or S, D)"""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition, offsets)
        rate = self.dropout if self.training else 0.0
        q, k, v = F.linear(*modulated(rms_normalise(x), self.qkv, self.norm1, shift1, scale1)).chunk(3, -1)
        q, k = rms_normalise(q), rms_normalise(k)  # over all heads together
        q, k, v = (y.view(len(offsets), -1, self.heads, y.shape[1] // self.heads).transpose(1, 2) for y in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)  # (S, h, L, d)
        x = x + dropout(gated(a.transpose(1, 2).reshape(x.shape), self.out, gate1), rate, self.training)
        gate, value = F.linear(*modulated(rms_normalise(x), self.up, self.norm2, shift2, scale2)).chunk(2, -1)
        return x + gated(dropout(F.silu(gate) * value, rate, self.training), self.down, gate2)


class TiedHead(Head):
    """Logits from hidden states by the token vectors themselves, after a norm with a bias.  (U, D) -> (U, V)"""

    def __init__(self, width: int, vocab: int, condition: int, never: int | None = None):
        super().__init__(width, vocab, condition, never)
        self.norm_bias = nn.Parameter(torch.zeros(width))
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.xavier_uniform_(self.modulation.linear.weight)

    def operands(self, x: Tensor, condition: Tensor) -> Operands:
        shift, scale = self.modulation(condition)
        return modulated(rms_normalise(x), self.linear, self.norm, shift + self.norm_bias * (1 + scale), scale)


def rms_normalise(x: Tensor) -> Tensor:
    """Mean square 1 along the width, computed in float32.  (T, D) -> (T, D)"""
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-5).to(x.dtype)
