"""MaskGIT in the engine: every position in every step, as in the network, and the head at the new tokens only.

Shapes: B rows, L length, T = B*L tokens, D width, U targets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.backbones import Cache
from maskless.engine.batch_state import BatchState
from maskless.engine.fold import Layer, cast_layer, fold_conditions, plain_head
from maskless.engine.stream import OpenNorms
from maskless.nn.maskgit import Block, MaskGIT
from maskless.problems import Offsets


class MaskGITBackbone:
    """A MaskGIT; its register is one more id, which stands in the place of the BOS.

    It lays out all positions itself, so it needs no context to be encoded: none of it goes out of date.
    """

    keeps, lead, places = True, 0, 0

    def __init__(self, network: MaskGIT, dtype: torch.dtype):
        config, head = network.config, network.head
        self.heads, self.length, self.mask = config.heads, config.length, config.mask
        self.dropped: int | None = config.classes
        self.register = config.vocab
        self.embedding = torch.cat([head.linear.weight, network.register]).to(dtype)
        self.positions = F.pad(network.places, (0, 0, 1, 0)).to(dtype)  # (L, D), nothing at the register
        self.layers = [_layer(block, dtype) for block in network.blocks]
        table = F.silu(network.condition.weight)
        self.norms = fold_conditions([network.blocks], head, table, dtype, centred=False)
        self.head = plain_head(head, dtype)

    def new_cache(self, rows: int, columns: int, keeps: bool) -> Cache:
        return _MaskGITCache(self, rows)


def _layer(block: object, dtype: torch.dtype) -> Layer:
    assert isinstance(block, Block)
    return cast_layer(dtype, *((linear.weight, None) for linear in (block.qkv, block.out, block.up, block.down)))


class _MaskGITCache:
    tensors: tuple[Tensor, ...] = ()

    def __init__(self, backbone: MaskGITBackbone, rows: int):
        self.backbone = backbone
        self.norms: OpenNorms = backbone.norms.open(rows)

    def forward(self, state: BatchState, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        backbone, rows, L = self.backbone, len(targets), self.backbone.length
        tokens = state.lay_out(state.tokens.new_empty(rows, L), backbone.mask)
        tokens[:, 0] = backbone.register
        x = (F.embedding(tokens, backbone.embedding) + backbone.positions).flatten(0, 1)  # (T, D)
        every = Offsets.regular(rows, L, x.device)
        stream = self.norms.stream(0, x, every)
        for layer in backbone.layers:
            each = stream.into(layer.enter).unflatten(1, (3, -1))
            kernels.rms_(each[:, :2])  # queries and keys, over all heads together
            q, k, v = each.unflatten(2, (backbone.heads, -1)).unbind(1)
            stream.add(kernels.attend_within(q, k, v, every, causal=False), layer.out)
            stream.add(kernels.swiglu(stream.into(layer.up)), layer.down)
        index, positions, _ = state.next(targets)
        return stream.select(index // len(state.columns) * L + positions, targets).read(), index
