"""Does the order matter? The likelihood of text and images along an order, and texts that are drawn in it.

Along an order in K steps, each step predicts its tokens from those of the steps before, so the costs of all steps add
up to -log p(text) of exactly that sampler. A network that answers chains gives them all in one pass; for another a few
steps stand for all. The order of confidence is found on the way, from the tokens that are known, and so is a likelihood
too.

What parallel steps lose, and what exact ones gain, is measured on drafts of several tokens, checked as chains
(speculation.py): a plain step draws its tokens from the marginals, as if they did not depend on each other.

Shapes: B sequences, L length (of images 1 + cells), K steps, U targets, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskless.checkpoint import Model, digest
from maskless.codec.text import TextCodec
from maskless.data.image_tokens import ImageTokens
from maskless.decide import decide, plan_of, settled
from maskless.drafts import Tally
from maskless.evaluate.genppl import Draw, Sample, sample_of
from maskless.evaluate.likelihood import Likelihood, likelihood, over_rows
from maskless.how import KINDS, TEXT_ORDERS, How, check_name
from maskless.logits import row_keys, uniforms
from maskless.mixture import hidden_spans
from maskless.nn import Network, device_of
from maskless.nn.causal import CausalTransformer
from maskless.nn.loss import answer_costs
from maskless.nn.partition import chains
from maskless.objective import along as token_costs
from maskless.objective import bound
from maskless.order import COUNTS, ORDERS, in_place, strands
from maskless.plans import Plan, plan, plan_strands
from maskless.problems import split
from maskless.texts import generate_texts, new_drafts

CONFIDENCE = "confidence"
NAMES = TEXT_ORDERS
STRANDS = 8  # of the strands that are measured by default
ANY_ORDER = "any order (bound)"  # of images
IMAGE_ORDERS = ("random", "halton", "raster", "regions")  # all but confidence, which is found on the way
EXACT = ("left to right", f"{STRANDS} strands", f"{STRANDS} strands, in parallel")


@torch.no_grad()
def exactly(network: Network, tokens: Tensor, counted: Tensor, way: str, *, lead: int) -> Tensor:
    """-log p of each sequence, exactly, along an order.  (B, L) -> (B,) float64

    way: one of `EXACT`. In strands each token depends on all before it, or (in parallel, as they are sampled) only on
    those of the steps before. lead: so many tokens begin every row, and every order.
    """
    B, L = tokens.shape
    known = (torch.arange(L) < lead).expand(B, L)
    longest = torch.full((B, 1), L if way == EXACT[0] else max(1, -(-(L - lead) // STRANDS)))
    planned = plan_strands(known, ~known, torch.zeros(B, dtype=torch.long), longest=longest, shape=in_place)
    seen = planned.seen() if way == EXACT[2] else None
    costs = token_costs(network, tokens, planned.order, torch.zeros(B, dtype=torch.long), seen=seen)
    return (costs * counted).sum(1)


@torch.no_grad()
def in_gaps(network: Network, tokens: Tensor, counted: Tensor, *, lead: int, seed: int, samples: int) -> Tensor:
    """-log p of random spans given all the rest; the rest is cleared in counted.  (B, L) -> (B,) float64

    Exact along strands, one for each gap, of a network that answers chains; a bound from `samples` splits of another.
    """
    B, L = tokens.shape
    u = uniforms(row_keys(seed, torch.arange(B))[:, None], torch.arange(L), 0)
    hidden = torch.cat([torch.zeros(B, lead, dtype=torch.bool), hidden_spans(u[:, lead:])], 1)
    counted &= hidden
    if not chains(network):
        return bound(network, tokens, ~hidden, counted=counted, samples=samples, seed=seed)
    order = in_place(strands(L))(hidden.long(), u)
    return (token_costs(network, tokens, order, (~hidden).sum(1)) * counted).sum(1)


@torch.no_grad()
def along(
    network: Network,
    tokens: Tensor,
    order: str,
    *,
    steps: int | None = None,
    samples: int = 8,
    counted: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """-log p of each sequence, decided in K steps along an order, by default a token in each.  (B, L) -> (B,) float64

    An unbiased estimate from `samples` of the steps (stratified); exact with K or more, and always of a network that
    answers chains; a random order is itself left to chance. For confidence always exact: each step takes the positions
    whose most likely token has the largest probability.
    """
    B, L = tokens.shape
    check_name("order", order, NAMES)
    if isinstance(network, CausalTransformer):
        raise ValueError("a causal model knows one order only, left to right: its bound is its likelihood")
    counted = torch.ones_like(tokens, dtype=torch.bool) if counted is None else counted
    known = torch.zeros_like(tokens, dtype=torch.bool)
    keys, K = row_keys(seed, torch.arange(B)), L if steps is None else steps
    if order == "strands":
        planned = plan_strands(known, ~known, keys, longest=torch.full((B, 1), K), shape=in_place)
        K = planned.steps
    else:
        chosen = ORDERS["random" if order == "random" else "left"]
        planned = plan(known, ~known, keys, steps=K, order=chosen, counts=COUNTS["uniform"])
    if order == CONFIDENCE:
        return _along_confidence(network, tokens, planned, counted)
    if chains(network):
        return (token_costs(network, tokens, planned.order, planned.ends[:, 0], seen=planned.seen()) * counted).sum(1)
    total = torch.zeros(B, dtype=torch.float64)
    shift = torch.rand(B, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    n = min(samples, K)
    for sample in range(n):
        step = (K * (sample + shift) / n).long().clamp_max(K - 1)[:, None] if n < K else torch.full((B, 1), sample)
        starts, ends = (planned.ends.gather(1, step + more)[:, 0] for more in (0, 1))
        problems, index = split(tokens, planned.order, starts, ends)
        cost = answer_costs(network, problems, tokens.flatten()[index]) * counted.flatten()[index]
        total.index_add_(0, problems.target_offsets.owner, cost)
    return total * (K / n)


def _along_confidence(network: Network, tokens: Tensor, planned: Plan, counted: Tensor) -> Tensor:
    total, device = torch.zeros(len(tokens), dtype=torch.float64), device_of(network)
    for number in range(planned.steps):
        starts, ends = planned.ends[:, number], planned.ends[:, number + 1]
        problems, index = split(tokens, planned.order, starts, planned.ends[:, -1])
        owner, within = problems.target_offsets.owner, problems.target_offsets.within
        log_p = network(problems.to(device)).float().log_softmax(-1)
        sure, cost = log_p.amax(-1).cpu(), -log_p.gather(1, tokens.flatten()[index, None].to(device))[:, 0].cpu()
        surest = problems.target_offsets.ranked(sure)
        planned.order[owner, starts[owner] + within] = problems.targets[surest]
        decided = surest[within < (ends - starts)[owner]]
        total.index_add_(0, owner[decided], cost[decided].double() * counted.flatten()[index[decided]])
    return total


@torch.no_grad()
def of_images(model: Model, tokens: Tensor, labels: Tensor | None, how: How, *, seed: int) -> Tensor:
    """-log p of each image, decided as is said, all steps of it.  (B, L), (B,) -> (B,) float64"""
    B, L = tokens.shape
    known = (torch.arange(L) < len(model.lead)).expand(B, L)
    whole = settled(model, how, L - len(model.lead))
    planned = plan_of(model, known, ~known, row_keys(seed, torch.arange(B)), whole)
    given, seen = planned.ends[:, 0], planned.seen()
    return token_costs(model.network, tokens, planned.order, given, labels=labels, seen=seen).sum(1)


def image_ways(model: Model, rows: ImageTokens, *, samples: int, **how: object) -> dict[str, Callable[..., Likelihood]]:
    """What measures, by name: the bound over all orders, and of a chain each order that it was trained on.

    how: keywords of `How` for the steps in which an order is drawn. What measures takes the keywords of `over_rows`.
    """
    network, cells = model.network, rows.length - len(model.lead)
    found: dict[str, Callable[..., Likelihood]] = {ANY_ORDER: partial(likelihood, network, rows, samples=samples)}
    if not chains(network):
        return found

    def cost(how: How, tokens: Tensor, counted: Tensor, numbers: np.ndarray, own: int) -> Tensor:
        return of_images(model, tokens, rows.labels(numbers), how, seed=own)

    for order in IMAGE_ORDERS:
        if model.mixture is not None and not model.mixture.has(order, "random"):
            continue
        one_by_one = How(order=order, steps=cells, counts="uniform")
        in_steps = settled(model, How(order=order, **how), cells)  # type: ignore[arg-type]
        name = f"regions {in_steps.regions}" if order == "regions" else order
        for way, settings in ((name, one_by_one), (f"{name}, {in_steps.steps} steps", in_steps)):
            found[way] = partial(over_rows, network, rows, partial(cost, settings))
    return found


def drawing(model: Model, *, length: int | None = None, **how: Any) -> Draw:
    """What draws samples of a model; how: keywords of `How`, but for the steps."""
    causal = isinstance(model.network, CausalTransformer)
    settled(model, How(**how), unknown(model, length))  # a mistake shows at once

    def draw(first: int, n: int, steps: int) -> list[Sample]:
        given = how | ({"order": None} if causal else {} if how.get("exact") else {"steps": steps})
        drawn = generate_texts(model, n, first=first, batch=n, length=length, **given)
        return [sample_of(one.tokens, model.text_codec, model.layout) for one in drawn]

    return draw


def depending_on(model: Model, *, order: str | None, length: int | None, **how: Any) -> dict[str, Any]:
    """What samples that `drawing` draws depend on, but for the steps."""
    usual = settled(model, How(), unknown(model, length)).order if model.mixture is not None else "random"
    of_draw = {name: value for name, value in model.defaults.items() if name in KINDS[1]}  # the others are said
    found = asdict(How(**how).with_defaults(of_draw, unknown(model, length)))
    del found["steps"]
    codec = model.codec if isinstance(model.codec, TextCodec) else None
    tokenizer = codec and hashlib.sha256(codec.tokenizer.to_str().encode()).hexdigest()
    found |= {"model": digest(model.network), "tokenizer": tokenizer, "layout": model.layout}
    return found | {"order": order or usual, "length": length}


def usual_steps(model: Model, unknown: int) -> int:
    """As many as `generate` takes by itself."""
    how = settled(model, How(), unknown)
    return -(-unknown // how.strands) if how.strands else how.steps or unknown


def unknown(model: Model, length: int | None = None) -> int:
    """How many tokens of a sample are decided: the most steps there can be."""
    return (model.config.length if length is None else length) - len(model.lead)


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
