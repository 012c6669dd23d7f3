"""The layers that the networks are made of: norm, modulation, self- and cross-attention blocks, and the output head.

The layout follows the released networks to the last bias, so that their checkpoints load. The modulations (adaLN) are
learned functions of a condition. For text the condition is one learned constant, so the modulations are constants and
are folded into the linears beside them; for images each problem has the condition of its class, and its tokens have
the modulations of their problem. Which of the two it is shows in the number of rows: one, or more.

Shapes: S problems, T tokens of any kind, U targets, D width, E width of an output, C condition width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.nn.attention import KERNELS, Stairs, has_kernels, rotary_attention
from maskless.problems import Offsets

Weights = tuple[Tensor, Tensor | None]
Operands = tuple[Tensor, Tensor, Tensor | None]  # of a linear: input, weight and bias
Read = Callable[["Head", Tensor, Tensor], Tensor]


class Norm(nn.Module):
    """The weight of a layer norm without bias. It is never applied to tokens: the linear that follows takes it in."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def normalise(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 along the width, computed in float32.  (T, D) -> (T, D)"""
    return F.layer_norm(x.float(), x.shape[-1:]).to(x.dtype)


def lowered(x: Tensor) -> Tensor:
    """x in the type of products: under autocast bfloat16, else its own.

    The stream of a network begins so. Every pass over it then moves half the bytes, and the engine keeps it so too.
    """
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Zeros in place of a share of x, the rest scaled up. On CUDA chance is a hash of the index and of a drawn seed.

    torch's own random numbers cost more there than everything else in the pass they join.  (T, D) -> (T, D)
    """
    if not training or rate == 0:
        return x
    if not x.is_cuda:
        return F.dropout(x, rate)
    seed = torch.randint(1 << 31, (1,), device=x.device, dtype=torch.int32)
    return torch.where(kept(x.shape, rate, seed), x / (1 - rate), 0)


def kept(shape: torch.Size, rate: float, seed: Tensor) -> Tensor:
    """Which elements a dropout keeps: those whose hashed index is large enough.  seed (1,) int32 -> bool

    A Weyl sequence that begins at the seed, through the last rounds of MurmurHash3; multiplication wraps around.
    """
    x = (torch.arange(shape.numel(), dtype=torch.int32, device=seed.device) + seed) * -1640531535  # 0x9e3779b1
    for shift, factor in ((16, -2048144789), (13, -1028477387)):  # 0x85ebca6b and 0xc2b2ae35
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return (((x ^ (x >> 16)) & 0x7FFFFFFF) >= int(rate * (1 << 31))).view(shape)


def fold_in(linear: nn.Linear, norm: Norm, shift: Tensor | None = None, scale: Tensor | None = None) -> Weights:
    """Weight and bias of linear(x * norm * (1 + scale) + shift) as one linear of the normalised x.

    The modulations are constants, so folding them is exact; it spares a pass over all tokens in the forward pass and
    a sum over all tokens for each of them in the backward pass.
    """
    assert shift is None or len(shift) == 1, "only a constant can be folded"
    weight = linear.weight * (norm.weight if scale is None else norm.weight * (1 + scale))
    return weight, linear.bias if shift is None else linear_row(shift, linear)[0]


def linear_row(x: Tensor, linear: nn.Linear) -> Tensor:
    """linear(x) of a single row, in float32: on a GPU a pass over the weight, where a product would be many small ones.

    (1, D) -> (1, E)
    """
    product = (linear.weight * x).sum(1) if x.is_cuda else F.linear(x, linear.weight)[0]
    return (product if linear.bias is None else product + linear.bias)[None]


def fold_out(linear: nn.Linear, gate: Tensor) -> Weights:
    """Weight and bias of gate * linear(x) as one linear."""
    assert len(gate) == 1, "only a constant can be folded"
    return gate[0, :, None] * linear.weight, None if linear.bias is None else gate[0] * linear.bias


def modulated(y: Tensor, linear: nn.Linear, norm: Norm, shift: Tensor, scale: Tensor) -> Operands:
    """What F.linear takes for linear(y * norm * (1 + scale) + shift), where y is normalised.

    One row of shift and scale is for all tokens, and is folded; else each token has its own.  (T, D), 2 x (1 or T, D)
    """
    if len(shift) == 1:
        return y, *fold_in(linear, norm, shift, scale)
    return y * (norm.weight * (1 + scale)) + shift, linear.weight, linear.bias


def gated(x: Tensor, linear: nn.Linear, gate: Tensor) -> Tensor:
    """gate * linear(x), with one row of the gate for all tokens, or one for each.  (T, D), (1 or T, E) -> (T, E)"""
    return F.linear(x, *fold_out(linear, gate)) if len(gate) == 1 else gate * linear(x)


def spread(rows: Tensor, offsets: Offsets) -> Tensor:
    """A row for each token from one for each of its problems; a single row stays one.  (1 or S, D) -> (1 or T, D)"""
    if len(rows) == 1:
        return rows
    if offsets.equal:  # the gradient is then a plain sum
        return rows[:, None].expand(-1, offsets.longest, -1).flatten(0, 1)
    if has_kernels(rows):
        return _Spread.apply(rows, offsets.owner, offsets.bounds)
    return rows.index_select(0, offsets.owner)


class _Spread(torch.autograd.Function):
    """Rows by index. torch's gradient would add up the tokens of a problem in bfloat16, by atomic sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, owner: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(bounds)
        return rows.index_select(0, owner)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return KERNELS.sum_segments(g, *ctx.saved_tensors), None, None


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh formula; compiled for a GPU it is faster as what it is equal to, x * sigmoid(2u)."""
    if not x.is_cuda:
        return F.gelu(x, approximate="tanh")
    y = x.float()
    return (y * torch.sigmoid(1.5957691216057308 * (y + 0.044715 * y**3))).to(x.dtype)  # 2 sqrt(2 / pi)


class Normalised(nn.Module):
    """`normalise` as a module, so that it can be compiled as one."""

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x)


class Embedding(nn.Module):
    """Token vectors, initialised as the released networks do (uniform, variance 1/(3D))."""

    def __init__(self, vocab: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, width))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return lowered(F.embedding(tokens, self.weight))


class ConstantCondition(nn.Module):
    """The condition of a text network: a small network of the constant time 0, so one learned vector.  -> (1, C)"""

    time: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.input = nn.Linear(256, width)
        self.output = nn.Linear(width, width)
        self.register_buffer("time", (torch.arange(256) < 128).float()[None], persistent=False)  # cos 0, then sin 0

    def forward(self, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            raise ValueError("labels were given to a network without classes: expected none")
        return F.silu(self.output(F.silu(self.input(self.time.to(self.input.weight.dtype)))))


class ClassCondition(nn.Module):
    """The condition of each problem: a learned vector of its class. The last row stands for a label that was dropped.

    labels (S,) -> (S, C); no labels: all are dropped, so one row is enough -> (1, C)
    """

    def __init__(self, classes: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(classes + 1, width))

    def forward(self, labels: Tensor | None = None) -> Tensor:
        return self.weight[-1:] if labels is None else F.embedding(labels, self.weight)


class Modulation(nn.Module):
    """Shifts, scales and gates from the condition; all zero at first.

    One row for each of the condition, or with offsets for each token.  (1 or S, C) -> n x (1 or T, D)
    """

    def __init__(self, condition: int, width: int, parts: int):
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(condition, parts * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, condition: Tensor, offsets: Offsets | None = None) -> tuple[Tensor, ...]:
        rows = linear_row(condition, self.linear) if len(condition) == 1 else self.linear(condition)
        return (rows if offsets is None else spread(rows, offsets)).chunk(self.parts, -1)


class MLP(nn.Module):
    """The normalised x, modulated, through four times the width and back, gated.  (T, D) -> (T, D)"""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, norm: Norm, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        hidden = gelu(F.linear(*modulated(normalise(x), self.up, norm, shift, scale)))
        return gated(hidden, self.down, gate)


class SelfBlock(nn.Module):
    """Tokens of a segment attend to one another, then an MLP.  (T, D) -> (T, D)

    causal: a token attends only to itself and to those before it in its segment.
    """

    def __init__(self, width: int, heads: int, condition: int, dropout: float, causal: bool = False):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = MLP(width)
        self.modulation = Modulation(condition, width, 6)

    def forward(self, x: Tensor, offsets: Offsets, rope: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, *modulation2 = self.modulation(condition, offsets)
        qkv = F.linear(*modulated(normalise(x), self.qkv, self.norm1, shift1, scale1))
        qkv = qkv.unflatten(1, (3, self.heads, -1))
        a = rotary_attention(qkv, None, (offsets, offsets), (rope, rope), causal=self.causal)
        x = x + dropout(gated(a.flatten(1), self.out, gate1), self.dropout, self.training)
        return x + dropout(self.mlp(x, self.norm2, *modulation2), self.dropout, self.training)


class CrossBlock(nn.Module):
    """Targets attend to the encoded context of their problem, then an MLP; no attention among targets.

    x (U, D) targets, memory (T, D) normalised encoder output -> (U, D)
    """

    def __init__(self, width: int, heads: int, condition: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_q, self.norm_kv, self.norm2 = Norm(width), Norm(width), Norm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = MLP(width)
        self.modulation = Modulation(condition, width, 6)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        ends: tuple[Offsets, Offsets],
        ropes: tuple[Tensor, Tensor],
        condition: Tensor,
        stairs: Stairs | None = None,
    ) -> Tensor:
        """ends, ropes: of the targets and of the context; stairs: how much of it each target sees."""
        shift1, scale1, gate1, *modulation2 = self.modulation(condition, ends[0])
        q = F.linear(*modulated(normalise(x), self.q, self.norm_q, shift1, scale1)).unflatten(1, (1, self.heads, -1))
        kv = F.linear(memory, *fold_in(self.kv, self.norm_kv)).unflatten(1, (2, self.heads, -1))
        a = rotary_attention(q, kv, ends, ropes, stairs=stairs)
        x = x + dropout(gated(a.flatten(1), self.out, gate1), self.dropout, self.training)
        return x + dropout(self.mlp(x, self.norm2, *modulation2), self.dropout, self.training)


class Head(nn.Module):
    """Logits from hidden states; zero at first, and -inf for ids that are never predicted.

    x (U, D); the condition has one row, or one for each target -> (U, V)
    """

    def __init__(self, width: int, vocab: int, condition: int, never: int | None = None):
        super().__init__()
        self.never = never
        self.norm = Norm(width)
        self.linear = nn.Linear(width, vocab)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.modulation = Modulation(condition, width, 2)

    def operands(self, x: Tensor, condition: Tensor) -> Operands:
        """Input, weight and bias of the one linear that gives the logits.  (U, D), (1 or U, C)"""
        return modulated(normalise(x), self.linear, self.norm, *self.modulation(condition))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        logits = F.linear(*self.operands(x, condition))
        if self.never is None:
            return logits
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return logits.masked_fill(ids == self.never, -torch.inf)


def read_logits(head: Head, x: Tensor, condition: Tensor) -> Tensor:
    return head(x, condition)


def open_gates(network: nn.Module) -> None:
    """First weights that let gradients through: gates 1, a small random head, token vectors of unit variance.

    The released networks start with closed gates and a zero head, so at first nothing but the head learns, and a
    Partition Transformer stays long on the plateau where it ignores its context. The function space is the same.
    """
    for module in network.modules():
        if isinstance(module, Modulation) and module.parts == 6:
            with torch.no_grad():
                module.linear.bias.view(6, -1)[[2, 5]] = 1.0
        elif isinstance(module, Head):
            nn.init.normal_(module.linear.weight, std=0.02)
        elif isinstance(module, Embedding):
            nn.init.normal_(module.weight)
