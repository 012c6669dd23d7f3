"""Counted traffic: how many bytes sampling must move to and from memory, whatever the kernels.

Each matrix is read once in each step that uses it, and with a cache each key and value is written once and read in
every later step. Activations are left out: a better kernel could keep them on the chip. Small batches and cached models
are bound by this, not by arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskless.bench.case import Config
from maskless.bench.flops import Work, drawing_work, layer_weights, sampling_work
from maskless.nn.causal import CausalConfig
from maskless.nn.masked import MaskedConfig
from maskless.nn.maskgit import MaskGITConfig
from maskless.nn.partition import PartitionConfig
from maskless.plans import Plan


def sampling(config: Config, plan: Plan, refresh: int = 1, *, size: int) -> int:
    """Of a whole run of sampling text, in bytes; size: bytes of a number."""
    D, V, steps = config.width, config.vocab, _steps(plan)
    if isinstance(config, MaskedConfig):
        return size * steps * (config.layers * 12 * D * D + D * V)
    if isinstance(config, PartitionConfig):
        has_cache = config.context == "ordered" or refresh > 1
        return size * partition(config, [sampling_work(config, plan, refresh)], steps, has_cache=has_cache)
    assert isinstance(config, CausalConfig)
    tokens = int(torch.arange(1, config.length + 1).sum()) * len(plan.order)
    return size * (steps * (config.layers * 12 * D * D + D * V) + tokens * config.layers * 2 * D)


def drawing(config: Config, plan: Plan, weights: Tensor, *, size: int) -> int:
    """Of a whole run of drawing pictures; rows with and without their labels share each reading of the weights."""
    steps = _steps(plan)
    if isinstance(config, PartitionConfig):
        work = drawing_work(config, plan, weights)
        return size * partition(config, work, steps, has_cache=config.context == "ordered")
    assert isinstance(config, MaskGITConfig)
    return size * steps * (config.layers * layer_weights(config) + config.width * config.vocab)


def partition(config: PartitionConfig, work: list[Work], steps: int, *, has_cache: bool) -> int:
    """Of a Partition Transformer, in numbers."""
    D, V = config.width, config.vocab
    encoding = int((torch.stack([part.fresh.sum(0) for part in work]).sum(0) > 0).sum())  # steps that encode something
    encode = config.encoder * 12 * D * D + (1 + config.decoder) * 2 * D * D
    decide = D * D + config.decoder * 10 * D * D + D * V
    layers = config.encoder + 1 + config.decoder  # that have keys and values
    known = sum(int(part.known.sum()) for part in work)
    cache = known * layers * 2 * D if has_cache else 0  # written if fresh, else read
    return encoding * encode + steps * decide + cache


def _steps(plan: Plan) -> int:
    """That decide something."""
    return int((plan.ends.diff(dim=1).sum(0) > 0).sum())
