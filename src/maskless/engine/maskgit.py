"""MaskGIT in the engine: every position in every step, as in the network, and the head at the new tokens only.

Shapes: B rows, L length, T = B*L tokens, D width, U targets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.board import Board
from maskless.engine.bodies import Memory
from maskless.engine.fold import Layer, cast_layer, fold_conditions, plain_head
from maskless.engine.stream import OpenNorms
from maskless.nn.maskgit import Block, MaskGIT
from maskless.problems import Offsets


class MaskGITBody:
    """A MaskGIT; its register is one more id, which stands in the place of the BOS.

    It lays out the whole board itself, so it needs no context to be encoded: none of it goes out of date.
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

    def open(self, rows: int, slots: int, keeps: bool) -> Memory:
        return _MaskGITMemory(self, rows)


def _layer(block: object, dtype: torch.dtype) -> Layer:
    assert isinstance(block, Block)
    return cast_layer(dtype, *((linear.weight, None) for linear in (block.qkv, block.out, block.up, block.down)))


class _MaskGITMemory:
    caches: tuple[Tensor, ...] = ()

    def __init__(self, body: MaskGITBody, rows: int):
        self.body = body
        self.norms: OpenNorms = body.norms.open(rows)

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        body, rows, L = self.body, len(targets), self.body.length
        tokens = board.lay_out(board.tokens.new_empty(rows, L), body.mask)
        tokens[:, 0] = body.register
        x = (F.embedding(tokens, body.embedding) + body.positions).flatten(0, 1)  # (T, D)
        every = Offsets.regular(rows, L, x.device)
        stream = self.norms.stream(0, x, every)
        for layer in body.layers:
            each = F.linear(stream.read(), *layer.enter).unflatten(1, (3, -1))
            kernels.rms_(each[:, :2])  # queries and keys, over all heads together
            q, k, v = each.unflatten(2, (body.heads, -1)).unbind(1)
            stream.add(kernels.attend_within(q, k, v, every, causal=False), layer.out)
            stream.add(kernels.swiglu(F.linear(stream.read(), *layer.up)), layer.down)
        at = board.next(targets)
        positions, _ = board.at_index(at)
        return stream.select(at // len(board.columns) * L + positions, targets).read(), at
