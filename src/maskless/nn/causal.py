"""A left-to-right transformer with a key-value cache: the autoregressive baseline.

It answers the problems that a causal model can: the context of a problem is a prefix, positions 0 to n-1 in order, and
a target p is predicted from the tokens before it. A learned start vector stands before the first token.

Shapes: S problems, n tokens of each context, U targets, D width, V vocabulary, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.nn.attention import rotary_table
from maskless.nn.blocks import ConstantCondition, Embedding, Head, SelfBlock
from maskless.problems import Offsets, Problems


@dataclass(frozen=True, kw_only=True)
class CausalConfig:
    """Sizes of a causal transformer."""

    vocab: int
    length: int
    width: int = 768
    heads: int = 12
    layers: int = 12
    condition: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of even width")


@dataclass
class Cache:
    """Keys and values of all layers for the tokens seen so far."""

    keys: Tensor  # (layers, S, h, L, d)
    values: Tensor
    used: int = 0


class CausalTransformer(nn.Module):
    """Logits at each target from the tokens before it."""

    rope: Tensor

    def __init__(self, config: CausalConfig):
        super().__init__()
        self.config = config
        D, C, heads = config.width, config.condition, config.heads
        self.embedding = Embedding(config.vocab, D)
        self.start = nn.Parameter(torch.randn(1, D) / D**0.5)
        self.condition = ConstantCondition(C)
        self.blocks = nn.ModuleList(SelfBlock(D, heads, C, config.dropout, causal=True) for _ in range(config.layers))
        self.head = Head(D, config.vocab, C)
        self.register_buffer("rope", rotary_table(config.length, D // heads), persistent=False)

    def forward(self, problems: Problems) -> Tensor:
        """Problems whose contexts are prefixes of one length (`check` says so) -> (U, V)"""
        S, n = len(problems), problems.offsets.longest
        hidden = self.hidden(problems.tokens.view(S, n)[:, : self.config.length - 1])  # (S, n+1, D)
        read = hidden[problems.target_offsets.owner, problems.targets]
        return self.head(read, self.condition())

    def check(self, problems: Problems) -> None:
        """Raise a ValueError for problems that a causal model cannot answer."""
        prefix = problems.offsets.equal and bool((problems.positions == problems.offsets.within).all())
        if not prefix or (problems.targets.numel() and int(problems.targets.max()) > problems.offsets.longest):
            raise ValueError(
                "a causal model predicts a position from all the positions before it: "
                "its contexts must be prefixes of one length, and its targets at most that length"
            )

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads for positions 0 to n, given tokens 0 to n-1.  (S, n) -> (S, n+1, D)"""
        S, n = tokens.shape
        x = torch.cat([self.start.expand(S, 1, -1), self.embedding(tokens)], 1).flatten(0, 1)
        offsets, rope = Offsets.regular(S, n + 1, x.device), self.rope[: n + 1].repeat(S, 1, 1)
        condition = self.condition()
        for block in self.blocks:
            x = block(x, offsets, rope, condition)
        return x.unflatten(0, (S, n + 1))

    def cache(self, rows: int) -> Cache:
        """An empty cache for this many rows."""
        c, weight = self.config, self.start
        shape = c.layers, rows, c.heads, c.length, c.width // c.heads
        return Cache(weight.new_zeros(shape), weight.new_zeros(shape))

    def extend(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits for the next position after these tokens, which join the cache.  (S, n) -> (S, V)

        The first call also lays the start vector, so n may be 0 there; a later call takes one token per row.
        """
        x = self.embedding(tokens)
        if cache.used == 0:
            x = torch.cat([self.start.expand(len(tokens), 1, -1), x], 1)
        elif tokens.shape[1] != 1:
            raise ValueError(f"a filled cache grows by one token per row, not by {tokens.shape[1]}")
        S, n, _ = x.shape
        begin, cache.used = cache.used, cache.used + n
        rope, condition = self.rope[begin : cache.used].repeat(S, 1, 1), self.condition()
        x, offsets = x.flatten(0, 1), Offsets.regular(S, n, x.device)
        for layer, block in enumerate(self.blocks):
            x = block(x, offsets, rope, condition, _Cached(cache.keys[layer], cache.values[layer], begin))
        return self.head(x.unflatten(0, (S, n))[:, -1], condition)


@dataclass
class _Cached:
    """Attention of new tokens to themselves and to those in the cache, which they join."""

    keys: Tensor  # (S, h, L, d)
    values: Tensor
    begin: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, causal: bool) -> Tensor:
        q, k, v = (y.unflatten(0, (len(offsets), -1)).transpose(1, 2) for y in (q, k, v))  # (S, h, n, d)
        end = self.begin + q.shape[2]
        self.keys[:, :, self.begin : end], self.values[:, :, self.begin : end] = k, v
        past = self.keys[:, :, :end], self.values[:, :, :end]
        return F.scaled_dot_product_attention(q, *past, is_causal=self.begin == 0).transpose(1, 2).flatten(0, 1)
