"""Counted arithmetic: how many floating-point operations sampling and training cannot do without.

A multiply-add counts 2. Counted are matrix products and attention; softmax, norms and the like are left out, and so is
what can be computed once for all steps: modulations folded into weights, and GroupSwap's queries, which are a table.
A step of sampling and a batch of training are both problems (problems.py), so one count serves them.

Shapes: B rows, K steps, S problems, D width, V vocabulary, L length. Counts are Python integers: they do not overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.bench.case import Config
from maskless.nn.causal import CausalConfig
from maskless.nn.masked import MaskedConfig
from maskless.nn.maskgit import MaskGITConfig
from maskless.nn.partition import PartitionConfig
from maskless.plans import Plan
from maskless.problems import Problems

BACKWARD = 2  # times the forward pass: the gradient of the inputs and that of the weights


@dataclass(frozen=True)
class Work:
    """Of each problem: known tokens, targets, tokens to encode, and pairs of tokens in an encoder's self-attention.

    seen: pairs of a target and a token that it sees, where those are not all.
    """

    known: Tensor  # (B, K) or (S,)
    targets: Tensor
    fresh: Tensor
    pairs: Tensor
    seen: Tensor | None = None


def every_token(plan: Plan) -> Work:
    """Each step encodes all known tokens (full context)."""
    n, k = _busy(plan)
    return Work(n, k, n, n * n)


def new_tokens(plan: Plan) -> Work:
    """Each step encodes what the last one decided, each token after those before it (ordered context, cached).

    What the last step of a row decides is never encoded.
    """
    fresh = _fresh(plan)
    before = plan.ends[:, :-1] - fresh
    return Work(*_busy(plan), fresh, fresh * before + causal_pairs(fresh))


def refreshed(plan: Plan, every: int) -> Work:
    """All known tokens every so many steps; between, the new ones, which attend to all (full context, approximate)."""
    n, k = _busy(plan)
    whole = torch.arange(plan.steps) % every == 0
    fresh = torch.where(whole, n, _fresh(plan))
    return Work(n, k, fresh, fresh * plan.ends[:, :-1])


def batch(problems: Problems, *, ordered: bool) -> Work:
    """The problems of a training batch."""
    n, u = problems.offsets.lengths, problems.target_offsets.lengths
    return Work(n, u, n, causal_pairs(n) if ordered else n * n, None if problems.seen is None else problems.seen.counts)


def sampling_work(config: PartitionConfig, plan: Plan, refresh: int) -> Work:
    if config.context == "ordered":
        return new_tokens(plan)
    return every_token(plan) if refresh == 1 else refreshed(plan, refresh)


def drawing_work(config: PartitionConfig, plan: Plan, weights: Tensor) -> list[Work]:
    """Of pictures, a register with each: the rows with their labels, and without; weights (B, K) of the guidance.

    Without its label a row needs no targets where they have no weight. Its tokens are encoded all the same if they are
    cached, for the steps that follow, and not at all if no step has a weight.
    """
    work = sampling_work(config, Plan(plan.order, plan.ends + int(config.registers)), 1)
    here, ever = (weights > 0).long(), (weights > 0).any(1, keepdim=True).long()
    encoded = ever if config.context == "ordered" else here
    without = Work(work.known * here, work.targets * here, work.fresh * encoded, work.pairs * encoded)
    return [work, without]


def sampling(config: Config, plan: Plan, refresh: int = 1) -> int:
    """Of a whole run of sampling text."""
    if isinstance(config, PartitionConfig):
        return partition(config, sampling_work(config, plan, refresh))
    if isinstance(config, MaskedConfig):
        return masked(config, _busy(plan)[1])
    assert isinstance(config, CausalConfig)
    return causal(config, len(plan.order))


def drawing(config: Config, plan: Plan, weights: Tensor) -> int:
    """Of a whole run of drawing pictures, without the codec; weights (B, K) of the guidance."""
    if isinstance(config, PartitionConfig):
        return sum(partition(config, work) for work in drawing_work(config, plan, weights))
    assert isinstance(config, MaskGITConfig)
    targets = _busy(plan)[1]
    return maskgit(config, targets) + maskgit(config, targets * (weights > 0))


def sampling_everywhere(config: MaskedConfig, plan: Plan) -> int:
    """Of a whole run of MDLM with the head at every position, as the released code does it."""
    full = (plan.ends.diff(dim=1) > 0) * config.length
    return _positions(config, full) + linear(full, config.width * config.vocab)


def training(config: Config, problems: Problems) -> int:
    """Of a forward pass in training; the backward pass is `BACKWARD` times as much."""
    targets = problems.target_offsets.lengths
    if isinstance(config, PartitionConfig):
        queries = linear(targets, config.width**2)  # GroupSwap's, which change with each step
        return partition(config, batch(problems, ordered=config.context == "ordered")) + queries
    if isinstance(config, MaskedConfig):
        return masked(config, targets)
    assert isinstance(config, CausalConfig)
    return causal(config, len(problems))


def partition(config: PartitionConfig, work: Work) -> int:
    """Of a Partition Transformer without GroupSwap's queries."""
    D, decoder = config.width, config.decoder
    encode = config.encoder * (linear(work.fresh, 12 * D * D) + attend(work.pairs, D))
    keys_and_values = linear(work.fresh, 2 * D * D * (1 + decoder))  # of GroupSwap and of each decoder layer
    look_up = (1 + decoder) * attend(work.known * work.targets if work.seen is None else work.seen.long(), D)
    decide = linear(work.targets, D * D + decoder * 10 * D * D + D * config.vocab)  # GroupSwap's output, layers, head
    return encode + keys_and_values + look_up + decide


def masked(config: MaskedConfig, targets: Tensor) -> int:
    """Of MDLM's network: every position of every problem that has a target, the head at the targets only."""
    return _positions(config, (targets > 0) * config.length) + linear(targets, config.width * config.vocab)


def maskgit(config: MaskGITConfig, targets: Tensor) -> int:
    """Of MaskGIT's network: as MDLM's, with three matrices in an MLP."""
    full = (targets > 0) * config.length
    layers = config.layers * (linear(full, layer_weights(config)) + attend(full * config.length, config.width))
    return layers + linear(targets, config.width * config.vocab)


def layer_weights(config: MaskGITConfig) -> int:
    """In the matrices of a layer of MaskGIT."""
    return 4 * config.width**2 + 3 * config.width * config.inner


def causal(config: CausalConfig, rows: int) -> int:
    """Of a causal network over full rows: with its cache, sampling and training compute each position once."""
    D, L = config.width, torch.full((rows,), config.length)
    layers = config.layers * (linear(L, 12 * D * D) + attend(causal_pairs(L), D))
    return layers + linear(L, D * config.vocab)


def linear(vectors: Tensor, weights: int) -> int:
    """Of so many vectors through matrices with so many weights in all."""
    return 2 * int(vectors.sum()) * weights


def attend(pairs: Tensor, width: int) -> int:
    """Of so many pairs of a query and a key: a score, and a share of the value."""
    return 4 * int(pairs.sum()) * width


def causal_pairs(n: Tensor) -> Tensor:
    """Pairs among n tokens of which each sees itself and those before it."""
    return n * (n + 1) // 2


def _positions(config: MaskedConfig, full: Tensor) -> int:
    """Of the layers; full: L for each problem that is computed, else 0."""
    D = config.width
    return config.layers * (linear(full, 12 * D * D) + attend(full * config.length, D))


def _busy(plan: Plan) -> tuple[Tensor, Tensor]:
    """Known tokens and targets of each row and step; a row that decides nothing in a step costs nothing.  (B, K) x 2"""
    targets = plan.ends.diff(dim=1)
    return plan.ends[:, :-1] * (targets > 0), targets


def _fresh(plan: Plan) -> Tensor:
    """Tokens that became known since the step before, as long as there is something left to decide.  (B, K)"""
    known = plan.ends[:, :-1]
    return known.diff(dim=1, prepend=torch.zeros_like(known[:, :1])) * (known < plan.ends[:, -1:])
