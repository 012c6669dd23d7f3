"""What the engine computes in a step, from folded weights: hidden states at the targets of each kind of network.

Every body answers one call: given the board (who is known, in which order) it encodes the last known tokens of each
row and returns the stream at the targets. What was encoded before lies in the body's cache, if it keeps one.

Shapes: B rows, N slots of a row, T tokens that are encoded, U targets, D width, h heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.engine import kernels
from maskless.engine.fold import Layer, Readout, fold_head, fold_layers, fold_swap
from maskless.engine.kernels import Past
from maskless.nn.causal import CausalTransformer
from maskless.nn.masked import MaskedTransformer
from maskless.nn.partition import PartitionTransformer
from maskless.problems import Offsets


@dataclass
class Board:
    """The rows of a batch on the device; everything stands in the order in which it becomes known."""

    order: Tensor  # (B, N) positions
    tokens: Tensor  # (B, N) ids
    at: Tensor  # (B,) int32, how many are known
    starts: Tensor  # (B,) int32, where each row begins in the flat board
    columns: Tensor  # (N,) 0, 1, ...

    @staticmethod
    def empty(rows: int, slots: int, device: torch.device) -> Board:
        order, tokens = torch.zeros(2, rows, slots, dtype=torch.long, device=device)
        at = torch.zeros(rows, dtype=torch.int32, device=device)
        starts = torch.arange(rows, dtype=torch.int32, device=device) * slots
        return Board(order, tokens, at, starts, torch.arange(slots, device=device))

    def last(self, span: Offsets) -> Tensor:
        """Where in the flat board the last known tokens are, as many of each row as the span says.  -> (total,)"""
        S = len(span)
        length = span.longest if span.equal else span.bounds.diff()
        return self._index(span, self.starts[:S] + self.at[:S] - length)

    def next(self, span: Offsets) -> Tensor:
        """Where in the flat board the first unknown ones are."""
        return self._index(span, self.starts[: len(span)] + self.at[: len(span)])

    def _index(self, span: Offsets, begin: Tensor) -> Tensor:
        if span.equal:
            return (begin[:, None] + self.columns[: span.longest]).flatten()
        return begin[span.owner] + span.within

    def past(self, span: Offsets) -> Past:
        """All that is known of the rows of a span."""
        return Past(self.starts[: len(span)], self.at[: len(span)])

    def at_index(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and tokens there."""
        return self.order.view(-1).index_select(0, index), self.tokens.view(-1).index_select(0, index)


class Body(Protocol):
    """One kind of network, folded."""

    head: Readout
    keeps: bool  # whether what was encoded stays valid, so that only new tokens need be encoded
    lead: int  # slots of a row before its first token

    def open(self, rows: int, slots: int, keeps: bool) -> Memory: ...


class Memory(Protocol):
    """A body at work on a board of some size, with its buffers."""

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        """The stream at the targets, and the targets' index in the flat board.  -> (U, D), (U,)

        context: the last known tokens of each row, which are encoded now. whole: they are all that is known.
        """
        ...


def leave(x: Tensor, layer: Layer, a: Tensor) -> None:
    """What follows the attention: its output and then the MLP join the stream, in place."""
    x.addmm_(a, layer.out.t())
    hidden = kernels.gelu_linear(kernels.normalise(x, layer.offset2), *layer.up)
    x.addmm_(hidden, layer.down.t())


def enter(x: Tensor, layer: Layer) -> Tensor:
    """Queries (keys and values too, in a self-attention layer) from the stream."""
    return F.linear(kernels.normalise(x, layer.offset1), *layer.enter)


@dataclass(frozen=True)
class Encoder:
    """Self-attention layers over the context, with or without a cache."""

    embedding: Tensor
    layers: list[Layer]
    rope: Tensor
    heads: int
    causal: bool

    def cache(self, rows: int, slots: int) -> Tensor:
        """Keys and values of all layers.  -> (layers, 2, B, h, N, d)"""
        d = self.embedding.shape[1] // self.heads
        return self.embedding.new_zeros(len(self.layers), 2, rows, self.heads, slots, d)

    def __call__(
        self, board: Board, context: Offsets, index: Tensor, cache: Tensor | None, whole: bool
    ) -> tuple[Tensor, Tensor]:
        """Stream and positions of the context, which stands at index (T,) in the flat board.  -> (T, D), (T,)"""
        positions, tokens = board.at_index(index)
        x = self.embedding.index_select(0, tokens)
        past = board.past(context)
        for number, layer in enumerate(self.layers):
            qkv = enter(x, layer).unflatten(1, (3, self.heads, -1))
            if cache is not None:
                kernels.store(qkv[:, None, 1:], positions, self.rope, index, cache[number : number + 1])
            if whole:
                kernels.rotate_(qkv[:, :2], positions, self.rope)
                q, k, v = qkv.unbind(1)
                a = kernels.attend_within(q, k, v, context, causal=self.causal)
            else:
                assert cache is not None
                k, v = cache[number]
                a = kernels.attend(qkv[:, 0], positions, self.rope, k, v, context, past, causal=self.causal)
            leave(x, layer, a)
        return x, positions


class PartitionBody:
    """A Partition Transformer: encoder over the context, GroupSwap, decoder at the targets."""

    lead = 0

    def __init__(self, network: PartitionTransformer, dtype: torch.dtype):
        config, condition = network.config, network.condition().float()
        self.heads, self.keeps, self.rope = config.heads, config.context == "ordered", network.rope
        zero = network.rope.new_zeros(config.width)
        layers, offset = fold_layers(network.encoder, condition, zero, dtype)
        self.encoder = Encoder(network.embedding.weight.to(dtype), layers, network.rope, config.heads, self.keeps)
        self.swap = fold_swap(network, offset, dtype)
        self.decoder, offset = fold_layers(network.decoder, condition, zero, dtype)
        self.head = fold_head(network.head, condition, offset, dtype)

    def open(self, rows: int, slots: int, keeps: bool) -> Memory:
        return _PartitionMemory(self, rows, slots, keeps)


class _PartitionMemory:
    def __init__(self, body: PartitionBody, rows: int, slots: int, keeps: bool):
        self.body, self.keeps = body, keeps
        self.encoded = body.encoder.cache(rows, slots) if keeps else None
        if keeps:
            first = body.swap.first
            shape = 2, rows, body.heads, slots, first.shape[1] // body.heads
            self.found, self.rest = first.new_zeros(1, *shape), first.new_zeros(len(body.decoder), *shape)

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        body, swap = self.body, self.body.swap
        at = board.next(targets)
        positions, _ = board.at_index(at)
        (found, *rest), past = self._keys(board, context, whole)
        q = swap.queries.index_select(0, positions).unflatten(1, (body.heads, -1))
        x = swap.first.index_select(0, positions)
        x.addmm_(kernels.attend(q, positions, body.rope, *found, targets, past, causal=False), swap.out.t())
        for layer, (k, v) in zip(body.decoder, rest, strict=True):
            q = enter(x, layer).unflatten(1, (body.heads, -1))
            leave(x, layer, kernels.attend(q, positions, body.rope, k, v, targets, past, causal=False))
        return x, at

    def _keys(self, board: Board, context: Offsets, whole: bool) -> tuple[list[tuple[Tensor, Tensor]], Past]:
        """Keys and values of GroupSwap and of each decoder layer, and which of them each row attends to."""
        body, swap = self.body, self.body.swap
        index = board.last(context)
        memory, positions = body.encoder(board, context, index, self.encoded, whole)
        shape = (-1, 2, body.heads, memory.shape[1] // body.heads)
        found = F.linear(memory, *swap.kv).unflatten(1, shape)  # (T, 1, 2, h, d)
        rest = F.linear(kernels.normalise(memory, swap.offset), swap.decoder_kv).unflatten(1, shape)
        if self.keeps:
            kernels.store(found, positions, body.rope, index, self.found)
            kernels.store(rest, positions, body.rope, index, self.rest)
            return [(k, v) for k, v in (*self.found, *self.rest)], board.past(context)
        kernels.rotate_(found[:, :, 0], positions, body.rope)
        kernels.rotate_(rest[:, :, 0], positions, body.rope)
        pairs = [(kv[:, 0], kv[:, 1]) for kv in (*found.unbind(1), *rest.unbind(1))]
        return pairs, Past(context.bounds[:-1], context.bounds.diff())


class MaskedBody:
    """The transformer of MDLM: every position in every step, mask ids where nothing is known.

    It lays out the whole board itself, so it needs no context to be encoded: none of it goes out of date.
    """

    keeps, lead = True, 0

    def __init__(self, network: MaskedTransformer, dtype: torch.dtype):
        config, condition = network.config, network.condition().float()
        self.length, self.mask = config.length, config.mask
        layers, offset = fold_layers(network.blocks, condition, network.rope.new_zeros(config.width), dtype)
        self.encoder = Encoder(network.embedding.weight.to(dtype), layers, network.rope, config.heads, False)
        self.head = fold_head(network.head, condition, offset, dtype)

    def open(self, rows: int, slots: int, keeps: bool) -> Memory:
        return _MaskedMemory(self, rows)


class _MaskedMemory:
    def __init__(self, body: MaskedBody, rows: int):
        self.body = body
        self.grid = Board.empty(rows, body.length, body.head.weight.device)
        self.grid.order.copy_(self.grid.columns.expand(rows, -1))
        self.index = torch.arange(rows * body.length, device=self.grid.at.device)

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        grid, rows = self.grid, len(targets)
        known = board.columns < board.at[:rows, None]
        grid.tokens.fill_(self.body.mask)
        grid.tokens[:rows].scatter_(1, board.order[:rows], torch.where(known, board.tokens[:rows], self.body.mask))
        every = Offsets.regular(rows, self.body.length, known.device)
        x, _ = self.body.encoder(grid, every, self.index[: every.total], None, True)
        at = board.next(targets)
        positions, _ = board.at_index(at)
        return x.index_select(0, grid.starts[at // len(board.columns)] + positions), at


class CausalBody:
    """A causal transformer; its start vector is one more token, which stands before the others."""

    keeps, lead = True, 1

    def __init__(self, network: CausalTransformer, dtype: torch.dtype):
        config, condition = network.config, network.condition().float()
        self.start = config.vocab
        layers, offset = fold_layers(network.blocks, condition, network.rope.new_zeros(config.width), dtype)
        embedding = torch.cat([network.embedding.weight, network.start]).to(dtype)
        self.encoder = Encoder(embedding, layers, network.rope, config.heads, True)
        self.head = fold_head(network.head, condition, offset, dtype)

    def open(self, rows: int, slots: int, keeps: bool) -> Memory:
        return _CausalMemory(self, rows, slots)


class _CausalMemory:
    def __init__(self, body: CausalBody, rows: int, slots: int):
        self.encoder, self.cache = body.encoder, body.encoder.cache(rows, slots)

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        x, _ = self.encoder(board, context, board.last(context), self.cache, whole)
        return x.index_select(0, context.bounds[1:] - 1), board.next(targets)


def fold(network: nn.Module, dtype: torch.dtype) -> Body:
    """The body of a network."""
    with torch.no_grad():
        if isinstance(network, PartitionTransformer):
            return PartitionBody(network, dtype)
        if isinstance(network, MaskedTransformer):
            return MaskedBody(network, dtype)
        assert isinstance(network, CausalTransformer)
        return CausalBody(network, dtype)
