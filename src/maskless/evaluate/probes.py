"""Probes of a network: whether a prediction sees what it must not see, and how noisy the gradient of an objective is.

Leaks: each sequence is split in two groups that predict each other. If the tokens of one group change, its own
predictions must not move at all: they are made from the other group. And no gradient may lead from them to its own
tokens. A causal network, and a chain in a random order, must not see what comes after. That the other group, and what
comes before, do move them shows that the probe would notice.

Gradients: their variance over random splits of one and the same batch. For independent draws a and b of the splits,
|g_a - g_b|^2 / 2 has the variance as its mean and g_a . g_b the square of the mean gradient: pairs give both without
bias, and their spread the standard errors.  PGM, Sec. 3.1

Shapes: B sequences, L length, S problems, U targets, V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn

from maskless.how import check_positive
from maskless.nn import Network, autocast, device_of
from maskless.nn.calls import evaluating
from maskless.nn.causal import CausalTransformer
from maskless.nn.loss import total_cost
from maskless.nn.masked import MaskedTransformer
from maskless.nn.partition import chains
from maskless.objective import OBJECTIVES, Objective, Task, causal, chain, mixed_seed, noise, pgm, pgm_arccos
from maskless.problems import Problems
from maskless.problems import chain as in_order


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
    generator = torch.Generator().manual_seed(seed)
    with evaluating(network):
        return _found(network, tokens, vocab, _probes(network, tokens, objective, labels, generator), generator)


@dataclass(frozen=True)
class _Probe:
    """Problems of tokens (B, L), and what must not be seen in them."""

    problems: Callable[[Tensor], Problems]
    changes: list[tuple[Tensor, Tensor]]  # (B, L) tokens that change, and (U,) predictions that must not move
    chosen: Tensor | None = None  # (U,) predictions that are derived
    unseen: Tensor | None = None  # (T,) the tokens that those must not see; None: those of the odd problems


def _probes(
    network: Network, tokens: Tensor, objective: Objective, labels: Tensor | None, generator: torch.Generator
) -> Iterator[_Probe]:
    every = torch.ones_like(tokens, dtype=torch.bool)
    if isinstance(network, CausalTransformer):
        order = torch.arange(tokens.shape[1]).expand_as(tokens)
        yield replace(_along(order, lambda given: causal(given, given, given, every).problems, tokens), chosen=None)
        return
    t = torch.rand(len(tokens), generator=generator, dtype=torch.float64) * 0.5 + 0.25  # an empty group sees nothing
    u = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)

    def in_groups(given: Tensor) -> Problems:
        return objective(given, t, u, every).labelled(labels).problems

    plain = in_groups(tokens)
    owner = plain.target_offsets.owner  # problem 2b predicts the second group of row b, problem 2b + 1 the first
    groups = [owner % 2 == number for number in (0, 1)]
    places = [(owner[own] // 2, plain.targets[own]) for own in groups]
    changed = [torch.zeros_like(every).index_put(where, torch.tensor(True)) for where in places]
    yield _Probe(in_groups, list(zip(changed, groups, strict=True)), groups[0])
    if chains(network):
        lead = int(objective is pgm_arccos)  # the BOS of pictures, which comes first
        order = torch.rand(tokens.shape, generator=generator)
        order = torch.cat([torch.full_like(order[:, :lead], -1), order[:, lead:]], 1).argsort(1)
        starts = torch.full((len(tokens),), lead)
        ends = torch.full_like(starts, tokens.shape[1])
        yield _along(order, lambda given: in_order(given, order, starts, ends)[0].labelled(labels), tokens)


def _along(order: Tensor, problems: Callable[[Tensor], Problems], tokens: Tensor) -> _Probe:
    """Tokens change from a place of an order on: what is predicted up to and at that place must not move."""
    plain, rank, L = problems(tokens), order.argsort(1), tokens.shape[1]
    within, skipped = plain.target_offsets.within, L - len(plain.targets) // len(tokens)  # never predicted
    places = sorted({skipped, L // 4, L // 2, 3 * L // 4, L - 2} - set(range(skipped)))
    half = (L - skipped) // 2  # the first half of the predictions see less than half of the context
    changes = [(rank >= place, within <= place - skipped) for place in places]
    return _Probe(problems, changes, within < half, plain.offsets.within >= skipped + half)


def _found(network: Network, tokens: Tensor, vocab: int, probes: Iterable[_Probe], generator: torch.Generator) -> Leak:
    """What moves when tokens change, of the predictions that must not see it, and of the others."""
    moved, furthest, looked, seen, others, gradients = 0, 0.0, 0, 0, 0, list[float | None]()
    for probe in probes:
        plain = probe.problems(tokens)
        before = _logits(network, plain)
        other = (tokens + torch.randint(1, vocab, tokens.shape, generator=generator)) % vocab  # another id everywhere
        for changed, own in probe.changes:
            after = _logits(network, probe.problems(torch.where(changed, other, tokens)))
            apart = (after - before).nan_to_num(0.0).abs().amax(-1)  # inf - inf: never drawn
            moved, looked = moved + int((apart[own] > 0).sum()), looked + int(own.sum())
            seen, others = seen + int((apart[~own] > 0).sum()), others + int((~own).sum())
            furthest = max(furthest, float(apart[own].max()) if own.any() else 0.0)
        gradients.append(_unseen_gradient(network, plain, probe.chosen, probe.unseen))
    gradient = max((one for one in gradients if one is not None), default=None)
    return Leak(moved, furthest, gradient, looked, seen / others)


def _unseen_gradient(
    network: Network, problems: Problems, chosen: Tensor | None, unseen: Tensor | None
) -> float | None:
    """The largest gradient of the chosen targets' logits with respect to embedded tokens that they must not see."""
    embedding = getattr(network, "embedding", None)
    if chosen is None or not isinstance(embedding, nn.Module):
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
    largest = 0.0
    for gradient in (each.flatten(0, -2).cpu() for each in found if each is not None):
        owner = problems.offsets.owner
        if len(gradient) != problems.offsets.total:  # each problem laid out at full length
            owner = torch.arange(len(gradient)) // max(1, len(gradient) // len(problems.offsets))
        foreign = gradient[owner % 2 == 1 if unseen is None else unseen]  # what even problems predict odd ones know
        largest = max(largest, float(foreign.abs().max()) if foreign.numel() else 0.0)
    return largest


@torch.no_grad()
def _logits(network: Network, problems: Problems) -> Tensor:
    return network(problems.to(device_of(network))).float().cpu()


# Gradients

# By the network: what its objectives are called, and which they are. All of them estimate the same bound.
TWO_GROUPS = {"pgm": "pgm", "pgm-exact": "pgm-exact", "pgm-released": "pgm-released", "mdlm": "mdlm"}
MASKED = {"mdlm-complementary": "pgm", "mdlm": "mdlm"}


@dataclass(frozen=True)
class Variance:
    """Of the gradient per token; the square of its mean is the signal. Errors are standard errors over pairs."""

    objective: str
    variance: float
    error: float
    signal: float  # |mean gradient|^2
    signal_error: float
    cost: float  # tokens that a draw has the network process, per token of the batch
    pairs: int

    @property
    def noise(self) -> float:
        """Variance over signal: how many batches one would have to average for as much signal as noise."""
        return self.variance / self.signal if self.signal > 0 else math.nan

    @property
    def at_equal_cost(self) -> float:
        """The variance if as many draws were averaged as one pass over every token pays for."""
        return self.variance * self.cost

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"noise": self.noise, "at_equal_cost": self.at_equal_cost}


def objectives_of(network: nn.Module) -> dict[str, Objective]:
    """The objectives that a network can be trained with, by the names of `--model`."""
    if isinstance(network, CausalTransformer):
        raise ValueError("a causal model's gradient has no split to vary: expected pgm, mdlm or mdlm-complementary")
    names = MASKED if isinstance(network, MaskedTransformer) else TWO_GROUPS
    found = {name: OBJECTIVES[task] for name, task in names.items()}
    return found | ({"chain": chain(lambda t, u: u.argsort(1))} if chains(network) else {})


def gradient_variance(
    network: nn.Module,
    tokens: Tensor,
    objective: Objective,
    name: str,
    *,
    pairs: int = 16,
    seed: int = 0,
    valid: Tensor | None = None,
    on_pair: Callable[[int], None] | None = None,
) -> Variance:
    """The variance of the gradient of one objective on one batch, over times and splits.  (B, L) -> Variance

    Without dropout; times are stratified over the batch, as in training. Each process draws its share of the pairs.
    """
    check_positive(pairs=pairs)
    valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    state = PartialState()
    parameters = [p for p in network.parameters() if p.requires_grad]
    first, end = (pairs * rank // state.num_processes for rank in (state.process_index, state.process_index + 1))
    found: list[tuple[float, float, float]] = []
    with evaluating(network):
        for pair in range(first, end):
            own = mixed_seed(seed, pair)
            tasks = [objective(tokens, *noise(*tokens.shape, seed=own, step=i), valid) for i in (0, 1)]
            a, b = (_gradient(network, task, parameters, int(valid.sum())) for task in tasks)
            apart = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True)) / 2
            shared = sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
            found.append((apart, shared, sum(_processed(network, task) for task in tasks) / 2 / tokens.numel()))
            if on_pair is not None:
                on_pair(1)
    everyones = torch.tensor(gather_object(found), dtype=torch.float64)  # (pairs, 3)
    means, errors = everyones.mean(0), everyones.std(0) / math.sqrt(pairs) if pairs > 1 else torch.full((3,), math.nan)
    return Variance(name, float(means[0]), float(errors[0]), float(means[1]), float(errors[1]), float(means[2]), pairs)


def _gradient(network: nn.Module, task: Task, parameters: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Of the loss per token."""
    device = device_of(network)
    task = task.map(lambda x: x.to(device))
    with autocast(device), torch.enable_grad():
        total = total_cost(network, task.problems, task.answers, task.weights)
        found = torch.autograd.grad(total / tokens, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _processed(network: nn.Module, task: Task) -> float:
    """Tokens that pass through all layers: of a Partition Transformer a context one passes half of them, a target half;
    a masked one lays every problem out at full length."""
    if isinstance(network, MaskedTransformer):
        return len(task.problems) * network.config.length
    return (task.problems.offsets.total + task.problems.target_offsets.total) / 2
