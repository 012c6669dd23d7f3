"""Which networks the engine serves, and the backbone of each."""

from __future__ import annotations

import copy

import torch
from torch import nn

from maskless.engine.backbones import Backbone, CausalBackbone, MaskedBackbone, PartitionBackbone
from maskless.engine.maskgit import MaskGITBackbone
from maskless.nn.causal import CausalTransformer
from maskless.nn.masked import MaskedTransformer
from maskless.nn.maskgit import MaskGIT
from maskless.nn.partition import PartitionTransformer


def serves(network: nn.Module) -> bool:
    """Whether the engine can compute this network; the plain loop takes the others."""
    if any(hasattr(p, "device_mesh") for p in network.parameters()):
        return False  # sharded over processes: only its own forward can gather the weights
    if isinstance(network, PartitionTransformer):
        return network.config.queries == "position"  # an aggregate of the context is no table
    if isinstance(network, MaskedTransformer):
        return network.config.always_full
    return isinstance(network, CausalTransformer | MaskGIT)


def fold(network: nn.Module, dtype: torch.dtype) -> Backbone:
    """The backbone of a network, in a precision."""
    with torch.no_grad():
        if next(network.parameters()).dtype != torch.float32:
            network = copy.deepcopy(network).float()  # weights are folded in float32
        if isinstance(network, PartitionTransformer):
            return PartitionBackbone(network, dtype)
        if isinstance(network, MaskedTransformer):
            return MaskedBackbone(network, dtype)
        if isinstance(network, MaskGIT):
            return MaskGITBackbone(network, dtype)
        assert isinstance(network, CausalTransformer)
        return CausalBackbone(network, dtype)
