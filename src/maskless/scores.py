"""Scores of texts: the exact likelihood along an order, or a bound over all orders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maskless import order as od
from maskless.checkpoint import Model, Numbers, check_ids, check_model, check_rows, whole
from maskless.decide import order_of, settled
from maskless.how import How, check_positive
from maskless.nn.calls import evaluating
from maskless.nn.causal import CausalTransformer
from maskless.objective import along, bound, orders_of
from maskless.seeds import seed_of

NAMES = ("left", "strands")
IMAGE_NAMES = ("halton", "raster", "regions")


def log_likelihood(
    model: Model,
    tokens: Any,
    known: Numbers | None = None,
    *,
    labels: Numbers | None = None,
    order: str | Numbers | None = None,
    strands: int | None = None,
    regions: int | None = None,
    orders: int | None = None,
    samples: int = 32,
    seed: int | None = 0,
) -> Tensor:
    """log p(unknown tokens | known tokens) of each sequence, in nats.  (B, L) -> (B,) float64

    tokens: a text, several, or token ids (B, L) or (L,): a tensor, an array or lists, taken as they stand. The BOS that
    begins a text, and rows of ids that have one, is given, not scored. Images may also be grids, (B, h, w) or (h, w),
    and have labels (B,), the numbers of their classes (by default none).
    known (B, L) bool: other tokens that are given. By default an unbiased estimate of the variational bound (the
    mean over all orders) from `samples` splits or orders; of a causal model the exact value.

    order: the exact likelihood along it: "left", "strands" (each run of unknown tokens is one, or `strands` of them in
    all), or a permutation of the positions, (L,) or (B, L). Known tokens come first, as it names them. Images have
    "halton", "raster" and "regions" (`regions` along a side). A model with ordered context needs one pass; another one
    a call for each token.
    orders: so many random orders give a tighter bound, log of the mean of p instead of the mean of log p. The seed
    decides the splits and orders (None: others each time).
    """
    check_model(model)
    seed = seed_of(seed)
    if isinstance(tokens, str):
        if known is not None:
            raise ValueError("known= goes with token ids: expected none with a text")
        tokens = [model.lead + model.text_codec.encode(tokens)]
    elif isinstance(tokens, list | tuple) and tokens and isinstance(tokens[0], str):
        how: dict[str, Any] = {"order": order, "strands": strands, "orders": orders, "samples": samples, "seed": seed}
        return torch.cat([log_likelihood(model, text, known, **how) for text in tokens])
    tokens = whole("tokens", tokens).cpu()
    if (grid := model.frame.grid) is not None and tokens.shape[-2:] == grid:
        tokens, known = _flattened(model, tokens, known)
    single = tokens.ndim == 1
    tokens, known = _rows(model, tokens, known)
    named = _labels(model, labels, len(tokens))
    if order is not None and not isinstance(order, str):
        order = whole("order", order).cpu()
    _check_order(order, samples=samples, strands=strands, regions=regions, orders=orders)
    with evaluating(model.network):
        if isinstance(model.network, CausalTransformer):
            if order is not None and order != "left":
                raise ValueError("a causal model knows one order only: expected 'left'")
            score = -bound(model.network, tokens, known)
        elif order is not None:
            way = _permuted(model, order, known, strands, regions)
            score = -along(model.network, tokens, way, known.sum(1), labels=named).sum(1)
        elif orders is not None:
            costs = orders_of(model.network, tokens, known, counted=~known, labels=named, orders=orders, seed=seed)
            score = (-costs).logsumexp(0) - torch.tensor(float(orders)).log()
        else:
            score = -bound(model.network, tokens, known, labels=named, samples=samples, seed=seed)
    return score[0] if single else score


def _check_order(order: str | Tensor | None, **counts: int | None) -> None:
    """Raise a ValueError about what does not go with an order, or is less than 1."""
    for name in ("strands", "regions"):
        if counts[name] is not None and not (isinstance(order, str) and order == name):
            raise ValueError(f"{name} {counts[name]} goes with the order {name!r}, not with {order!r}")
    if order is not None and counts["orders"] is not None:
        raise ValueError(f"orders {counts['orders']} are random ones: expected no order beside them")
    check_positive(**{name: value for name, value in counts.items() if value is not None})


def _rows(model: Model, tokens: Tensor, known: Numbers | None) -> tuple[Tensor, Tensor]:
    """Token ids of one row or several, and which are given: what begins every sequence always is.  -> (B, L) x 2"""
    given = torch.zeros_like(tokens, dtype=torch.bool) if known is None else torch.as_tensor(known).cpu().bool()
    if tokens.ndim == 1:
        tokens, given = tokens[None], given[None]
    check_rows(model, tokens, given)
    lead = torch.tensor(model.lead, dtype=torch.long)
    if len(lead) <= tokens.shape[1]:
        begins = (tokens[:, : len(lead)] == lead).all(1, keepdim=True)
        given = given | (begins & (torch.arange(tokens.shape[1]) < len(lead)))
    return tokens, given


def _flattened(model: Model, tokens: Tensor, known: Numbers | None) -> tuple[Tensor, Tensor | None]:
    """Grids as rows that begin with the BOS.  (..., h, w) -> (..., L)"""
    lead = torch.tensor(model.lead).expand(*tokens.shape[:-2], -1)
    rows = torch.cat([lead, tokens.flatten(-2)], -1)
    if known is None:
        return rows, None
    given = torch.as_tensor(known).cpu().bool()
    return rows, torch.cat([torch.ones_like(lead, dtype=torch.bool), given.flatten(-2)], -1)


def _labels(model: Model, labels: Numbers | None, rows: int) -> Tensor | None:
    """The numbers of classes of a model that has them, by default the one that stands for none.  -> (B,)"""
    dropped = model.frame.dropped
    if dropped is None:
        if labels is not None:
            raise ValueError("this model knows no classes: expected no labels")
        return None
    if labels is None:
        return torch.full((rows,), dropped)
    given = whole("labels", labels).cpu().flatten()
    check_ids("label", given, dropped)
    if len(given) != rows:
        raise ValueError(f"{len(given)} labels: expected one for each of {rows} sequences")
    return given


def _permuted(model: Model, order: str | Tensor, known: Tensor, strands: int | None, regions: int | None) -> Tensor:
    """The known positions of each row, in the order that its training showed, then the others as asked for."""
    B, L = known.shape
    if isinstance(order, Tensor):
        given = order.expand(B, L) if order.shape in ((L,), (B, L)) else order[None]
        if not torch.equal(given.sort(1).values, torch.arange(L).expand(B, L)):
            raise ValueError(f"an order of shape {tuple(order.shape)}: expected a permutation of 0 to {L - 1}")
        return given.gather(1, (~known).gather(1, given).long().argsort(dim=1, stable=True))
    names = NAMES if model.frame.grid is None else IMAGE_NAMES
    if order not in names:
        raise ValueError(f"unknown order {order!r}: expected one of {', '.join(names)}, or a permutation")
    if model.frame.grid is not None:
        settings = settled(model, How(order=order, regions=regions), L)
        return order_of(model, order, settings.regions)((~known).long(), torch.zeros(B, L, dtype=torch.float64))
    longest = torch.full((B, 1), L) if strands is None else -(-(~known).sum(1, keepdim=True) // strands)
    chosen = od.left if order == "left" else od.strands(longest.clamp_min(1))
    return od.in_place(chosen)((~known).long(), torch.zeros(B, L, dtype=torch.float64))
