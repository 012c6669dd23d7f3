"""Counted traffic: how many bytes sampling must move to and from memory, whatever the kernels.

Each matrix is read once in each step that uses it, and with a cache each key and value is written once and read in
every later step. Activations are left out: a better kernel could keep them on the chip. Small batches and cached models
are bound by this, not by arithmetic.
"""

from __future__ import annotations

import torch

from maskless.bench.case import Config
from maskless.bench.flops import sampling_work
from maskless.nn.masked import MaskedConfig
from maskless.nn.partition import PartitionConfig
from maskless.sampling import Plan


def sampling(config: Config, plan: Plan, refresh: int = 1, *, size: int) -> int:
    """Of a whole run of sampling, in bytes; size: bytes of a number."""
    D, V = config.width, config.vocab
    steps = int((plan.ends.diff(dim=1).sum(0) > 0).sum())
    if isinstance(config, MaskedConfig):
        return size * steps * (config.layers * 12 * D * D + D * V)
    if isinstance(config, PartitionConfig):
        work = sampling_work(config, plan, refresh)
        encoding = int((work.fresh.sum(0) > 0).sum())  # steps that have something to encode
        encode = config.encoder * 12 * D * D + (1 + config.decoder) * 2 * D * D
        decide = D * D + config.decoder * 10 * D * D + D * V
        has_cache = config.context == "ordered" or refresh > 1
        layers = config.encoder + 1 + config.decoder  # that have keys and values
        cache = int(work.known.sum()) * layers * 2 * D if has_cache else 0  # written if fresh, else read
        return size * (encoding * encode + steps * decide + cache)
    tokens = int(torch.arange(1, config.length + 1).sum()) * len(plan.order)
    return size * (steps * (config.layers * 12 * D * D + D * V) + tokens * config.layers * 2 * D)
