"""The Partition Transformer: an encoder over the context, GroupSwap, and a decoder at the targets.  PGM, Sec. 4

It never processes a mask token: the encoder sees only known tokens, the decoder works only at the targets. For images a
class drives the modulations of each problem, and a learned register stands before each context.

Shapes: S problems, T context tokens, U targets, D width, V vocabulary, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskless.nn.attention import Stairs, rotary_attention, rotary_table
from maskless.nn.blocks import (
    ClassCondition,
    ConstantCondition,
    CrossBlock,
    Embedding,
    Head,
    Normalised,
    Read,
    SelfBlock,
    read_logits,
    spread,
)
from maskless.nn.sizes import check_fields, check_heads
from maskless.problems import Offsets, Problems, Seen

QUERIES = ("position", "mean", "logsumexp")
CONTEXTS = ("full", "ordered")
SWAPS = ("released", "residual", "gated")
ROPES = ("1d", "2d")
NEAREST = 16  # neighbours on a side, at most


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Sizes and kinds of a Partition Transformer."""

    vocab: int  # rows of the embedding and of the head
    length: int  # positions
    width: int = 768
    heads: int = 12
    encoder: int = 6  # layers
    decoder: int = 6
    condition: int = 128  # width of what drives the modulations: a constant, or the vector of a class
    dropout: float = 0.1
    queries: str = "position"  # what GroupSwap asks with: the position, or also an aggregate of the context
    swap: str = "released"  # what GroupSwap returns: what it found; "residual": and its query; "gated": a share of it
    neighbours: int = 0  # on each side of a target (of a cell, with rope 2d): encoded tokens that join its first state
    context: str = "full"  # "ordered": a context token attends only to those known before it, so it can be cached
    never: int | None = None  # an id that is never predicted (released models keep a row for a mask)
    classes: int | None = None  # labels 0 to classes - 1, and `classes` for a dropped one; None: no labels (text)
    registers: bool = False  # a learned vector stands before each context
    grid: tuple[int, int] | None = None  # rows and columns of an image, whose tokens follow a BOS row by row
    rope: str = "1d"  # positions that attention knows: "2d" is by row and column of the grid

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.heads)
        if not 0 <= self.neighbours <= NEAREST:
            raise ValueError(f"neighbours {self.neighbours} is out of range: expected 0 (none) to {NEAREST}")
        for what, known in (("queries", QUERIES), ("swap", SWAPS), ("context", CONTEXTS), ("rope", ROPES)):
            if getattr(self, what) not in known:
                raise ValueError(f"unknown {what} {getattr(self, what)!r}: expected one of {', '.join(known)}")
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))  # JSON has no tuples
            rows, columns = self.grid
            if self.length != 1 + rows * columns:
                raise ValueError(f"length {self.length} does not hold a BOS and a grid of {rows} x {columns} tokens")
        if self.rope == "2d" and (self.grid is None or (self.width // self.heads) % 4):
            raise ValueError("rope 2d needs a grid, and heads of a width that is a multiple of 4")


class PartitionTransformer(nn.Module):
    """Logits at the targets of each problem, from the tokens of its context alone."""

    rope: Tensor

    def __init__(self, config: PartitionConfig):
        super().__init__()
        self.config = config
        D, C, heads, dropout = config.width, config.condition, config.heads, config.dropout
        self.embedding = Embedding(config.vocab, D)
        self.condition = ConstantCondition(C) if config.classes is None else ClassCondition(config.classes, C)
        self.registers = Registers(D) if config.registers else None
        ordered = config.context == "ordered"
        self.encoder = nn.ModuleList(SelfBlock(D, heads, C, dropout, causal=ordered) for _ in range(config.encoder))
        self.normalised = Normalised()
        reserved = Registers.PLACES if config.registers else 0
        self.swap = GroupSwap(D, heads, reserved + config.length, config.queries, config.swap)
        near = near_cells if config.rope == "2d" else near_places
        table = near(config, reserved) if config.neighbours else None
        self.neighbours = None if table is None else Neighbours(D, table)
        self.decoder = nn.ModuleList(CrossBlock(D, heads, C, dropout) for _ in range(config.decoder))
        self.head = Head(D, config.vocab, C, config.never)
        if config.rope == "2d" and config.grid is not None:
            rope = rotary_grid(*config.grid, D // heads, 1 + reserved)
        else:
            rope = rotary_table(reserved + config.length, D // heads)
        self.register_buffer("rope", rope, persistent=False)

    def forward(self, problems: Problems, read: Read = read_logits) -> Tensor:
        """Problems -> (U, V); read: (head, x, condition) -> what is asked for, where training puts its loss."""
        condition = self.condition(problems.labels)  # (1 or S, C)
        x = self.states(problems, condition)
        return read(self.head, x, spread(condition, problems.target_offsets))

    def states(self, problems: Problems, condition: Tensor) -> Tensor:
        """What the head reads at the targets.  -> (U, D)"""
        memory, offsets = self.embedding(problems.tokens), problems.offsets  # (T, D)
        positions, targets, seen = problems.positions, problems.targets, problems.seen
        if seen is not None:
            self.check_chain()
        if self.registers is not None:
            memory, positions, offsets = self.registers(memory, positions, offsets)
            targets = targets + Registers.PLACES
            seen = None if seen is None else seen.map(lambda counts: counts + 1)
        stairs = None if seen is None else Stairs.of(seen, problems.target_offsets, offsets)
        ropes, ends = (self.rope[targets], self.rope[positions]), (problems.target_offsets, offsets)
        if len(condition) > 1:  # layers look up the problem of each token; a compiled one cannot fill that cache itself
            _ = [each.owner for each in ends]
        for block in self.encoder:
            memory = block(memory, offsets, ropes[1], condition)
        x = self.swap(targets, memory, ends, ropes, stairs).to(memory.dtype)  # (U, D)
        memory = self.normalised(memory)  # once for all decoder layers: their norms share the statistics
        if self.neighbours is not None:
            x = x + self.neighbours(memory, positions, targets, ends, seen)
        for block in self.decoder:
            x = block(x, memory, ends, ropes, condition, stairs)
        return x

    def check_chain(self) -> None:
        """Raise a ValueError where a target would learn of tokens that it must not see."""
        for what, has, needs in (
            ("context", self.config.context, "ordered"),
            ("queries", self.config.queries, "position"),
        ):
            if has != needs:
                raise ValueError(f"a chain with {what} {has!r} would see what it predicts: expected {needs!r}")


def chains(network: object) -> bool:
    """Whether a network answers chains: all conditionals of an order in one pass."""
    if not isinstance(network, PartitionTransformer):
        return False
    return network.config.context == "ordered" and network.config.queries == "position"


class Registers(nn.Module):
    """Puts a learned vector before the tokens of each context, and moves their positions up to make room.

    There are two, as in the released networks, where they are the first two tokens of a sequence and in different
    groups. A context that holds the sequence's first token (BOS) has vector 1, at position 1; any other has vector 0,
    at position 0. So no context is empty here.  PGM, Sec. 5.2
    """

    PLACES = 2  # positions that belong to registers

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(self.PLACES, width))

    def forward(self, x: Tensor, positions: Tensor, offsets: Offsets) -> tuple[Tensor, Tensor, Offsets]:
        """x (T, D), positions (T,), offsets of S contexts -> (T+S, D), (T+S,), offsets of S longer contexts"""
        starts = torch.zeros_like(offsets.lengths).index_add(0, offsets.owner, (positions == 0).long())
        first = starts.clamp(max=1)  # (S,) which register, and where it stands
        grown = offsets.grown()
        fronts, others = grown.bounds[:-1].long(), torch.arange(len(x), device=x.device) + offsets.owner + 1

        def prepend(front: Tensor, rest: Tensor) -> Tensor:
            empty = rest.new_empty(grown.total, *rest.shape[1:])
            return empty.index_copy(0, fronts, front).index_copy(0, others, rest)

        registers = self.weight.index_select(0, first).to(x.dtype)
        return prepend(registers, x), prepend(first, positions + self.PLACES), grown


class GroupSwap(nn.Module):
    """What stands at the targets first: cross-attention from queries that know only where they are.  PGM, Sec. 4.1

    With an aggregate, the queries also know a summary of the encoded context. (The paper adds the aggregate after the
    projection, the released code before the norm, as here.) No MLP: the output is the decoder's input.

    kind: the released networks return only what was found, so the decoder must find out again from it where it is,
    and cannot as long as there is one token to attend to: whatever is asked, that is the answer. "residual" returns the
    query as well. "gated" learns how much of it, starting at nothing (docs/results.md).
    """

    places: Tensor

    def __init__(self, width: int, heads: int, length: int, queries: str, kind: str):
        super().__init__()
        self.heads, self.kind = heads, kind
        self.aggregate = {"position": None, "mean": segment_mean, "logsumexp": segment_logsumexp}[queries]
        self.start = nn.Parameter(torch.randn(1, width))
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.zeros(width)) if kind == "gated" else None
        self.register_buffer("places", sinusoids(length, width), persistent=False)

    def forward(
        self,
        targets: Tensor,
        memory: Tensor,
        ends: tuple[Offsets, Offsets],
        ropes: tuple[Tensor, Tensor],
        stairs: Stairs | None = None,
    ) -> Tensor:
        """targets (U,), memory (T, D); ends, ropes, stairs: as in `CrossBlock` -> (U, D)"""
        query = self.start + self.places[targets]
        if self.aggregate is not None:
            query = query + self.aggregate(memory, ends[1])[ends[0].owner]
        query = self.norm(query)
        q = self.q(query).unflatten(1, (1, self.heads, -1))
        kv = self.kv(memory).unflatten(1, (2, self.heads, -1))
        a = rotary_attention(q, kv, ends, ropes, stairs=stairs)
        found: Tensor = self.out(a.flatten(1))
        return found if (own := self.kept(query)) is None else own + found

    def kept(self, query: Tensor) -> Tensor | None:
        """What is returned of the query.  (U, D) -> (U, D)"""
        if self.gain is not None:
            return self.gain * query
        return query if self.kind == "residual" else None


class Neighbours(nn.Module):
    """What is encoded on both sides of each target joins its first state, where it is known. Nothing does at first.

    A causal model predicts a token from the state of the one before it. Here a target has to find that one by
    attention, first of all; this hands it over (docs/results.md).
    """

    near: Tensor

    def __init__(self, width: int, near: Tensor):
        """near (places, sides): where the neighbours of each place stand; `places` where there is none."""
        super().__init__()
        self.linear = nn.Linear(width, near.shape[1] * width, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.register_buffer("near", near, persistent=False)

    def forward(
        self, memory: Tensor, positions: Tensor, targets: Tensor, ends: tuple[Offsets, Offsets], seen: Seen | None
    ) -> Tensor:
        """memory (T, D) normalised, at positions (T,); targets (U,); ends: offsets of targets and memory -> (U, D)"""
        owners, context = ends[0].owner, ends[1]
        if not len(memory):
            return memory.new_zeros(len(targets), memory.shape[1])
        places, sides = self.near.shape
        table = positions.new_full((len(context), places + 1), -1)  # which context token stands where, and nowhere
        table[context.owner, positions] = torch.arange(len(memory), device=memory.device)
        near, handed = self.near[targets], self.linear(memory)  # (U, sides), (T, sides * D)
        total = handed.new_zeros(len(targets), memory.shape[1])
        for side, states in enumerate(handed.chunk(sides, 1)):
            there = table[owners, near[:, side]]
            known = there >= 0
            if seen is not None:  # of the tokens before it alone
                known &= there - context.bounds[:-1].long()[owners] < seen.counts
            total = total + torch.where(known[:, None], states.index_select(0, there.clamp_min(0)), 0)
        return total


def segment_mean(x: Tensor, offsets: Offsets) -> Tensor:
    """The mean of each segment, 0 for an empty one.  (T, D) -> (S, D)"""
    total = x.new_zeros(len(offsets), x.shape[1], dtype=torch.float32).index_add(0, offsets.owner, x.float())
    return total / offsets.lengths.clamp_min(1)[:, None]


def segment_logsumexp(x: Tensor, offsets: Offsets) -> Tensor:
    """The log-sum-exp of each segment per channel, 0 for an empty one.  (T, D) -> (S, D)"""
    x, index = x.float(), offsets.owner[:, None].expand_as(x)
    top = x.detach().new_full((len(offsets), x.shape[1]), -torch.inf).scatter_reduce(0, index, x.detach(), "amax")
    top = top.masked_fill(top.isinf(), 0.0)
    total = x.new_zeros(len(offsets), x.shape[1]).index_add(0, offsets.owner, (x - top[offsets.owner]).exp())
    empty = (offsets.lengths == 0)[:, None]
    return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, 0.0)


def near_places(config: PartitionConfig, reserved: int) -> Tensor:
    """Neighbours in a line: so many places before each and after it.  -> (places, 2 * neighbours)"""
    n, places = config.neighbours, reserved + config.length
    sides = torch.tensor([side for side in range(-n, n + 1) if side])
    near = torch.arange(places)[:, None] + sides
    return torch.where((near >= 0) & (near < places), near, places)


def near_cells(config: PartitionConfig, reserved: int) -> Tensor:
    """Neighbours in a grid: so many cells above each, below it, left and right of it.  -> (places, 4 * neighbours)"""
    assert config.grid is not None
    rows, columns = config.grid
    places, before = reserved + config.length, reserved + 1  # BOS
    cell, away = torch.arange(rows * columns)[:, None], torch.arange(1, config.neighbours + 1)
    row, column = cell // columns, cell % columns
    down = torch.cat([-away, away, 0 * away, 0 * away])
    right = torch.cat([0 * away, 0 * away, -away, away])
    inside = (row + down >= 0) & (row + down < rows) & (column + right >= 0) & (column + right < columns)
    near = torch.where(inside, before + cell + down * columns + right, places)
    return F.pad(near, (0, 0, before, 0), value=places)


def rotary_grid(rows: int, columns: int, width: int, before: int) -> Tensor:
    """As `rotary_table`, where half of the frequencies rotate by row and half by column.  -> (n, 2, d/2)

    The tokens stand at rows and columns from 1 on; the `before` ones (registers, BOS) are all at row 0 and column 0.
    """
    cell = torch.arange(rows * columns)
    row, column = (F.pad(1 + axis, (before, 0)) for axis in (cell // columns, cell % columns))
    tables = rotary_table(1 + rows, width // 2)[row], rotary_table(1 + columns, width // 2)[column]
    return torch.cat(tables, -1)


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed position vectors: cosines, then sines, of i / 10000^(2j/D).  -> (L, D)  PGM, Sec. 4.1"""
    j = torch.arange(width // 2, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10_000 ** (2 * j / width)
    return torch.cat([angle.cos(), angle.sin()], 1).float()
