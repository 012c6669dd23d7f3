"""Does a prediction see what it must not see? A probe for any network that answers problems.

Each sequence is split in two groups that predict each other. If the tokens of one group change, its own predictions
must not move at all: they are made from the other group. And no gradient may lead from them to its own tokens. A causal
network, and a chain in a random order, must not see what comes after. That the other group, and what comes before, do
move them shows that the probe would notice.

Shapes: B sequences, L length, S problems, U targets, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskless.nn import Network, device_of
from maskless.nn.calls import evaluating
from maskless.nn.causal import CausalTransformer
from maskless.nn.partition import chains
from maskless.objective import Objective, causal, pgm, pgm_arccos
from maskless.problems import Problems, chain


@dataclass(frozen=True)
class Leak:
    """What changed where nothing may change. Exact: a tight network has 0 in all of the first three."""

    moved: int  # predictions that moved when tokens changed that they must not see
    furthest: float  # the largest change of a logit among them
    gradient: float | None  # the largest gradient with respect to such a token, None where there is nothing to derive
    predictions: int  # that were looked at
    seen: float  # the share of predictions that move when tokens change that they do see

    @property
    def tight(self) -> bool:
        return self.moved == 0 and not self.gradient

    @property
    def error(self) -> float:
        """The standard error of the share that moved; with none, the 95 % bound of 3 in so many ("rule of three")."""
        share = self.moved / self.predictions
        return 3 / self.predictions if not self.moved else (share * (1 - share) / self.predictions) ** 0.5

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tight": self.tight, "error": self.error}


def leak(
    network: Network,
    tokens: Tensor,
    *,
    vocab: int,
    objective: Objective = pgm,
    labels: Tensor | None = None,
    seed: int = 0,
) -> Leak:
    """What a network lets through, on sequences of tokens.  (B, L) -> Leak

    vocab: tokens are changed to any other id below it. objective: one of two groups; `pgm_arccos` for pictures, whose
    first token is a BOS. labels (B,): of a network with classes.
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not len(tokens):
        raise ValueError(f"tokens {tuple(tokens.shape)}: expected (B, L) with 1 sequence or more of 2 tokens or more")
    if vocab < 2:
        raise ValueError(f"vocab {vocab} is out of range: expected 2 or more, so that a token can change")
    with evaluating(network):
        generator = torch.Generator().manual_seed(seed)
        if isinstance(network, CausalTransformer):
            return _probe_order(network, tokens, vocab, generator, _causal)
        found = _probe_groups(network, tokens, vocab, objective, labels, generator)
        if not chains(network):
            return found
        lead = int(objective is pgm_arccos)  # the BOS of pictures, which comes first
        order = torch.rand(tokens.shape, generator=generator)
        order = torch.cat([torch.full_like(order[:, :lead], -1), order[:, lead:]], 1).argsort(1)
        build = partial(_chain, order=order, lead=lead, labels=labels)
        return _both(found, _probe_order(network, tokens, vocab, generator, build, order))


def _probe_groups(
    network: Network,
    tokens: Tensor,
    vocab: int,
    objective: Objective,
    labels: Tensor | None,
    generator: torch.Generator,
) -> Leak:
    B, L = tokens.shape
    t = torch.rand(B, generator=generator, dtype=torch.float64) * 0.5 + 0.25  # an empty group would see nothing
    u, other = torch.rand(B, L, generator=generator, dtype=torch.float64), _other(tokens, vocab, generator)

    def problems(given: Tensor) -> Problems:
        return objective(given, t, u, torch.ones_like(given, dtype=torch.bool)).labelled(labels).problems

    plain = problems(tokens)
    owner = plain.target_offsets.owner  # problem 2b predicts the second group of row b, problem 2b + 1 the first

    def changed(own: Tensor) -> Tensor:
        return tokens.index_put((owner[own] // 2, plain.targets[own]), other[owner[own] // 2, plain.targets[own]])

    groups = [owner % 2 == number for number in (0, 1)]
    found = _probe(network, plain, [(problems(changed(own)), own) for own in groups])
    return replace(found, gradient=_gradient(network, plain, groups[0].nonzero()[:, 0]))


def _probe(network: Network, plain: Problems, changes: Iterable[tuple[Problems, Tensor]]) -> Leak:
    """What moves from plain problems to changed ones: of those (U,) that must not see the change, and of the others."""
    before = _logits(network, plain)
    moved, furthest, looked, seen, others = 0, 0.0, 0, 0, 0
    for changed, own in changes:
        apart = (_logits(network, changed) - before).nan_to_num(0.0).abs().amax(-1)  # inf - inf: never drawn
        moved, looked = moved + int((apart[own] > 0).sum()), looked + int(own.sum())
        seen, others = seen + int((apart[~own] > 0).sum()), others + int((~own).sum())
        furthest = max(furthest, float(apart[own].max()) if own.any() else 0.0)
    return Leak(moved, furthest, None, looked, seen / others)


def _causal(tokens: Tensor) -> Problems:
    return causal(tokens, tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)).problems


def _chain(tokens: Tensor, order: Tensor, lead: int, labels: Tensor | None) -> Problems:
    starts = torch.full((len(tokens),), lead)
    return chain(tokens, order, starts, torch.full_like(starts, tokens.shape[1]))[0].labelled(labels)


def _probe_order(
    network: Network,
    tokens: Tensor,
    vocab: int,
    generator: torch.Generator,
    build: Callable[[Tensor], Problems],
    order: Tensor | None = None,
) -> Leak:
    """Tokens change from a place of an order on; what is predicted up to and at that place must not move.

    build: makes of tokens (B, L) the problems of every row, whose targets follow the order (left to right by default).
    """
    B, L = tokens.shape
    rank, other = torch.arange(L) if order is None else order.argsort(1), _other(tokens, vocab, generator)
    plain = build(tokens)
    within, predicted = plain.target_offsets.within, len(plain.targets) // B
    lead = L - predicted  # places that are never predicted
    places = sorted({lead, L // 4, L // 2, 3 * L // 4, L - 2} - set(range(lead)))
    changes = ((build(torch.where(rank >= place, other, tokens)), within <= place - lead) for place in places)
    found = _probe(network, plain, changes)
    if order is None:
        return found
    half = (within < predicted // 2).nonzero()[:, 0]  # they see less than half of the context
    unseen = plain.offsets.within >= lead + predicted // 2
    return replace(found, gradient=_gradient(network, plain, half, unseen))


def _both(one: Leak, other: Leak) -> Leak:
    """What two probes found together."""
    looked = one.predictions + other.predictions
    gradients = [found.gradient for found in (one, other) if found.gradient is not None]
    return Leak(
        moved=one.moved + other.moved,
        furthest=max(one.furthest, other.furthest),
        gradient=max(gradients) if gradients else None,
        predictions=looked,
        seen=(one.seen * one.predictions + other.seen * other.predictions) / looked,
    )


def _gradient(network: Network, problems: Problems, chosen: Tensor, unseen: Tensor | None = None) -> float | None:
    """The largest gradient of the chosen targets' logits with respect to embedded tokens that they must not see.

    unseen (T,): which tokens of the contexts those are; by default those of the odd problems.
    """
    embedding = getattr(network, "embedding", None)
    if not isinstance(embedding, nn.Module):
        return None
    kept: list[Tensor] = []
    own = threading.get_ident()

    def keep(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        if threading.get_ident() != own:  # another call of the same network
            return out
        kept.append(out.detach().requires_grad_())
        return kept[-1]

    handle = embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logits = network(problems.to(device_of(network)))
            asked = logits[chosen.to(logits.device)].float()
            found = torch.autograd.grad(asked[asked.isfinite()].square().sum(), kept, allow_unused=True)
    finally:
        handle.remove()
    return max((_foreign(each, problems, unseen) for each in found if each is not None), default=0.0)


def _foreign(gradient: Tensor, problems: Problems, unseen: Tensor | None) -> float:
    """The largest entry of the rows that must not be seen; what even problems predict is the context of odd ones."""
    rows, offsets = gradient.flatten(0, -2).cpu(), problems.offsets
    owner = offsets.owner
    if len(rows) != offsets.total:  # each problem laid out at full length
        owner = torch.arange(len(rows)) // max(1, len(rows) // len(offsets))
    foreign = rows[owner % 2 == 1 if unseen is None else unseen]
    return float(foreign.abs().max()) if foreign.numel() else 0.0


def _other(tokens: Tensor, vocab: int, generator: torch.Generator) -> Tensor:
    """Another id everywhere.  (B, L) -> (B, L)"""
    return (tokens + torch.randint(1, vocab, tokens.shape, generator=generator)) % vocab


@torch.no_grad()
def _logits(network: Network, problems: Problems) -> Tensor:
    return network(problems.to(device_of(network))).float().cpu()
