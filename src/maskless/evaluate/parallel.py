"""What parallel steps lose, and what exact ones gain: drafts of several tokens, checked as chains.

A plain step draws its tokens from the marginals, as if they did not depend on each other. The check of exact sampling
(speculation.py) says how far that is from the model's own distribution, so that one can choose an order and how many
tokens to draw at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from maskless.checkpoint import Model
from maskless.decide import decide
from maskless.drafts import Tally
from maskless.how import How
from maskless.texts import new_drafts


@dataclass(frozen=True)
class Parallel:
    """Of drafts of so many tokens in an order."""

    order: str
    draft: int
    accepted: float  # share of the drafted tokens
    divergence: float | None  # nats, KL of the product of the marginals from the chain, of one draft; None: infinite
    tokens_per_round: float


def parallel(
    model: Model,
    orders: list[str],
    sizes: list[int],
    *,
    texts: int = 64,
    length: int | None = None,
    batch: int = 32,
    on_batch: Callable[[int], None] | None = None,
    **how: Any,
) -> Iterator[Parallel]:
    """Figures of exact texts for each order and size of a draft; of strands there are as many as a draft has tokens.

    The draw is the model's own distribution unless `how` says otherwise: what a nucleus rules out has an infinite KL.
    """
    how = {"temperature": 1.0} | how
    L = model.config.length if length is None else length
    for order in orders:
        for size in sizes:
            strands = size if order == "strands" else None
            settings = How(order=order, strands=strands, exact=True, draft=size, **how)
            tally = Tally()
            for begin in range(0, texts, batch):
                numbers = torch.arange(begin, min(texts, begin + batch))
                drafts = new_drafts(model, model.lead, L, numbers, settings)
                decide(model, drafts)
                tally += drafts.tally
                if on_batch is not None:
                    on_batch(len(numbers))
            nats = tally.nats / tally.rounds
            yield Parallel(
                order=order,
                draft=size,
                accepted=tally.accepted / tally.drafted,
                divergence=nats if nats < float("inf") else None,
                tokens_per_round=tally.decided / tally.rounds,
            )
