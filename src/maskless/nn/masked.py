"""The bidirectional transformer of MDLM, which answers the same problems by processing mask tokens.

It lays each problem out at full length, with a mask id wherever nothing is known, and reads out at the targets. So one
loss, one sampling loop and one benchmark serve it and the Partition Transformer. It shares its layers with the causal
baseline (`Stack`).

Shapes: S problems, L length, n tokens of each problem, U targets, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maskless.nn.attention import rotary_table
from maskless.nn.blocks import ConstantCondition, Embedding, Head, Read, SelfBlock, read_logits
from maskless.nn.sizes import check_fields, check_heads
from maskless.problems import Offsets, Problems


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Sizes of a stack of self-attention blocks."""

    vocab: int  # rows of the embedding and of the head, a mask's included
    length: int
    width: int = 768
    heads: int = 12
    layers: int = 12
    condition: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.heads)


class Stack(nn.Module):
    """Token vectors, self-attention blocks and a head; a subclass lays problems out (`states`)."""

    rope: Tensor

    def __init__(self, config: StackConfig, *, causal: bool = False, never: int | None = None):
        """causal: a token attends only to those before it, of which the first is a learned start vector."""
        super().__init__()
        self.config = config
        D, C, heads = config.width, config.condition, config.heads
        self.embedding = Embedding(config.vocab, D)
        if causal:
            self.start = nn.Parameter(torch.randn(1, D) / D**0.5)
        self.condition = ConstantCondition(C)
        self.blocks = nn.ModuleList(SelfBlock(D, heads, C, config.dropout, causal) for _ in range(config.layers))
        self.head = Head(D, config.vocab, C, never)
        self.register_buffer("rope", rotary_table(config.length, D // heads), persistent=False)

    def forward(self, problems: Problems, read: Read = read_logits) -> Tensor:
        """Problems -> (U, V); read: (head, x, condition) -> what is asked for, where training puts its loss."""
        condition = self.condition()
        return read(self.head, self.states(problems, condition), condition)

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
        """What the head reads at the targets.  -> (U, D)"""
        raise NotImplementedError

    def through(self, x: Tensor, condition: Tensor) -> Tensor:
        """Token vectors after all blocks.  (S, n, D), (1, C) -> (S, n, D)"""
        S, n, _ = x.shape
        x, offsets, rope = x.flatten(0, 1), Offsets.regular(S, n, x.device), self.rope[:n].repeat(S, 1, 1)
        for block in self.blocks:
            x = block(x, offsets, rope, condition)
        return x.unflatten(0, (S, n))


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(StackConfig):
    """Sizes of a masked transformer."""

    mask: int  # the id that stands for an unknown token
    always_full: bool = True  # every sequence has this length; else a problem is laid out as far as it reaches


class MaskedTransformer(Stack):
    """Logits at the targets of each problem; every position is processed, known or not."""

    config: MaskedConfig

    def __init__(self, config: MaskedConfig):
        super().__init__(config, never=config.mask)

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
        problems.check_whole("a masked network")
        S, L = len(problems), self.config.length if self.config.always_full else reach(problems)
        known = problems.offsets.owner * L + problems.positions
        tokens = torch.full((S * L,), self.config.mask, device=known.device).index_copy(0, known, problems.tokens)
        x = self.through(self.embedding(tokens.view(S, L)), condition).flatten(0, 1)  # (S*L, D)
        return x.index_select(0, problems.target_offsets.owner * L + problems.targets)


def reach(problems: Problems) -> int:
    """How long a sequence must be to hold every known token and every target."""
    return 1 + max((int(x.max()) for x in (problems.positions, problems.targets) if len(x)), default=-1)
