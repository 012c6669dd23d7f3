"""The bidirectional transformer of MDLM, which answers the same problems by processing mask tokens.

It lays each problem out at full length, with a mask id wherever nothing is known, and reads out at the targets. So one
loss, one sampling loop and one benchmark serve it and the Partition Transformer.

Shapes: S problems, L length, U targets, D width, V vocabulary.
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
class MaskedConfig:
    """Sizes of a masked transformer."""

    vocab: int  # rows of the embedding and of the head, the mask's included
    mask: int  # the id that stands for an unknown token
    length: int
    always_full: bool = True  # every sequence has this length; else a problem is laid out as far as it reaches
    width: int = 768
    heads: int = 12
    layers: int = 12
    condition: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.heads)


class MaskedTransformer(nn.Module):
    """Logits at the targets of each problem; every position is processed, known or not."""

    rope: Tensor

    def __init__(self, config: MaskedConfig):
        super().__init__()
        self.config = config
        D, C, heads = config.width, config.condition, config.heads
        self.embedding = Embedding(config.vocab, D)
        self.condition = ConstantCondition(C)
        self.blocks = nn.ModuleList(SelfBlock(D, heads, C, config.dropout) for _ in range(config.layers))
        self.head = Head(D, config.vocab, C, never=config.mask)
        self.register_buffer("rope", rotary_table(config.length, D // heads), persistent=False)

    def forward(self, problems: Problems, read: Read = read_logits) -> Tensor:
        """Problems -> (U, V); read: (head, x, condition) -> what is asked for, where training puts its loss."""
        condition = self.condition()
        return read(self.head, self.states(problems, condition), condition)

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
        """What the head reads at the targets.  -> (U, D)"""
        problems.check_whole("a masked network")
        S, L = len(problems), self.config.length if self.config.always_full else reach(problems)
        known = problems.offsets.owner * L + problems.positions
        tokens = torch.full((S * L,), self.config.mask, device=known.device).index_copy(0, known, problems.tokens)
        x = self.embedding(tokens)  # (S*L, D)
        offsets, rope = Offsets.regular(S, L, x.device), self.rope[:L].repeat(S, 1, 1)
        for block in self.blocks:
            x = block(x, offsets, rope, condition)
        return x.index_select(0, problems.target_offsets.owner * L + problems.targets)


def reach(problems: Problems) -> int:
    """How long a sequence must be to hold every known token and every target."""
    return 1 + max((int(x.max()) for x in (problems.positions, problems.targets) if len(x)), default=-1)
