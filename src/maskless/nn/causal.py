"""A left-to-right transformer: the autoregressive baseline. The engine samples from it with a key-value cache.

It answers the problems that a causal model can: the context of a problem is a prefix, positions 0 to n-1 in order, and
a target p is predicted from the tokens before it. A learned start vector stands before the first token.

Shapes: S problems, n tokens of each context, U targets, D width, V vocabulary, h heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maskless.nn.attention import rotary_table
from maskless.nn.blocks import ConstantCondition, Embedding, Head, Read, SelfBlock, lowered, read_logits
from maskless.nn.sizes import check_fields, check_heads
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
        check_fields(self)
        check_heads(self.width, self.heads)


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

    def forward(self, problems: Problems, read: Read = read_logits) -> Tensor:
        """Problems whose contexts are prefixes of one length (`check` says so) -> (U, V)

        read: (head, x, condition) -> what is asked for, where training puts its loss.
        """
        condition = self.condition()
        return read(self.head, self.states(problems, condition), condition)

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
        """What the head reads at the targets.  -> (U, D)"""
        S, n = len(problems), problems.offsets.longest
        hidden = self.hidden(problems.tokens.view(S, n)[:, : self.config.length - 1], condition)  # (S, n+1, D)
        return hidden[problems.target_offsets.owner, problems.targets]

    def check(self, problems: Problems) -> None:
        """Raise a ValueError for problems that a causal model cannot answer."""
        prefix = problems.offsets.equal and bool((problems.positions == problems.offsets.within).all())
        if not prefix or (problems.targets.numel() and int(problems.targets.max()) > problems.offsets.longest):
            raise ValueError(
                "a causal model predicts a position from all the positions before it: "
                "its contexts must be prefixes of one length, and its targets at most that length"
            )

    def hidden(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """What the head reads for positions 0 to n, given tokens 0 to n-1.  (S, n), (1, C) -> (S, n+1, D)"""
        S, n = tokens.shape
        x = torch.cat([lowered(self.start).expand(S, 1, -1), self.embedding(tokens)], 1).flatten(0, 1)
        offsets, rope = Offsets.regular(S, n + 1, x.device), self.rope[: n + 1].repeat(S, 1, 1)
        for block in self.blocks:
            x = block(x, offsets, rope, condition)
        return x.unflatten(0, (S, n + 1))
