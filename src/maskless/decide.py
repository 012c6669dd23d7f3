"""From what a user asks of a model to drafts, and drafts decided: what was not said follows from the model.

Shapes: B rows, L length.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from maskless.checkpoint import Model
from maskless.drafts import Drafts, OnStep
from maskless.draw import SCHEDULES, Guidance, Truncation
from maskless.engine import backend_of
from maskless.how import IMAGE_ORDERS, TEXT_ORDERS, How, check_name
from maskless.mixture import Mixture, region_numbers
from maskless.nn.calls import evaluating
from maskless.nn.causal import CausalTransformer
from maskless.nn.partition import chains
from maskless.order import COUNTS, ORDERS, Order, after_lead, halton, in_place, regions, strand_numbers
from maskless.plans import Plan, check_steps, plan_causal, plan_strands
from maskless.plans import plan as make_plan
from maskless.sampling import run

DRAFT = 16  # tokens that are drawn together by default, to be checked
FEW = 32  # steps by default, where a model was trained on all orders alike


@dataclass(frozen=True)
class Sampled:
    """Rows of tokens and how they came."""

    tokens: Tensor  # (B, L)
    steps: Tensor  # (B, L) the step that decided each token, -1 where it was given
    order: list[list[int]]  # of each row: the decided positions, in the order in which they came


def decide(model: Model, drafts: Drafts, on_step: OnStep | None = None) -> Sampled:
    """The drafts decided, in place."""
    with torch.no_grad(), evaluating(model.network):
        backend = backend_of(model.network, draft=drafts.draft, length=drafts.tokens.shape[1])
        order = run(drafts, backend, on_step)
    return Sampled(drafts.tokens, drafts.came, order)


def drafts_of(
    model: Model,
    tokens: Tensor,
    known: Tensor,
    keys: Tensor,
    how: How,
    *,
    wanted: Tensor | None = None,
    labels: Tensor | None = None,
    spaced: Tensor | None = None,
    at_once: int | None = None,
) -> Drafts:
    """Rows (B, L) of which some tokens are known and the wanted ones, by default all others, are to be decided.

    keys (B,) from `row_keys`; labels (B,) of classes; spaced (B, L): where a token has to begin with a space; at_once:
    exact rows that are under way together.
    """
    wanted, frame = ~known if wanted is None else wanted, model.frame
    how = settled(model, how, int(wanted.sum(1).max()))
    begins = None if spaced is None or not bool(spaced.any()) else frame.begins
    again = order_of(model, how.order if how.order in ("left", "raster") else "random")  # scattered tokens: no strands
    return Drafts(
        tokens=tokens,
        plan=plan_of(model, known, wanted, keys, how),
        keys=keys,
        filter=Truncation(temperature=how.temperature or 0.0, top_k=how.top_k, top_p=how.top_p),
        never=frame.never,
        spaced=None if spaced is None or begins is None else (spaced, begins),
        confident=how.order == "confidence",
        noise=how.noise or 0.0,
        warmup=how.warmup or 0,
        labels=labels,
        guidance=Guidance(weight=how.guidance or 0.0, dropped=frame.dropped, schedule=SCHEDULES[how.schedule]),
        refresh=how.refresh,
        revise=how.revise,
        draft=how.draft or 0,
        at_once=at_once,
        strand=strand_numbers(wanted, _longest(wanted, how)) if how.order == "strands" else None,
        replan=partial(make_plan, order=again, counts=COUNTS[how.counts or "uniform"]),
    )


def settled(model: Model, how: How, unknown: int) -> How:
    """The same with everything said that follows from the model; a ValueError about what it cannot do."""
    return _settled(model, how.with_defaults(model.defaults, unknown), unknown)


def _settled(model: Model, how: How, unknown: int) -> How:
    if how.exact:
        return _exact(model, how, unknown)
    if isinstance(model.network, CausalTransformer):
        return _causal(how, unknown)
    full = model.kind == "partition" and model.config.context == "full"  # each token changes what was encoded
    if how.refresh > 1 and not full:
        raise ValueError(f"refresh {how.refresh} goes with the full context of a Partition Transformer only")
    if model.frame.grid is not None:
        return _image(model.mixture, model.frame.grid, how, unknown)
    if how.regions is not None:
        raise ValueError(f"regions {how.regions} are of images: this is a text model")
    mixture, order = model.mixture, how.order or ("strands" if how.strands else None)
    trained = [] if mixture is None else mixture.strands(unknown)
    order = order or ("strands" if trained else "random")
    check_name("order", order, TEXT_ORDERS)
    seen = "random" if order == "confidence" else order
    if mixture is not None and not (mixture.has(seen) or (seen == "left" and 1 in trained)):
        _warn(order, mixture)
    if order == "strands":
        if how.counts not in (None, "uniform"):
            raise ValueError(f"counts {how.counts!r} with strands, which settle them: expected none")
        strands = how.strands or (trained[0] if trained else 1)
        return replace(how, order=order, strands=strands if how.steps is None else None)
    steps = how.steps if how.steps is not None else min(FEW, unknown) if mixture is None else unknown
    return replace(how, order=order, steps=steps)


def _image(mixture: Mixture | None, grid: tuple[int, int], how: How, unknown: int) -> How:
    """Of images: a chain draws in an order of its mixture. Regions take a cell of each in a step, unless told."""
    if how.strands is not None:
        raise ValueError(f"strands {how.strands} are of text: this is an image model")
    order = how.order or ("regions" if how.regions is not None else "halton")
    if (how.order, how.regions) == (None, None) and mixture is not None and not mixture.has("halton", "random"):
        order = "regions" if mixture.has("regions") else "raster"  # Halton's is one of all orders
    check_name("order", order, IMAGE_ORDERS)
    if mixture is not None and not mixture.has(order, "random"):
        _warn(order, mixture)
    steps, number = FEW, how.regions
    if order == "regions":
        trained = [] if mixture is None else mixture.regions(grid)
        sizes = {n: -(-grid[0] // n) * -(-grid[1] // n) for n in trained or region_numbers(grid)}  # rounded up
        number = number or next((n for n, cells in sizes.items() if n > 1 and cells <= 2 * FEW), max(sizes))
        regions(grid, number)  # a mistake shows at once
        steps = -(-grid[0] // number) * -(-grid[1] // number)
    counts = "uniform" if order == "regions" else "arccos"
    usual = {"counts": counts, "noise": 5.0, "warmup": 1, "steps": min(steps, unknown)}
    given = {name: value for name, value in usual.items() if getattr(how, name) is None}
    return replace(how, order=order, regions=number, **given)  # type: ignore[arg-type]


def _exact(model: Model, how: How, unknown: int) -> How:
    """A token a step, of which several are drawn in a round."""
    if not chains(model.network):
        raise ValueError(
            "exact sampling checks tokens as a chain: expected a Partition Transformer with ordered context"
        )
    plain = _settled(model, replace(how, exact=False, draft=None), unknown)
    parts = (plain.strands or 1) if plain.order == "strands" else (plain.regions or 1) ** 2
    draft = how.draft or (parts if parts > 1 else DRAFT)
    return replace(plain, exact=True, draft=min(draft, unknown), steps=None, counts=None)


def _causal(how: How, unknown: int) -> How:
    if how.steps not in (None, unknown):
        raise ValueError(f"a causal model takes one step per token ({unknown} here) from left to right")
    if how.order not in (None, "left", "random") or how.strands not in (None, 1):
        raise ValueError(f"a causal model writes from left to right, not by {how.order or 'strands'}")
    if how.revise:
        raise ValueError(f"revise {how.revise} with a causal model, which cannot go back: expected 0")
    return replace(how, order="left", strands=None)


def _warn(order: str, mixture: Mixture) -> None:
    warnings.warn(f"this model was trained on {mixture}: the order {order} is new to it", stacklevel=3)


def plan_of(model: Model, known: Tensor, wanted: Tensor, keys: Tensor, how: How) -> Plan:
    """What is decided when, as settled.  (B, L), (B, L), (B,) -> Plan"""
    if isinstance(model.network, CausalTransformer):
        return plan_causal(known, wanted)
    if how.order == "strands":
        if how.steps is not None:
            check_steps(how.steps, int(wanted.sum(1).max()))
        made = plan_strands(known, wanted, keys, longest=_longest(wanted, how), shape=partial(shaped, model))
        return made.one_by_one() if how.exact else made
    order, counts = order_of(model, how.order, how.regions), COUNTS[how.counts or "uniform"]
    steps = int(wanted.sum(1).max()) if how.steps is None else how.steps
    return make_plan(known, wanted, keys, steps=steps, order=order, counts=counts)


def _longest(wanted: Tensor, how: How) -> Tensor:
    """How long a strand of each row may be.  (B, L) -> (B, 1)"""
    m = wanted.sum(1, keepdim=True)
    longest = -(-m // (how.strands or 1)) if how.steps is None else torch.full_like(m, how.steps)  # rounded up
    return longest.clamp_min(1)


def order_of(model: Model, name: str | None, parts: int | None = None) -> Order:
    """An order by its name, confidence being random among equals; parts: of regions, along a side."""
    grid = model.frame.grid
    if grid is None:
        return shaped(model, ORDERS["left" if name == "left" else "random"])
    inner = ORDERS["left" if name == "raster" else "random"]
    if name == "halton":
        inner = halton(grid)
    elif name == "regions":
        inner = regions(grid, parts or 1)
    return after_lead(shaped(model, inner), len(model.frame.lead))


def shaped(model: Model, order: Order) -> Order:
    """The order with the known tokens as the model's training showed them: as they stand, or shuffled."""
    mixture = model.mixture
    placed = mixture is not None and (model.frame.grid is not None or mixture.has("left", "strands", "gaps"))
    return in_place(order) if placed else order
