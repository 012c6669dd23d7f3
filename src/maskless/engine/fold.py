"""Weights as the engine uses them: modulations, norms and constant biases taken into the matrices, exactly.

Where modulations are constants (text), the residual stream is kept without the biases that were added to it so far:
they are constants too, so each norm adds their sum (its offset) when it reads. Then every write to the stream is one
product that ends in an addition. Where they belong to a label (images), a norm's weight is taken into the map from the
condition to its scale, and the matrices stay as they are.

Shapes: D width, V vocabulary, L length, C condition width, P parts of a modulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.engine import kernels
from maskless.engine.kernels import LinearMap
from maskless.engine.stream import Conditions
from maskless.nn.blocks import CrossBlock, Head, Modulation, Norm, SelfBlock, fold_in, fold_out
from maskless.nn.maskgit import Block, TiedHead
from maskless.nn.partition import PartitionTransformer

Map = tuple[Tensor, Tensor]  # weight and bias, where there always is one


@dataclass(frozen=True)
class Layer:
    """The linears of a block: into attention (queries, or queries, keys and values), out of it, and of an MLP."""

    enter: LinearMap
    out: LinearMap
    up: LinearMap
    down: LinearMap


@dataclass(frozen=True)
class Readout:
    """Logits from the last norm; the rows are filled up to a multiple of 64: odd sizes make a product far slower."""

    weight: Tensor  # (V', D)
    bias: Tensor  # (V',) float32, -inf for an id that is never predicted
    vocab: int  # V

    def logits(self, x: Tensor) -> Tensor:
        """(U, D) -> (U, V) float32"""
        return self.biased(kernels.logits_of(x, self.weight))

    def biased(self, logits: Tensor) -> Tensor:
        """What the product gives, with the bias.  (U, V') -> (U, V)"""
        return (logits + self.bias)[:, : self.vocab]


@dataclass(frozen=True)
class Swap:
    """GroupSwap, and the keys and values of all decoder layers."""

    queries: Tensor  # (L, D) of each position, before RoPE
    first: Tensor  # (L, D) what stands at each target before anything is found
    out: Tensor  # (D, D)
    kv: LinearMap  # keys and values of GroupSwap, from the stream as it is
    neighbours: Tensor | None  # (sides * D, D)
    decoder_kv: LinearMap  # of all decoder layers, from the normalised stream


def fold_layers(
    blocks: Iterable[nn.Module], condition: Tensor, offset: Tensor, dtype: torch.dtype
) -> tuple[list[Layer], list[Tensor]]:
    """The blocks as layers, and what the stream lacks before each of their norms, and after them.

    offset (D,): what it lacks at first.
    """
    layers, offsets = [], [offset]
    for block in blocks:
        assert isinstance(block, SelfBlock | CrossBlock)
        shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(condition)
        linear, norm = (block.qkv, block.norm1) if isinstance(block, SelfBlock) else (block.q, block.norm_q)
        enter = fold_in(linear, norm, shift1, scale1)
        out, _ = fold_out(block.out, gate1)
        up = fold_in(block.mlp.up, block.norm2, shift2, scale2)
        down, bias = fold_out(block.mlp.down, gate2)
        layers.append(cast_layer(dtype, enter, (out, None), up, (down, None)))
        offset = offset if bias is None else offset + bias
        offsets += [offsets[-1], offset]  # the attention's product has no bias
    return layers, offsets


def plain_layers(blocks: Iterable[nn.Module], dtype: torch.dtype) -> list[Layer]:
    """The blocks as layers, for modulations that belong to rows."""
    layers = []
    for block in blocks:
        assert isinstance(block, SelfBlock | CrossBlock)
        enter = block.qkv if isinstance(block, SelfBlock) else block.q
        linears = enter, block.out, block.mlp.up, block.mlp.down
        layers.append(cast_layer(dtype, *((linear.weight, linear.bias) for linear in linears)))
    return layers


def cast_layer(dtype: torch.dtype, *maps: tuple[Tensor, Tensor | None]) -> Layer:
    """A layer of these linear maps, weight and bias each, in a precision."""
    return Layer(*(_linear(dtype, weight, bias) for weight, bias in maps))


def _linear(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> LinearMap:
    weight = weight.to(dtype).contiguous()
    return LinearMap(weight, None if bias is None else bias.to(dtype), weight.float().sum(1))


def fold_conditions(
    stacks: Iterable[Iterable[nn.Module]], head: Head, table: Tensor, dtype: torch.dtype, *, centred: bool = True
) -> Conditions:
    """The modulations of all blocks, stack by stack, and of the head after the last; table (classes + 1, C)."""
    maps: list[Map] = []
    ends = [0]
    for stack in stacks:
        for block in stack:
            assert isinstance(block, SelfBlock | CrossBlock | Block)
            first = block.norm_q if isinstance(block, CrossBlock) else block.norm1
            maps += _maps(block.modulation, first, block.norm2)
        ends.append(len(maps))
    maps += _maps(head.modulation, head.norm)
    if isinstance(head, TiedHead):
        maps[-2] = _with_bias(maps[-2], head)
    ends[-1] = len(maps)
    weights, biases = zip(*maps, strict=True)
    return Conditions(
        table=table.to(dtype),
        weight=torch.cat(weights).to(dtype),
        bias=torch.cat(biases).float(),
        width=head.linear.in_features,
        cuts=[end - begin for begin, end in pairwise(ends)],
        centred=centred,
    )


def _maps(modulation: Modulation, *norms: Norm) -> list[Map]:
    """The parts of a modulation as maps of the condition; a scale holds the weight of its norm."""
    linear = modulation.linear
    maps = list(zip(*(x.chunk(modulation.parts) for x in (linear.weight, linear.bias)), strict=True))
    for number, norm in enumerate(norms):
        weight, bias = maps[3 * number + 1]
        maps[3 * number + 1] = norm.weight[:, None] * weight, norm.weight * (1 + bias)
    return maps


def _with_bias(shift: Map, head: TiedHead) -> Map:
    """The shift of a norm that has a bias, which is scaled as well."""
    _, (weight, bias) = _maps(head.modulation)
    return shift[0] + head.norm_bias[:, None] * weight, shift[1] + head.norm_bias * (1 + bias)


def fold_head(head: Head, condition: Tensor, dtype: torch.dtype) -> Readout:
    return _readout(head, *fold_in(head.linear, head.norm, *head.modulation(condition)), dtype)


def plain_head(head: Head, dtype: torch.dtype) -> Readout:
    """For modulations that belong to rows."""
    return _readout(head, head.linear.weight, head.linear.bias, dtype)


def _readout(head: Head, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Readout:
    assert bias is not None
    if head.never is not None:
        ids = torch.arange(len(bias), device=bias.device)
        bias = bias.masked_fill(ids == head.never, -torch.inf)
    more = -len(bias) % 64
    weight, padded = F.pad(weight, (0, 0, 0, more)), F.pad(bias.float(), (0, more), value=-torch.inf)
    return Readout(weight.to(dtype), padded, len(bias))


def fold_swap(network: PartitionTransformer, offset: Tensor, dtype: torch.dtype) -> Swap:
    """offset: what the stream lacks at the end of the encoder."""
    swap = network.swap
    query = swap.norm(swap.start + swap.places)  # (L, D)
    own = swap.kept(query)
    first = (torch.zeros_like(query) if own is None else own) + swap.out.bias
    missing = swap.kv(offset[None])[0]  # keys and values of the part that the stream lacks, and their bias
    decoder = [fold_in(block.kv, block.norm_kv)[0] for block in network.decoder if isinstance(block, CrossBlock)]
    return Swap(
        queries=swap.q(query).to(dtype),
        first=first.to(dtype),
        out=swap.out.weight.to(dtype),
        kv=LinearMap(swap.kv.weight.to(dtype), missing.to(dtype)),
        decoder_kv=LinearMap(torch.cat(decoder).to(dtype)),
        neighbours=None if network.neighbours is None else network.neighbours.linear.weight.to(dtype),
    )
