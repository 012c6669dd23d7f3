"""Weights as the engine uses them: modulations, norms and constant biases taken into the matrices, exactly.

The residual stream is kept without the biases that were added to it so far: they are constants, so each norm adds
their sum (its `offset`) when it reads. Then every write to the stream is one product that ends in an addition.

Shapes: D width, V vocabulary, L length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.nn.blocks import CrossBlock, Head, SelfBlock, fold_in, fold_out
from maskless.nn.partition import PartitionTransformer

Linear = tuple[Tensor, Tensor]  # weight and bias: x -> x @ weight.T + bias


@dataclass(frozen=True)
class Layer:
    """A block of either kind: attention, entered by queries or by queries, keys and values, then an MLP."""

    offset1: Tensor  # (D,) what the stream lacks before the attention
    enter: Linear
    out: Tensor  # (D, D)
    offset2: Tensor  # (D,) and before the MLP
    up: Linear
    down: Tensor  # (D, 4D)


@dataclass(frozen=True)
class Readout:
    """Logits from the stream; the rows are filled up to a multiple of 64, since odd sizes make a product far slower."""

    offset: Tensor
    weight: Tensor  # (V', D)
    bias: Tensor  # (V',) float32, -inf for an id that is never predicted
    vocab: int  # V


@dataclass(frozen=True)
class Swap:
    """GroupSwap, and the keys and values of all decoder layers."""

    queries: Tensor  # (L, D) of each position, before RoPE
    first: Tensor  # (L, D) what stands at each target before anything is found
    out: Tensor  # (D, D)
    kv: Linear  # keys and values of GroupSwap, from the stream as it is
    offset: Tensor  # (D,) what the stream lacks at the end of the encoder
    decoder_kv: Tensor  # (decoder*2D, D) of the normalised stream


def fold_layers(
    blocks: Iterable[nn.Module], condition: Tensor, offset: Tensor, dtype: torch.dtype
) -> tuple[list[Layer], Tensor]:
    """The blocks as layers, and what the stream lacks after them."""
    layers = []
    for block in blocks:
        assert isinstance(block, SelfBlock | CrossBlock)
        shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(condition)
        if isinstance(block, SelfBlock):
            enter = fold_in(block.qkv, block.norm1, shift1, scale1)
        else:
            enter = fold_in(block.q, block.norm_q, shift1, scale1)
        out, _ = fold_out(block.out, gate1)
        up = fold_in(block.mlp.up, block.norm2, shift2, scale2)
        down, bias = fold_out(block.mlp.down, gate2)
        layers.append(Layer(offset, _cast(enter, dtype), out.to(dtype), offset, _cast(up, dtype), down.to(dtype)))
        offset = offset if bias is None else offset + bias
    return layers, offset


def fold_head(head: Head, condition: Tensor, offset: Tensor, dtype: torch.dtype) -> Readout:
    weight, bias = fold_in(head.linear, head.norm, *head.modulation(condition))
    assert bias is not None
    if head.never is not None:
        ids = torch.arange(len(bias), device=bias.device)
        bias = bias.masked_fill(ids == head.never, -torch.inf)
    more = -len(bias) % 64
    weight, padded = F.pad(weight, (0, 0, 0, more)), F.pad(bias.float(), (0, more), value=-torch.inf)
    return Readout(offset, weight.to(dtype), padded, len(bias))


def fold_swap(network: PartitionTransformer, offset: Tensor, dtype: torch.dtype) -> Swap:
    """offset: what the stream lacks at the end of the encoder."""
    swap = network.swap
    query = swap.norm(swap.start + swap.places)  # (L, D)
    first = (query if swap.residual else torch.zeros_like(query)) + swap.out.bias
    missing = swap.kv(offset[None])[0]  # keys and values of the part that the stream lacks, and their bias
    decoder = [fold_in(block.kv, block.norm_kv)[0] for block in network.decoder if isinstance(block, CrossBlock)]
    return Swap(
        queries=swap.q(query).to(dtype),
        first=first.to(dtype),
        out=swap.out.weight.to(dtype),
        kv=(swap.kv.weight.to(dtype), missing.to(dtype)),
        offset=offset,
        decoder_kv=torch.cat(decoder).to(dtype),
    )


def _cast(weights: tuple[Tensor, Tensor | None], dtype: torch.dtype) -> Linear:
    weight, bias = weights
    assert bias is not None  # a shift at least
    return weight.to(dtype), bias.to(dtype)
