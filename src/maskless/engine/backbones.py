"""What the engine computes in a step, for each kind of network: the hidden states at the targets.

A backbone is a network with folded weights. For a batch it makes a cache, whose `forward` takes the state of the batch
(which tokens are known, in which order), encodes the last known tokens of each row and returns the stream at the
targets. What was encoded before lies in the cache's tensors, if it keeps any.

Shapes: B rows, N columns of a row, T tokens that are encoded, U targets, D width, h heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.batch_state import BatchState, Places
from maskless.engine.fold import (
    Layer,
    Readout,
    fold_conditions,
    fold_head,
    fold_layers,
    fold_swap,
    plain_head,
    plain_layers,
)
from maskless.engine.kernels import Past
from maskless.engine.stream import Constants, Norms, OpenNorms, Stream
from maskless.nn.blocks import ClassCondition
from maskless.nn.causal import CausalTransformer
from maskless.nn.masked import MaskedTransformer
from maskless.nn.partition import PartitionTransformer, Registers
from maskless.plans import Plan
from maskless.problems import Offsets


class Backbone(Protocol):
    """One kind of network, folded."""

    head: Readout
    keeps: bool  # whether what was encoded stays valid, so that only new tokens have to be encoded
    lead: int  # columns of a row before its first token
    places: int  # positions before that of its first token
    dropped: int | None  # the label that stands for none, where there are labels

    def new_cache(self, rows: int, columns: int, keeps: bool) -> Cache: ...


class Cache(Protocol):
    """The buffers of a backbone for a batch of some size, and the forward pass that uses them."""

    tensors: tuple[Tensor, ...]  # (layers, 2, B, h, N, d) each; with them, a later step must encode what one left out
    norms: OpenNorms

    def forward(self, state: BatchState, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        """What the head reads at the targets, and the targets' index in the flattened batch.  -> (U, D), (U,)

        context: the last known tokens of each row, which are encoded now. whole: they are all that is known.
        """
        ...


def leave(stream: Stream, layer: Layer, a: Tensor) -> None:
    """What follows the attention: its output and then the MLP join the stream."""
    stream.add(a, layer.out)
    stream.add(stream.into(layer.up, gelu=True), layer.down)


@dataclass(frozen=True)
class Encoder:
    """Self-attention layers over the context, with or without a cache."""

    embedding: Tensor
    layers: list[Layer]
    rope: Tensor
    heads: int
    causal: bool

    def new_cache(self, rows: int, columns: int) -> Tensor:
        """Keys and values of all layers.  -> (layers, 2, B, h, N, d)"""
        d = self.embedding.shape[1] // self.heads
        return self.embedding.new_zeros(len(self.layers), 2, rows, self.heads, columns, d)

    def __call__(
        self, state: BatchState, norms: OpenNorms, context: Offsets, at: Places, cache: Tensor | None, whole: bool
    ) -> Stream:
        """The stream of the context, which stands at these places of the flattened batch."""
        index, positions, tokens = at
        stream, past = norms.stream(0, self.embedding.index_select(0, tokens), context), state.past(context)
        for number, layer in enumerate(self.layers):
            qkv = stream.into(layer.enter).unflatten(1, (3, self.heads, -1))
            if not whole:
                assert cache is not None
                kept, causal = cache[number], self.causal
                a = kernels.store_and_attend(qkv, positions, self.rope, index, kept, context, past, causal=causal)
            else:
                if cache is not None:
                    kernels.store(qkv[:, None, 1:], positions, self.rope, index, cache[number : number + 1])
                kernels.rotate_(qkv[:, :2], positions, self.rope)
                q, k, v = qkv.unbind(1)
                a = kernels.attend_within(q, k, v, context, causal=self.causal)
            leave(stream, layer, a)
        return stream


class PartitionBackbone:
    """A Partition Transformer: encoder over the context, GroupSwap, decoder at the targets.

    A register is one more token, which stands before the others: id V for a context without BOS, V + 1 for one with it.
    """

    def __init__(self, network: PartitionTransformer, dtype: torch.dtype):
        config = network.config
        self.heads, self.keeps, self.rope = config.heads, config.context == "ordered", network.rope
        self.vocab, self.dropped = config.vocab, config.classes
        self.near = None if network.neighbours is None else network.neighbours.near  # (places, sides)
        self.lead, self.places = (1, Registers.PLACES) if config.registers else (0, 0)
        offset = network.rope.new_zeros(config.width)
        self.norms: Norms
        if isinstance(network.condition, ClassCondition):
            layers, self.decoder = plain_layers(network.encoder, dtype), plain_layers(network.decoder, dtype)
            stacks = [network.encoder, network.decoder]
            self.norms = fold_conditions(stacks, network.head, network.condition.weight, dtype)
            self.head = plain_head(network.head, dtype)
        else:
            condition = network.condition().float()
            layers, encoder = fold_layers(network.encoder, condition, offset, dtype)
            self.decoder, decoder = fold_layers(network.decoder, condition, offset, dtype)
            self.norms, offset = Constants([encoder, decoder]), encoder[-1]
            self.head = fold_head(network.head, condition, dtype)
        embedding: Tensor = network.embedding.weight
        if network.registers is not None:
            embedding = torch.cat([embedding, network.registers.weight])
        self.encoder = Encoder(embedding.to(dtype), layers, network.rope, config.heads, self.keeps)
        self.swap = fold_swap(network, offset, dtype)

    def first(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Id and position of the register of each row.  -> (B,), (B,)"""
        place = (plan.order == 0).int().argmax(1)  # when the first token comes
        known = place < plan.ends[:, 0]
        if bool((~known & (place < plan.ends[:, -1])).any()):
            raise ValueError(
                "the first token (BOS) is to be decided: expected it to be known, since a register says so"
            )
        return self.vocab + known.long(), known.long()

    def new_cache(self, rows: int, columns: int, keeps: bool) -> Cache:
        return PartitionCache(self, rows, columns, keeps)


class PartitionCache:
    """A Partition Transformer at work: keys and values of all layers, cached where they stay valid."""

    def __init__(self, backbone: PartitionBackbone, rows: int, columns: int, keeps: bool):
        self.backbone = backbone
        self.norms: OpenNorms = backbone.norms.open(rows)
        self.encoded: Tensor | None = None
        self.tensors: tuple[Tensor, ...] = ()
        if keeps:
            first = backbone.swap.first
            shape = 2, rows, backbone.heads, columns, first.shape[1] // backbone.heads
            self.encoded = backbone.encoder.new_cache(rows, columns)
            self.found, self.rest = first.new_zeros(1, *shape), first.new_zeros(len(backbone.decoder), *shape)
            sides = 0 if backbone.near is None else backbone.near.shape[1]
            self.beside = first.new_zeros(1, 1, rows, 1, columns, sides * first.shape[1])
            self.tensors = self.encoded, self.found, self.rest, self.beside

    def encode(self, state: BatchState, context: Offsets) -> None:
        """Encode all that is known, so that later steps find it."""
        self._keys(state, context, True)

    def forward(self, state: BatchState, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        at = state.next(targets)
        return self._read(state, context, targets, whole, at, chain=False), at.at

    def chain(self, state: BatchState, context: Offsets, targets: Offsets, whole: bool) -> Tensor:
        """What the head reads behind each of the last known tokens of a row, given all up to it.  -> (U, D)"""
        return self._read(state, context, targets, whole, state.following(targets), chain=True)

    def _read(
        self, state: BatchState, context: Offsets, targets: Offsets, whole: bool, at: Places, *, chain: bool
    ) -> Tensor:
        backbone, swap = self.backbone, self.backbone.swap
        positions = at.positions
        (found, *rest), past, beside = self._keys(state, context, whole)
        q = swap.queries.index_select(0, positions).unflatten(1, (backbone.heads, -1))
        x = swap.first.index_select(0, positions)
        kernels.add_linear(
            x, kernels.attend(q, positions, backbone.rope, *found, targets, past, causal=chain), swap.out
        )
        if backbone.near is not None and len(beside):
            near = backbone.near.index_select(0, positions)
            self._join_neighbours(x, state, at.at, near, past, beside, chain=chain)
        stream = self.norms.stream(1, x, targets)
        for layer, (k, v) in zip(backbone.decoder, rest, strict=True):
            q = stream.into(layer.enter).unflatten(1, (backbone.heads, -1))
            leave(stream, layer, kernels.attend(q, positions, backbone.rope, k, v, targets, past, causal=chain))
        return stream.read()

    def _join_neighbours(
        self, x: Tensor, state: BatchState, at: Tensor, near: Tensor, past: Past, beside: Tensor, *, chain: bool
    ) -> None:
        """What is encoded beside each target joins x (U, D).

        at (U,): the targets' index in the flattened batch; near (U, sides): where their neighbours stand.
        """
        columns = state.columns_of(len(past.begins), len(self.backbone.rope))
        rows, own = at // len(state.columns), at % len(state.columns)
        limit = own if chain else state.known[rows]
        for side, states in enumerate(beside.chunk(near.shape[1], 1)):
            column = columns[rows, near[:, side]]
            known = column < limit
            there = past.begins[rows] + torch.where(known, column, 0)
            x += torch.where(known[:, None], states.index_select(0, there), 0)

    def _keys(
        self, state: BatchState, context: Offsets, whole: bool
    ) -> tuple[list[tuple[Tensor, Tensor]], Past, Tensor]:
        """Keys and values of GroupSwap and of each decoder layer, which of them each row attends to, and what they
        hand to their neighbours."""
        backbone, swap = self.backbone, self.backbone.swap
        at = state.last(context)
        index, positions, _ = at
        stream = backbone.encoder(state, self.norms, context, at, self.encoded, whole)
        shape = -1, 2, backbone.heads, swap.first.shape[1] // backbone.heads
        read = stream.read()
        rest = kernels.linear(read, swap.decoder_kv).unflatten(1, shape)  # (T, decoder, 2, h, d)
        beside = read[:, :0] if swap.neighbours is None else F.linear(read, swap.neighbours)
        found = kernels.linear(stream.x, swap.kv).unflatten(1, shape)  # (T, 1, 2, h, d)
        if self.tensors:
            kernels.store(found, positions, backbone.rope, index, self.found)
            kernels.store(rest, positions, backbone.rope, index, self.rest)
            if swap.neighbours is not None:
                beside = self.beside.view(-1, beside.shape[1]).index_copy_(0, index, beside)
            return [(k, v) for k, v in (*self.found, *self.rest)], state.past(context), beside
        kernels.rotate_(found[:, :, 0], positions, backbone.rope)
        kernels.rotate_(rest[:, :, 0], positions, backbone.rope)
        pairs = [(kv[:, 0], kv[:, 1]) for kv in (*found.unbind(1), *rest.unbind(1))]
        return pairs, Past(context.bounds[:-1], context.bounds.diff()), beside


class MaskedBackbone:
    """The transformer of MDLM: every position in every step, mask ids where nothing is known.

    It lays out all positions itself, so it needs no context to be encoded: none of it goes out of date.
    """

    keeps, lead, places = True, 0, 0
    dropped: int | None = None

    def __init__(self, network: MaskedTransformer, dtype: torch.dtype):
        config, condition = network.config, network.condition().float()
        self.length, self.mask = config.length, config.mask
        layers, offsets = fold_layers(network.blocks, condition, network.rope.new_zeros(config.width), dtype)
        self.norms = Constants([offsets])
        self.encoder = Encoder(network.embedding.weight.to(dtype), layers, network.rope, config.heads, False)
        self.head = fold_head(network.head, condition, dtype)

    def new_cache(self, rows: int, columns: int, keeps: bool) -> Cache:
        return _MaskedCache(self, rows)


class _MaskedCache:
    tensors: tuple[Tensor, ...] = ()

    def __init__(self, backbone: MaskedBackbone, rows: int):
        self.backbone = backbone
        self.norms: OpenNorms = backbone.norms.open(rows)
        self.grid = BatchState.empty(rows, backbone.length, backbone.head.weight.device)
        self.grid.order.copy_(self.grid.columns.expand(rows, -1))
        self.grid.known.fill_(backbone.length)

    def forward(self, state: BatchState, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        grid, rows, backbone = self.grid, len(targets), self.backbone
        state.lay_out(grid.tokens[:rows], backbone.mask)
        every = Offsets.regular(rows, backbone.length, state.known.device)
        stream = backbone.encoder(grid, self.norms, every, grid.last(every), None, True)
        index, positions, _ = state.next(targets)
        return stream.select(grid.starts[index // len(state.columns)] + positions, targets).read(), index


class CausalBackbone:
    """A causal transformer; its start vector is one more token, which stands before the others."""

    keeps, lead, places = True, 1, 1
    dropped: int | None = None

    def __init__(self, network: CausalTransformer, dtype: torch.dtype):
        config, condition = network.config, network.condition().float()
        self.start = config.vocab
        layers, offsets = fold_layers(network.blocks, condition, network.rope.new_zeros(config.width), dtype)
        self.norms = Constants([offsets])
        embedding = torch.cat([network.embedding.weight, network.start]).to(dtype)
        self.encoder = Encoder(embedding, layers, network.rope, config.heads, True)
        self.head = fold_head(network.head, condition, dtype)

    def first(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Id and position of the start vector of each row.  -> (B,), (B,)"""
        positions = torch.zeros_like(plan.order[:, 0])
        return positions + self.start, positions

    def new_cache(self, rows: int, columns: int, keeps: bool) -> Cache:
        return _CausalCache(self, rows, columns)


class _CausalCache:
    def __init__(self, backbone: CausalBackbone, rows: int, columns: int):
        self.encoder, self.cache = backbone.encoder, backbone.encoder.new_cache(rows, columns)
        self.tensors: tuple[Tensor, ...] = (self.cache,)
        self.norms: OpenNorms = backbone.norms.open(rows)

    def forward(self, state: BatchState, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        stream = self.encoder(state, self.norms, context, state.last(context), self.cache, whole)
        return stream.select(context.bounds[1:] - 1, targets).read(), state.next(targets).at
