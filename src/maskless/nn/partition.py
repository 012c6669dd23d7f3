"""The Partition Transformer: an encoder over the context, GroupSwap, and a decoder at the targets.  PGM, Sec. 4

It never processes a mask token: the encoder sees only known tokens, the decoder works only at the targets.

Shapes: S problems, T context tokens, U targets, D width, V vocabulary, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maskless.nn.attention import attention, rotary_table, rotate
from maskless.nn.blocks import ConstantCondition, CrossBlock, Embedding, Head, Read, SelfBlock, normalise, read_logits
from maskless.problems import Offsets, Problems

QUERIES = ("position", "mean", "logsumexp")
CONTEXTS = ("full", "ordered")
SWAPS = ("released", "residual")


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Sizes and kinds of a Partition Transformer."""

    vocab: int  # rows of the embedding and of the head
    length: int  # positions
    width: int = 768
    heads: int = 12
    encoder: int = 6  # layers
    decoder: int = 6
    condition: int = 128  # width of the constant that drives the modulations
    dropout: float = 0.1
    queries: str = "position"  # what GroupSwap asks with: the position, or also an aggregate of the context
    swap: str = "released"  # what GroupSwap returns: only what it found, or (residual) its query as well
    context: str = "full"  # "ordered": a context token attends only to those known before it, so it can be cached
    never: int | None = None  # an id that is never predicted (released models keep a row for a mask)

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads of even width")
        for what, known in (("queries", QUERIES), ("swap", SWAPS), ("context", CONTEXTS)):
            if getattr(self, what) not in known:
                raise ValueError(f"unknown {what} {getattr(self, what)!r}: expected one of {', '.join(known)}")


class PartitionTransformer(nn.Module):
    """Logits at the targets of each problem, from the tokens of its context alone."""

    rope: Tensor

    def __init__(self, config: PartitionConfig):
        super().__init__()
        self.config = config
        D, C, heads, dropout = config.width, config.condition, config.heads, config.dropout
        self.embedding = Embedding(config.vocab, D)
        self.condition = ConstantCondition(C)
        ordered = config.context == "ordered"
        self.encoder = nn.ModuleList(SelfBlock(D, heads, C, dropout, causal=ordered) for _ in range(config.encoder))
        self.swap = GroupSwap(D, heads, config.length, config.queries, config.swap == "residual")
        self.decoder = nn.ModuleList(CrossBlock(D, heads, C, dropout) for _ in range(config.decoder))
        self.head = Head(D, config.vocab, C, config.never)
        self.register_buffer("rope", rotary_table(config.length, D // heads), persistent=False)

    def forward(self, problems: Problems, read: Read = read_logits) -> Tensor:
        """Problems -> (U, V); read: (head, x, condition) -> what is asked for, where training puts its loss."""
        condition = self.condition()
        return read(self.head, self.states(problems, condition), condition)

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
        """What the head reads at the targets.  -> (U, D)"""
        ropes = self.rope[problems.targets], self.rope[problems.positions]
        ends = problems.target_offsets, problems.offsets
        memory = self.embedding(problems.tokens)  # (T, D)
        for block in self.encoder:
            memory = block(memory, problems.offsets, ropes[1], condition)
        x = self.swap(problems.targets, memory, ends, ropes).to(memory.dtype)  # (U, D)
        memory = normalise(memory)  # once for all decoder layers: their norms share the statistics
        for block in self.decoder:
            x = block(x, memory, ends, ropes, condition)
        return x


class GroupSwap(nn.Module):
    """What stands at the targets first: cross-attention from queries that know only where they are.  PGM, Sec. 4.1

    With an aggregate, the queries also know a summary of the encoded context. (The paper adds the aggregate after the
    projection, the released code before the norm, as here.) No MLP: the output is the decoder's input.

    residual: the output keeps the query, so that the decoder knows where it is; in the released networks it must find
    that out again from what it attends to. That helps on a small position-bound language and hurts on real text
    (docs/results.md).
    """

    places: Tensor

    def __init__(self, width: int, heads: int, length: int, queries: str, residual: bool):
        super().__init__()
        self.heads, self.residual = heads, residual
        self.aggregate = {"position": None, "mean": segment_mean, "logsumexp": segment_logsumexp}[queries]
        self.start = nn.Parameter(torch.randn(1, width))
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("places", sinusoids(length, width), persistent=False)

    def forward(
        self, targets: Tensor, memory: Tensor, ends: tuple[Offsets, Offsets], ropes: tuple[Tensor, Tensor]
    ) -> Tensor:
        """targets (U,), memory (T, D); ends, ropes: of the targets and of the context -> (U, D)"""
        query = self.start + self.places[targets]
        if self.aggregate is not None:
            query = query + self.aggregate(memory, ends[1])[ends[0].owner]
        query = self.norm(query)
        q = self.q(query).unflatten(1, (self.heads, -1))
        k, v = self.kv(memory).unflatten(1, (2, self.heads, -1)).unbind(1)
        a = attention(rotate(q, ropes[0]), rotate(k, ropes[1]), v, *ends, causal=False)
        found: Tensor = self.out(a.flatten(1))
        return query + found if self.residual else found


def segment_mean(x: Tensor, offsets: Offsets) -> Tensor:
    """The mean of each segment, 0 for an empty one.  (T, D) -> (S, D)"""
    total = x.new_zeros(len(offsets), x.shape[1]).index_add(0, offsets.owner, x)
    return total / offsets.lengths.clamp_min(1)[:, None]


def segment_logsumexp(x: Tensor, offsets: Offsets) -> Tensor:
    """The log-sum-exp of each segment per channel, 0 for an empty one.  (T, D) -> (S, D)"""
    index = offsets.owner[:, None].expand_as(x)
    top = x.detach().new_full((len(offsets), x.shape[1]), -torch.inf).scatter_reduce(0, index, x.detach(), "amax")
    top = top.masked_fill(top.isinf(), 0.0)
    total = x.new_zeros(len(offsets), x.shape[1]).index_add(0, offsets.owner, (x - top[offsets.owner]).exp())
    empty = (offsets.lengths == 0)[:, None]
    return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, 0.0)


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed position vectors: cosines, then sines, of i / 10000^(2j/D).  -> (L, D)  PGM, Sec. 4.1"""
    j = torch.arange(width // 2, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10_000 ** (2 * j / width)
    return torch.cat([angle.cos(), angle.sin()], 1).float()
