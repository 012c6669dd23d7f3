"""The likelihood of images along the orders in which they are drawn, a cell at a time or as many as a sampler decides.

Along an order in K steps each step predicts its cells from those of the steps before, so the costs add up to -log p of
exactly that sampler (without guidance). A network that answers chains gives them all in one pass.

Shapes: B images, L = 1 + cells.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from maskless.checkpoint import Model
from maskless.data.image_tokens import ImageTokens
from maskless.decide import plan_of, settled
from maskless.evaluate.likelihood import Likelihood, likelihood, over_rows
from maskless.how import How
from maskless.logits import row_keys
from maskless.nn.partition import chains
from maskless.objective import along

ANY_ORDER = "any order (bound)"
ORDERS = ("random", "halton", "raster", "regions")  # all but confidence, which is found on the way


@torch.no_grad()
def exactly(model: Model, tokens: Tensor, labels: Tensor | None, how: How, *, seed: int) -> Tensor:
    """-log p of each image, decided as is said, all steps of it.  (B, L), (B,) -> (B,) float64"""
    B, L = tokens.shape
    known = (torch.arange(L) < len(model.lead)).expand(B, L)
    whole = settled(model, how, L - len(model.lead))
    planned = plan_of(model, known, ~known, row_keys(seed, torch.arange(B)), whole)
    return along(model.network, tokens, planned.order, planned.ends[:, 0], labels=labels, seen=planned.seen()).sum(1)


def ways(model: Model, rows: ImageTokens, *, samples: int, **how: object) -> dict[str, Callable[..., Likelihood]]:
    """What measures, by name: the bound over all orders, and of a chain each order that it was trained on.

    how: keywords of `How` for the steps in which an order is drawn. What measures takes the keywords of `over_rows`.
    """
    network, cells = model.network, rows.length - len(model.lead)
    found: dict[str, Callable[..., Likelihood]] = {ANY_ORDER: partial(likelihood, network, rows, samples=samples)}
    if not chains(network):
        return found

    def cost(how: How, tokens: Tensor, counted: Tensor, numbers: np.ndarray, own: int) -> Tensor:
        return exactly(model, tokens, rows.labels(numbers), how, seed=own)

    for order in ORDERS:
        if model.mixture is not None and not model.mixture.has(order, "random"):
            continue
        one_by_one = How(order=order, steps=cells, counts="uniform")
        in_steps = settled(model, How(order=order, **how), cells)  # type: ignore[arg-type]
        name = f"regions {in_steps.regions}" if order == "regions" else order
        for way, settings in ((name, one_by_one), (f"{name}, {in_steps.steps} steps", in_steps)):
            found[way] = partial(over_rows, network, rows, partial(cost, settings))
    return found
