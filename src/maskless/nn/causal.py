"""A left-to-right transformer: the autoregressive baseline. The engine samples from it with a key-value cache.

It answers the problems that a causal model can: the context of a problem is a prefix, positions 0 to n-1 in order, and
a target p is predicted from the tokens before it. A learned start vector stands before the first token.

Shapes: S problems, n tokens of each context, U targets, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.nn.blocks import lowered
from maskless.nn.masked import Stack, StackConfig
from maskless.problems import Problems


@dataclass(frozen=True, kw_only=True)
class CausalConfig(StackConfig):
    """Sizes of a causal transformer."""


class CausalTransformer(Stack):
    """Logits at each target from the tokens before it, for contexts that are prefixes of one length (`check`)."""

    def __init__(self, config: CausalConfig):
        super().__init__(config, causal=True)

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
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
        start = lowered(self.start).expand(len(tokens), 1, -1)
        return self.through(torch.cat([start, self.embedding(tokens)], 1), condition)
