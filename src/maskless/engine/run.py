"""A batch at work: its state on the device, and on CUDA each step captured as a graph and replayed.

A step whose rows all have the same counts has shapes that are known beforehand, so it can be captured: a step of a kind
that is new is computed at once, the second of its kind is captured, and later ones are replayed. A model whose encoded
tokens stay valid (ordered context, causal) has one kind of step for the whole run; a full context grows, so there each
step of a run is a kind of its own, and the second run is captured. Ragged steps are packed, without padding of rows;
where the context need not be encoded again they are rounded up in total, and so captured as well.

Shapes: B rows, L length, K steps, U targets, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.draw import DRAW, Filter, Truncation
from maskless.engine import kernels
from maskless.engine.backbones import Backbone, CausalBackbone, PartitionBackbone
from maskless.engine.batch_state import BatchState
from maskless.engine.graphs import Equal, Graphs, Rounded, Shape
from maskless.plans import Plan
from maskless.problems import Offsets

GRAIN = 64  # ragged steps are rounded up to so many tokens and targets


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What the buffers and graphs of a run are made for."""

    rows: int
    length: int
    keeps: bool  # encoded tokens are cached
    filter: Truncation | None  # None: any other, which may change with each call
    never: tuple[int, ...] = ()  # ids that are not drawn
    warm: bool = False  # some steps draw at temperature 2
    guided: bool = False


@dataclass(frozen=True, kw_only=True)
class RowsToDecide:
    """Rows to decide."""

    tokens: Tensor  # (B, L)
    plan: Plan
    keys: Tensor  # (B,)
    labels: Tensor  # (B,)
    weights: Tensor | None = None  # (B, K) of the guidance
    warm: Tensor | None = None  # (B, K) which steps draw at temperature 2

    def by_column(self, values: Tensor) -> Tensor:
        """The value of the step that decides each column.  (B, K) -> (B, L)"""
        return values.gather(1, self.plan.came().gather(1, self.plan.order).clamp_min(0))


class BatchRun:
    """One kind of batch at work: static buffers, a stream of its own, and the captured steps.

    With guidance the state holds every row twice: with its label, and B rows further on with the label dropped. What is
    decided is copied from the first half to the second.
    """

    def __init__(self, backbone: Backbone, kind: Kind, *, device: torch.device, graphs: bool):
        self.backbone, self.rows, self.guided = backbone, kind.rows, kind.guided
        columns, ragged = kind.length + backbone.lead, kind.rows > 1 and not isinstance(backbone, CausalBackbone)
        self.grain = min(GRAIN, columns // 2) if graphs and ragged and not kind.guided else 0
        # A spare row rounds ragged steps up, so that they can be captured too.
        every = 2 * kind.rows if kind.guided else kind.rows + (1 if self.grain else 0)
        self.state = BatchState.empty(every, columns, device)
        self.cache = backbone.new_cache(every, columns, kind.keeps)
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.u = torch.zeros(every, columns, dtype=wide, device=device)
        self.sharp = torch.ones(every, columns, device=device) if kind.warm else None
        self.weight = torch.zeros(every, columns, device=device) if kind.guided else None
        self.fixed = torch.zeros(kind.rows, columns, dtype=torch.bool, device=device)
        self.largest = torch.zeros((), dtype=torch.long, device=device)  # id that was drawn
        self.segments = torch.arange(every + 1, dtype=torch.int32, device=device)
        self.bounds = torch.zeros(2, every + 1, dtype=torch.int32, device=device)
        never = torch.tensor(kind.never, dtype=torch.long, device=device)
        self.bias = backbone.head.bias.index_fill(0, never, -torch.inf)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graphs = Graphs() if graphs else None

    def decided(self) -> Tensor:
        """The tokens, in the order of the plan; an error where none could be drawn.  -> (B, L)"""
        with torch.cuda.stream(self.stream):
            tokens = self.state.tokens[: self.rows, self.backbone.lead :].cpu()
            lg.check_drawn(int(self.largest), self.backbone.head.vocab)
            return tokens

    def begin(self, task: RowsToDecide, known: Tensor, filter: Filter) -> None:
        """Lay out the rows; what is given stands at the front, and the first `known` (B,) of each row count."""
        backbone, state, device, rows = self.backbone, self.state, self.state.known.device, self.rows
        self.filter, order, lead = filter, task.plan.order, backbone.lead

        def put(buffer: Tensor, values: Tensor) -> None:
            values = values.to(buffer.dtype).to(device)
            for half in range(2 if self.guided else 1):
                buffer[half * rows : (half + 1) * rows] = values

        put(state.tokens[:, lead:], task.tokens.gather(1, order))
        put(state.order[:, lead:], order + backbone.places)
        put(self.u[:, lead:], lg.uniforms(task.keys[:, None], order, DRAW))
        put(state.known, known + lead)
        self.largest.zero_()
        if self.sharp is not None and task.warm is not None:
            put(self.sharp[:, lead:], torch.where(task.by_column(task.warm), 0.5, 1.0))
        if self.weight is not None and task.weights is not None:
            put(self.weight[:, lead:], task.by_column(task.weights))
        if isinstance(backbone, PartitionBackbone | CausalBackbone) and lead:
            ids, positions = backbone.first(task.plan)
            put(state.tokens[:, 0], ids)
            put(state.order[:, 0], positions)
        if isinstance(backbone, CausalBackbone):
            columns = torch.arange(order.shape[1])
            fixed = (columns < task.plan.ends[:, :1]) | (columns >= task.plan.ends[:, -1:])
            self.fixed[:, lead:] = fixed.to(device)
        labels = task.labels
        if self.guided:
            assert backbone.dropped is not None
            labels = torch.cat([labels, torch.full_like(labels, backbone.dropped)])
        self.cache.norms.label(labels)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def step(self, starts: Tensor, ends: Tensor, context: Tensor, whole: bool, guided: bool = False) -> None:
        """Decide the columns from starts to ends; context (B,): how many of the last known tokens to encode.

        whole: they are all that is known. guided: with the second half of the rows.
        """
        with torch.cuda.stream(self.stream):
            self._take(starts, ends - starts, context, whole, 2 if guided else 1)

    def _take(self, starts: Tensor, counts: Tensor, context: Tensor, whole: bool, times: int) -> None:
        if _constant(counts) and _constant(starts) and _constant(context):
            self._play(Equal(times * self.rows, int(context[0]), int(counts[0]), whole))
        elif self.grain and not whole:
            self._play(self._rounded(context, counts))
        else:
            self._step(self._packed(context.repeat(times)), self._packed(counts.repeat(times)), whole)

    def _rounded(self, context: Tensor, counts: Tensor) -> Rounded:
        """Lay out a ragged step: the spare row takes what is missing to round sizes, so few shapes serve a run."""
        spans = []
        for bounds, lengths in zip(self.bounds, (context, counts), strict=True):
            ends = lengths.cumsum(0)
            total = int(ends[-1]) + (-int(ends[-1]) % self.grain)
            bounds[1:] = torch.cat([ends, torch.tensor([total])]).to(bounds)
            longest = max(int(lengths.max()), total - int(ends[-1]))
            spans.append((total, 1 << (longest - 1).bit_length()))
        self.state.known[self.rows :] = self.grain
        return Rounded(*spans)

    def _play(self, shape: Shape) -> None:
        if self.graphs is None:
            self._launch(shape)
        else:
            self.graphs.play(shape, self._launch)

    def _launch(self, shape: Shape) -> None:
        if isinstance(shape, Equal):
            context, targets = (self._regular(shape.rows, n) for n in (shape.context, shape.targets))
            self._step(context, targets, shape.whole)
        else:  # new offsets each time: they remember what they found out about their bounds, which change
            spans = zip(self.bounds, (shape.context, shape.targets), strict=True)
            context, targets = (Offsets(bounds, total, longest) for bounds, (total, longest) in spans)
            self._step(context, targets, False)

    def _regular(self, rows: int, length: int) -> Offsets:
        return Offsets(self.segments[: rows + 1] * length, rows * length, length, equal=True)

    def _packed(self, lengths: Tensor) -> Offsets:
        device = self.state.known.device
        return replace(Offsets.from_lengths(lengths), equal=False).map(lambda x: x.to(device))

    def _step(self, context: Offsets, targets: Offsets, whole: bool) -> None:
        state, rows = self.state, self.rows
        x, at = self.cache.forward(state, context, targets, whole)
        logits = kernels.logits_of(x, self.backbone.head.weight)
        if self.guided and len(targets) > rows:  # both halves have the same targets
            at = at[: len(at) // 2]
        self._land(logits, at)
        state.known[: len(targets)] += targets.longest if targets.equal else targets.bounds.diff()
        if self.guided:
            state.tokens[rows:] = state.tokens[:rows]
            state.known[rows:] = state.known[:rows]

    def _land(self, logits: Tensor, at: Tensor) -> None:
        """Draw the tokens at index (U,): logits (U, V), or (2U, V): with the labels, and after them without."""
        into = kernels.Landing(
            at=at,
            tokens=self.state.tokens.view(-1),
            largest=self.largest,  # looked at in the end: a step waits for nothing
            vocab=self.backbone.head.vocab,
            u=self.u.view(-1),
            sharp=None if self.sharp is None else self.sharp.view(-1),
            weight=self.weight.view(-1) if self.weight is not None and len(logits) > len(at) else None,
            # a causal model reads along where the prompt is longer than the shortest
            fixed=self.fixed.view(-1) if isinstance(self.backbone, CausalBackbone) else None,
        )
        if kernels.fuses(logits, self.filter):
            assert isinstance(self.filter, Truncation)
            kernels.draw(logits, self.bias, self.filter, into)
            return
        u, sharp, weight = (None if x is None else x.index_select(0, at) for x in (into.u, into.sharp, into.weight))
        assert u is not None
        rows, positions = at // len(self.state.columns), self.state.order.view(-1)[at] - self.backbone.places
        combined = kernels.combine(logits, self.bias, sharp, weight)[:, : into.vocab]
        drawn = lg.draw(self.filter(combined, rows, positions), u)
        torch.maximum(self.largest, drawn.amax(), out=self.largest)
        drawn.clamp_(max=into.vocab - 1)
        if into.fixed is not None:
            drawn = torch.where(into.fixed[at], into.tokens[at], drawn)
        into.tokens.index_copy_(0, at, drawn)


def _constant(x: Tensor) -> bool:
    return bool((x == x[0]).all())
