"""Counted work: the floating-point operations, and the bytes, that sampling and training cannot do without.

A multiply-add counts 2. Counted are matrix products and attention; softmax, norms and the like are left out, and so is
what can be computed once for all steps: modulations folded into weights, and GroupSwap's queries, which are a table.
A step of sampling and a batch of training are both problems (problems.py), so one count serves them.

Counted too is traffic: the bytes that sampling must move to and from memory, whatever the kernels. Each matrix is read
once in each step that uses it, and with a cache each key and value is written once and read in every later step.
Activations are left out: a better kernel could keep them on the chip. Small batches and caches are bound by traffic.

Shapes: B rows, K steps, S problems, D width, V vocabulary, L length. Counts are Python integers: they do not overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskless.nn.causal import CausalConfig
from maskless.nn.masked import MaskedConfig
from maskless.nn.maskgit import MaskGITConfig
from maskless.nn.partition import PartitionConfig
from maskless.plans import Plan
from maskless.problems import Problems

Config = PartitionConfig | MaskedConfig | CausalConfig | MaskGITConfig
BACKWARD = 2  # times the forward pass: the gradient of the inputs and that of the weights


@dataclass(frozen=True)
class Load:
    """Of each problem: known tokens, targets, tokens to encode, and pairs of tokens in an encoder's self-attention.

    seen: pairs of a target and a token that it sees, where those are not all.
    """

    known: Tensor  # (B, K) or (S,)
    targets: Tensor
    fresh: Tensor
    pairs: Tensor
    seen: Tensor | None = None


def every_token(plan: Plan) -> Load:
    """Each step encodes all known tokens (full context)."""
    n, k = _busy(plan)
    return Load(n, k, n, n * n)


def new_tokens(plan: Plan) -> Load:
    """Each step encodes what the last one decided, each token after those before it (ordered context, cached).

    What the last step of a row decides is never encoded.
    """
    fresh = _fresh(plan)
    before = plan.ends[:, :-1] - fresh
    return Load(*_busy(plan), fresh, fresh * before + causal_pairs(fresh))


def refreshed(plan: Plan, every: int) -> Load:
    """All known tokens every so many steps; between, the new ones, which attend to all (full context, approximate)."""
    n, k = _busy(plan)
    whole = torch.arange(plan.steps) % every == 0
    fresh = torch.where(whole, n, _fresh(plan))
    return Load(n, k, fresh, fresh * plan.ends[:, :-1])


def batch(problems: Problems, *, ordered: bool) -> Load:
    """The problems of a training batch."""
    n, u = problems.offsets.lengths, problems.target_offsets.lengths
    return Load(n, u, n, causal_pairs(n) if ordered else n * n, None if problems.seen is None else problems.seen.counts)


def sampled(config: PartitionConfig, plan: Plan, refresh: int = 1, weights: Tensor | None = None) -> list[Load]:
    """Of a whole run of sampling, a register with each row if it has one; weights (B, K) of the guidance.

    With guidance also of the rows without their labels, which need no targets where these have no weight. Their tokens
    are encoded all the same if they are cached, for the steps that follow, and not at all if no step has a weight.
    """
    plan = Plan(plan.order, plan.ends + int(config.registers))
    ordered = config.context == "ordered"
    load = new_tokens(plan) if ordered else every_token(plan) if refresh == 1 else refreshed(plan, refresh)
    if weights is None:
        return [load]
    here, ever = (weights > 0).long(), (weights > 0).any(1, keepdim=True).long()
    encoded = ever if ordered else here
    return [load, Load(load.known * here, load.targets * here, load.fresh * encoded, load.pairs * encoded)]


def sampling(config: Config, plan: Plan, refresh: int = 1, weights: Tensor | None = None) -> int:
    """Of a whole run of sampling, of pictures without the codec; weights (B, K) of the guidance."""
    if isinstance(config, PartitionConfig):
        return sum(partition(config, load) for load in sampled(config, plan, refresh, weights))
    if isinstance(config, CausalConfig):
        return causal(config, len(plan.order))
    targets = _busy(plan)[1]
    return masked(config, targets) + (0 if weights is None else masked(config, targets * (weights > 0)))


def sampling_everywhere(config: MaskedConfig, plan: Plan) -> int:
    """Of a whole run of MDLM with the head at every position, as the released code does it."""
    targets = _busy(plan)[1]
    return masked(config, targets) + linear((targets > 0) * config.length - targets, config.width * config.vocab)


def traffic(config: Config, plan: Plan, refresh: int = 1, weights: Tensor | None = None, *, size: int) -> int:
    """Of a whole run of sampling, in bytes; size: bytes of a number.

    With guidance the rows with and without their labels share each reading of the weights.
    """
    steps = int((plan.ends.diff(dim=1).sum(0) > 0).sum())  # that decide something
    if isinstance(config, PartitionConfig):
        return size * _partition_traffic(config, sampled(config, plan, refresh, weights), refresh, steps)
    matrices, cache = config.layers * layer_weights(config) + config.width * config.vocab, 0
    if isinstance(config, CausalConfig):
        cache = int(causal_pairs(torch.tensor(config.length))) * len(plan.order) * config.layers * 2 * config.width
    return size * (steps * matrices + cache)


def _partition_traffic(config: PartitionConfig, loads: list[Load], refresh: int, steps: int) -> int:
    """Of a Partition Transformer, in numbers."""
    encode, decide = partition_weights(config)
    encoding = int((torch.stack([load.fresh.sum(0) for load in loads]).sum(0) > 0).sum())  # steps that encode something
    has_cache = config.context == "ordered" or refresh > 1
    layers = config.encoder + 1 + config.decoder  # that have keys and values
    known = sum(int(load.known.sum()) for load in loads)
    return (
        encoding * encode + steps * decide + known * layers * 2 * config.width * has_cache
    )  # written if fresh, or read


def training(config: Config, problems: Problems) -> int:
    """Of a forward pass in training; the backward pass is `BACKWARD` times as much."""
    targets = problems.target_offsets.lengths
    if isinstance(config, PartitionConfig):
        queries = linear(targets, config.width**2)  # GroupSwap's, which change with each step
        return partition(config, batch(problems, ordered=config.context == "ordered")) + queries
    return causal(config, len(problems)) if isinstance(config, CausalConfig) else masked(config, targets)


def training_attention(config: Config, problems: Problems) -> int:
    """The share of attention in `training`."""
    if isinstance(config, PartitionConfig):
        return partition_attention(config, batch(problems, ordered=config.context == "ordered"))
    if isinstance(config, CausalConfig):
        return causal_attention(config, len(problems))
    return masked_attention(config, problems.target_offsets.lengths)


def padded_attention(config: Config, problems: Problems) -> int:
    """The same where ragged problems are padded to the longest one, as torch does it without kernels of ours."""
    n, u = problems.offsets, problems.target_offsets
    if not isinstance(config, PartitionConfig) or problems.seen is not None or (n.equal and u.equal):
        return training_attention(config, problems)
    known, targets = (torch.full((len(problems),), ends.longest) for ends in (n, u))
    return partition_attention(config, Load(known, targets, known, known * known))


def training_vectors(config: Config, problems: Problems) -> int:
    """How many vectors the layers read in a forward pass of training, all layers together."""
    targets = problems.target_offsets.lengths
    if isinstance(config, PartitionConfig):
        return config.encoder * problems.offsets.total + (1 + config.decoder) * int(targets.sum())
    return config.layers * config.length * int((targets > 0).sum())


def partition(config: PartitionConfig, work: Load) -> int:
    """Of a Partition Transformer without GroupSwap's queries."""
    encode, decide = partition_weights(config)
    return linear(work.fresh, encode) + partition_attention(config, work) + linear(work.targets, decide)


def partition_attention(config: PartitionConfig, work: Load) -> int:
    seen = work.known * work.targets if work.seen is None else work.seen.long()
    return config.encoder * attend(work.pairs, config.width) + (1 + config.decoder) * attend(seen, config.width)


def partition_weights(config: PartitionConfig) -> tuple[int, int]:
    """In the matrices that encode a token, and in those that decide a target."""
    square = config.width**2
    encode = config.encoder * 12 * square + (1 + config.decoder) * 2 * square  # layers; keys and values of what follows
    decide = square + config.decoder * 10 * square + config.width * config.vocab  # GroupSwap's output, layers, head
    return encode, decide


def masked(config: MaskedConfig | MaskGITConfig, targets: Tensor) -> int:
    """Of MDLM's network or MaskGIT's: every position of every problem that has a target, the head at the targets."""
    full = (targets > 0) * config.length
    layers = config.layers * linear(full, layer_weights(config)) + masked_attention(config, targets)
    return layers + linear(targets, config.width * config.vocab)


def masked_attention(config: MaskedConfig | MaskGITConfig, targets: Tensor) -> int:
    return config.layers * attend((targets > 0) * config.length**2, config.width)


def layer_weights(config: MaskedConfig | MaskGITConfig | CausalConfig) -> int:
    """In the matrices of a layer; an MLP of MaskGIT has three."""
    mlp = 3 * config.inner if isinstance(config, MaskGITConfig) else 8 * config.width
    return config.width * (4 * config.width + mlp)


def causal(config: CausalConfig, rows: int) -> int:
    """Of a causal network over full rows: with its cache, sampling and training compute each position once."""
    D, L = config.width, torch.full((rows,), config.length)
    layers = config.layers * linear(L, layer_weights(config)) + causal_attention(config, rows)
    return layers + linear(L, D * config.vocab)


def causal_attention(config: CausalConfig, rows: int) -> int:
    return config.layers * attend(causal_pairs(torch.full((rows,), config.length)), config.width)


def linear(vectors: Tensor, weights: int) -> int:
    """Of so many vectors through matrices with so many weights in all."""
    return 2 * int(vectors.sum()) * weights


def attend(pairs: Tensor, width: int) -> int:
    """Of so many pairs of a query and a key: a score, and a share of the value."""
    return 4 * int(pairs.sum()) * width


def causal_pairs(n: Tensor) -> Tensor:
    """Pairs among n tokens of which each sees itself and those before it."""
    return n * (n + 1) // 2


def _busy(plan: Plan) -> tuple[Tensor, Tensor]:
    """Known tokens and targets of each row and step; a row that decides nothing in a step costs nothing.  (B, K) x 2"""
    targets = plan.ends.diff(dim=1)
    return plan.ends[:, :-1] * (targets > 0), targets


def _fresh(plan: Plan) -> Tensor:
    """Tokens that became known since the step before, as long as there is something left to decide.  (B, K)"""
    known = plan.ends[:, :-1]
    return known.diff(dim=1, prepend=torch.zeros_like(known[:, :1])) * (known < plan.ends[:, -1:])
