"""Does a prediction see what it must not see? A probe for any network that answers problems.

Each sequence is split in two groups that predict each other. If the tokens of one group change, its own predictions
must not move at all: they are made from the other group. And no gradient may lead from them to its own tokens. A causal
network must not see what comes after. That the other group does move them shows that the probe would notice.

Shapes: B sequences, L length, S problems, U targets, V vocabulary.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maskless.nn import Network, device_of
from maskless.nn.calls import evaluating
from maskless.nn.causal import CausalTransformer
from maskless.objective import Objective, causal, pgm
from maskless.problems import Problems


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
            return _probe_causal(network, tokens, vocab, generator)
        return _probe_groups(network, tokens, vocab, objective, labels, generator)


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
    second = (owner % 2 == 0).nonzero()[:, 0]
    first = (owner % 2 == 1).nonzero()[:, 0]
    row, place = owner // 2, plain.targets
    before = _logits(network, plain)
    moved, furthest, seen = 0, 0.0, 0
    for own, others in ((second, first), (first, second)):
        changed = tokens.clone()
        changed[row[own], place[own]] = other[row[own], place[own]]
        apart = (_logits(network, problems(changed)) - before).nan_to_num(0.0).abs().amax(-1)  # inf - inf: never drawn
        moved += int((apart[own] > 0).sum())
        furthest = max(furthest, float(apart[own].max()) if len(own) else 0.0)
        seen += int((apart[others] > 0).sum())
    gradient = _gradient(network, plain, second)
    return Leak(moved, furthest, gradient, len(owner), seen / len(owner))


def _probe_causal(network: Network, tokens: Tensor, vocab: int, generator: torch.Generator) -> Leak:
    """Tokens change from a place on; what is predicted up to and at that place must not move."""
    B, L = tokens.shape
    ones, other = torch.ones_like(tokens, dtype=torch.bool), _other(tokens, vocab, generator)
    before = _logits(network, causal(tokens, tokens, tokens, ones).problems).view(B, L, -1)
    moved, furthest, looked, seen, later = 0, 0.0, 0, 0, 0
    for place in sorted({0, L // 4, L // 2, 3 * L // 4, L - 2}):
        changed = torch.where(torch.arange(L) >= place, other, tokens)
        after = _logits(network, causal(changed, changed, changed, ones).problems).view(B, L, -1)
        apart = (after - before).nan_to_num(0.0).abs().amax(-1)  # (B, L)
        moved += int((apart[:, : place + 1] > 0).sum())
        furthest = max(furthest, float(apart[:, : place + 1].max()))
        looked += apart[:, : place + 1].numel()
        seen, later = seen + int((apart[:, place + 1 :] > 0).sum()), later + apart[:, place + 1 :].numel()
    return Leak(moved, furthest, None, looked, seen / later)


def _gradient(network: Network, problems: Problems, chosen: Tensor) -> float | None:
    """The largest gradient of the chosen targets' logits with respect to embedded tokens of other problems."""
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
    return max((_foreign(each, problems) for each in found if each is not None), default=0.0)


def _foreign(gradient: Tensor, problems: Problems) -> float:
    """The largest entry in the rows of the odd problems, whose contexts are what the even ones predict."""
    rows, offsets = gradient.flatten(0, -2).cpu(), problems.offsets
    owner = offsets.owner
    if len(rows) != offsets.total:  # each problem laid out at full length
        owner = torch.arange(len(rows)) // max(1, len(rows) // len(offsets))
    foreign = rows[owner % 2 == 1]
    return float(foreign.abs().max()) if foreign.numel() else 0.0


def _other(tokens: Tensor, vocab: int, generator: torch.Generator) -> Tensor:
    """Another id everywhere.  (B, L) -> (B, L)"""
    return (tokens + torch.randint(1, vocab, tokens.shape, generator=generator)) % vocab


@torch.no_grad()
def _logits(network: Network, problems: Problems) -> Tensor:
    return network(problems.to(device_of(network))).float().cpu()
