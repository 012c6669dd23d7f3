"""Counted traffic: how many bytes sampling must move to and from memory, whatever the kernels.

Each matrix is read once in each step that uses it, and with a cache each key and value is written once and read in
every later step. Activations are left out: a better kernel could keep them on the chip. Small batches and cached models
are bound by this, not by arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskless.flops import Config, causal_pairs, layer_weights, partition_weights, sampled
from maskless.nn.causal import CausalConfig
from maskless.nn.partition import PartitionConfig
from maskless.plans import Plan


def sampling(config: Config, plan: Plan, refresh: int = 1, weights: Tensor | None = None, *, size: int) -> int:
    """Of a whole run of sampling, in bytes; size: bytes of a number.

    With guidance the rows with and without their labels share each reading of the weights.
    """
    steps = int((plan.ends.diff(dim=1).sum(0) > 0).sum())  # that decide something
    if isinstance(config, PartitionConfig):
        return size * _partition(config, plan, refresh, weights, steps)
    matrices, cache = config.layers * layer_weights(config) + config.width * config.vocab, 0
    if isinstance(config, CausalConfig):
        cache = int(causal_pairs(torch.tensor(config.length))) * len(plan.order) * config.layers * 2 * config.width
    return size * (steps * matrices + cache)


def _partition(config: PartitionConfig, plan: Plan, refresh: int, weights: Tensor | None, steps: int) -> int:
    """Of a Partition Transformer, in numbers."""
    loads, (encode, decide) = sampled(config, plan, refresh, weights), partition_weights(config)
    encoding = int((torch.stack([load.fresh.sum(0) for load in loads]).sum(0) > 0).sum())  # steps that encode something
    layers = config.encoder + 1 + config.decoder  # that have keys and values
    known = sum(int(load.known.sum()) for load in loads)
    has_cache = config.context == "ordered" or refresh > 1
    cache = known * layers * 2 * config.width if has_cache else 0  # written if fresh, else read
    return encoding * encode + steps * decide + cache
