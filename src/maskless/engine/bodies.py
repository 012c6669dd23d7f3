"""What the engine computes in a step: what the head reads at the targets, of each kind of network.

Every body answers one call: given the board (who is known, in which order) it encodes the last known tokens of each
row and returns the stream at the targets. What was encoded before lies in the body's cache, if it keeps one.

Shapes: B rows, N slots of a row, T tokens that are encoded, U targets, D width, h heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.board import Board
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


class Body(Protocol):
    """One kind of network, folded."""

    head: Readout
    keeps: bool  # whether what was encoded stays valid, so that only new tokens need be encoded
    lead: int  # slots of a row before its first token
    places: int  # positions before that of its first token
    dropped: int | None  # the label that stands for none, where there are labels

    def open(self, rows: int, slots: int, keeps: bool) -> Memory: ...


class Memory(Protocol):
    """A body at work on a board of some size, with its buffers."""

    caches: tuple[Tensor, ...]  # (layers, 2, B, h, N, d) each; with them, a later step must encode what one left out
    norms: OpenNorms

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        """What the head reads at the targets, and the targets' index in the flat board.  -> (U, D), (U,)

        context: the last known tokens of each row, which are encoded now. whole: they are all that is known.
        """
        ...


def leave(stream: Stream, layer: Layer, a: Tensor) -> None:
    """What follows the attention: its output and then the MLP join the stream."""
    stream.add(a, layer.out)
    weight, bias = layer.up
    assert bias is not None
    stream.add(kernels.gelu_linear(stream.read(), weight, bias), layer.down)


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
        self, board: Board, norms: OpenNorms, context: Offsets, index: Tensor, cache: Tensor | None, whole: bool
    ) -> tuple[Stream, Tensor]:
        """Stream and positions (T,) of the context, which stands at index (T,) in the flat board."""
        positions, tokens = board.at_index(index)
        stream, past = norms.stream(0, self.embedding.index_select(0, tokens), context), board.past(context)
        for number, layer in enumerate(self.layers):
            qkv = F.linear(stream.read(), *layer.enter).unflatten(1, (3, self.heads, -1))
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
            leave(stream, layer, a)
        return stream, positions


class PartitionBody:
    """A Partition Transformer: encoder over the context, GroupSwap, decoder at the targets.

    A register is one more token, which stands before the others: id V for a context without BOS, V + 1 for one with it.
    """

    def __init__(self, network: PartitionTransformer, dtype: torch.dtype):
        config = network.config
        self.heads, self.keeps, self.rope = config.heads, config.context == "ordered", network.rope
        self.vocab, self.dropped = config.vocab, config.classes
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

    def open(self, rows: int, slots: int, keeps: bool) -> Memory:
        return PartitionMemory(self, rows, slots, keeps)


class PartitionMemory:
    """A Partition Transformer at work: keys and values of all layers, cached where they stay valid."""

    def __init__(self, body: PartitionBody, rows: int, slots: int, keeps: bool):
        self.body = body
        self.norms: OpenNorms = body.norms.open(rows)
        self.encoded: Tensor | None = None
        self.caches: tuple[Tensor, ...] = ()
        if keeps:
            first = body.swap.first
            shape = 2, rows, body.heads, slots, first.shape[1] // body.heads
            self.encoded = body.encoder.cache(rows, slots)
            self.found, self.rest = first.new_zeros(1, *shape), first.new_zeros(len(body.decoder), *shape)
            self.caches = self.encoded, self.found, self.rest

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        at = board.next(targets)
        return self._read(board, context, targets, whole, at, chain=False), at

    def chain(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> Tensor:
        """What the head reads behind each of the last known tokens of a row, given all up to it.  -> (U, D)"""
        return self._read(board, context, targets, whole, board.following(targets), chain=True)

    def _read(
        self, board: Board, context: Offsets, targets: Offsets, whole: bool, at: Tensor, *, chain: bool
    ) -> Tensor:
        body, swap = self.body, self.body.swap
        positions, _ = board.at_index(at)
        (found, *rest), past = self._keys(board, context, whole)
        q = swap.queries.index_select(0, positions).unflatten(1, (body.heads, -1))
        x = swap.first.index_select(0, positions)
        x.addmm_(kernels.attend(q, positions, body.rope, *found, targets, past, causal=chain), swap.out.t())
        stream = self.norms.stream(1, x, targets)
        for layer, (k, v) in zip(body.decoder, rest, strict=True):
            q = F.linear(stream.read(), *layer.enter).unflatten(1, (body.heads, -1))
            leave(stream, layer, kernels.attend(q, positions, body.rope, k, v, targets, past, causal=chain))
        return stream.read()

    def _keys(self, board: Board, context: Offsets, whole: bool) -> tuple[list[tuple[Tensor, Tensor]], Past]:
        """Keys and values of GroupSwap and of each decoder layer, and which of them each row attends to."""
        body, swap = self.body, self.body.swap
        index = board.last(context)
        stream, positions = body.encoder(board, self.norms, context, index, self.encoded, whole)
        shape = -1, 2, body.heads, swap.first.shape[1] // body.heads
        rest = F.linear(stream.read(), *swap.decoder_kv).unflatten(1, shape)  # (T, decoder, 2, h, d)
        found = F.linear(stream.x, *swap.kv).unflatten(1, shape)  # (T, 1, 2, h, d)
        if self.caches:
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

    keeps, lead, places = True, 0, 0
    dropped: int | None = None

    def __init__(self, network: MaskedTransformer, dtype: torch.dtype):
        config, condition = network.config, network.condition().float()
        self.length, self.mask = config.length, config.mask
        layers, offsets = fold_layers(network.blocks, condition, network.rope.new_zeros(config.width), dtype)
        self.norms = Constants([offsets])
        self.encoder = Encoder(network.embedding.weight.to(dtype), layers, network.rope, config.heads, False)
        self.head = fold_head(network.head, condition, dtype)

    def open(self, rows: int, slots: int, keeps: bool) -> Memory:
        return _MaskedMemory(self, rows)


class _MaskedMemory:
    caches: tuple[Tensor, ...] = ()

    def __init__(self, body: MaskedBody, rows: int):
        self.body = body
        self.norms: OpenNorms = body.norms.open(rows)
        self.grid = Board.empty(rows, body.length, body.head.weight.device)
        self.grid.order.copy_(self.grid.columns.expand(rows, -1))
        self.index = torch.arange(rows * body.length, device=self.grid.at.device)

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        grid, rows, body = self.grid, len(targets), self.body
        board.lay_out(grid.tokens[:rows], body.mask)
        every = Offsets.regular(rows, body.length, board.at.device)
        stream, _ = body.encoder(grid, self.norms, every, self.index[: every.total], None, True)
        at = board.next(targets)
        positions, _ = board.at_index(at)
        return stream.select(grid.starts[at // len(board.columns)] + positions, targets).read(), at


class CausalBody:
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

    def open(self, rows: int, slots: int, keeps: bool) -> Memory:
        return _CausalMemory(self, rows, slots)


class _CausalMemory:
    def __init__(self, body: CausalBody, rows: int, slots: int):
        self.encoder, self.cache = body.encoder, body.encoder.cache(rows, slots)
        self.caches: tuple[Tensor, ...] = (self.cache,)
        self.norms: OpenNorms = body.norms.open(rows)

    def __call__(self, board: Board, context: Offsets, targets: Offsets, whole: bool) -> tuple[Tensor, Tensor]:
        stream, _ = self.encoder(board, self.norms, context, board.last(context), self.cache, whole)
        return stream.select(context.bounds[1:] - 1, targets).read(), board.next(targets)
