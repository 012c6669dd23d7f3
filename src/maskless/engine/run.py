"""The engine: folded weights, a board on the device, and on CUDA each step captured as a graph and replayed.

A step whose rows all have the same counts has shapes that are known beforehand, so it can be captured: a step of a kind
that is new is computed at once, the second of its kind is captured, and later ones are replayed. A model whose encoded
tokens stay valid (ordered context, causal) has one kind of step for the whole run; a full context grows, so there each
step of a run is a kind of its own, and the second run is captured. Ragged steps are packed, without padding of rows;
where the context need not be encoded anew they are rounded up in total, and so captured as well.

Shapes: B rows, L length, K steps, U targets, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from maskless import logits as lg
from maskless.engine import kernels
from maskless.engine.bodies import Board, Body, CausalBody, PartitionBody, fold
from maskless.nn import device_of
from maskless.nn.causal import CausalTransformer
from maskless.nn.masked import MaskedTransformer
from maskless.nn.partition import PartitionTransformer
from maskless.problems import Offsets
from maskless.sampling import DRAW, Filter, Plan, Step, Truncation

SHAPES = 4  # how many sizes of batch an engine keeps buffers and graphs for
GRAIN = 64  # ragged steps are rounded up to so many tokens and targets


def serves(network: nn.Module) -> bool:
    """Whether the engine can compute this network; the plain loop takes the others."""
    if any(hasattr(p, "device_mesh") for p in network.parameters()):
        return False  # sharded over processes: only its own forward can gather the weights
    if isinstance(network, PartitionTransformer):
        return network.config.queries == "position"  # an aggregate of the context is no table
    return isinstance(network, CausalTransformer) or (
        isinstance(network, MaskedTransformer) and network.config.always_full
    )


class Engine:
    """Samples from a network as `sampling.sample` does, from a copy of its weights.

    precision: by default bfloat16 on CUDA and float32 elsewhere. graphs: capture and replay steps, on CUDA.
    """

    def __init__(self, network: nn.Module, *, precision: torch.dtype | None = None, graphs: bool = True):
        if not serves(network):
            raise ValueError(f"the engine does not serve this network: {type(network).__name__}")
        self.device = device_of(network)
        self.dtype = precision or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.body = fold(network, self.dtype)
        self.graphs = graphs and self.device.type == "cuda"
        self.runs: OrderedDict[tuple[object, ...], Run] = OrderedDict()

    def sample(
        self,
        tokens: Tensor,
        plan: Plan,
        keys: Tensor,
        *,
        filter: Filter | None = None,
        refresh: int = 1,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Decide tokens (B, L) as planned, in place; on_step sees each step as it is decided.

        refresh: a Partition Transformer with full context encodes all that is known in every step. With refresh=r it
        does so only in every r-th, and otherwise encodes the new tokens beside the old, which is no longer exact.
        """
        if refresh < 1:
            raise ValueError(f"refresh {refresh} is out of range: expected 1 or more")
        if refresh > 1 and not (isinstance(self.body, PartitionBody) and not self.body.keeps):
            raise ValueError(f"refresh {refresh} goes with the full context of a Partition Transformer only")
        filter = filter or Truncation()
        keeps = self.body.keeps or refresh > 1
        run = self._run(tokens.shape, filter, keeps)
        encoded = torch.zeros_like(plan.ends[:, 0])  # how many tokens of each row are in the cache
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            run.begin(tokens, plan, keys, filter)
            for number in range(plan.steps):
                starts, ends = run.ends[:, number], run.ends[:, number + 1]
                busy = ends > starts
                if not bool(busy.any()):
                    continue
                if not self.body.keeps and number % refresh == 0:
                    encoded = torch.zeros_like(encoded)
                run.step(starts, ends, torch.where(busy, starts - encoded, 0), bool((encoded[busy] == 0).all()))
                encoded = torch.where(busy, starts, encoded) if keeps else encoded
                if on_step is not None:
                    on_step(_decided(number, plan, run.decided()))
        tokens.scatter_(1, plan.order, run.decided())

    def close(self) -> None:
        """Give the memory back."""
        self.runs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, shape: torch.Size, filter: Filter, keeps: bool) -> Run:
        """Buffers and graphs for a size of batch; the least recently used ones go."""
        rows, length = shape
        key = (rows, length, keeps, filter if isinstance(filter, Truncation) else None)
        if key not in self.runs:
            while len(self.runs) >= SHAPES:
                self.runs.popitem(last=False)
            graphs = self.graphs and isinstance(filter, Truncation)  # another filter may change with each call
            self.runs[key] = Run(self.body, rows, length, keeps, device=self.device, graphs=graphs)
        self.runs.move_to_end(key)
        return self.runs[key]


class Run:
    """One size of batch at work: static buffers, and the captured steps."""

    def __init__(self, body: Body, rows: int, length: int, keeps: bool, *, device: torch.device, graphs: bool):
        self.body, self.rows = body, rows
        self.lead = 1 if isinstance(body, CausalBody) else 0  # slots before the first token
        slots = length + self.lead
        self.grain = min(GRAIN, slots // 2) if graphs and rows > 1 and not self.lead else 0
        spare = 1 if self.grain else 0  # a row that rounds ragged steps up, so that they can be captured too
        self.board = Board.empty(rows + spare, slots, device)
        self.memory = body.open(rows + spare, slots, keeps)
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.u = torch.zeros(rows + spare, slots, dtype=wide, device=device)
        self.fixed = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.segments = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.bounds = torch.zeros(2, rows + spare + 1, dtype=torch.int32, device=device)
        self.graphs = _Graphs(device) if graphs else None

    def decided(self) -> Tensor:
        """The tokens, in the order of the plan.  -> (B, L)"""
        return self.board.tokens[: self.rows, self.lead :].cpu()

    def begin(self, tokens: Tensor, plan: Plan, keys: Tensor, filter: Filter) -> None:
        """Lay out the rows; what is given stands at the front."""
        lead, board, device = self.lead, self.board, self.board.at.device
        self.filter = filter
        order = plan.order
        u = lg.uniforms(keys[:, None], order, DRAW)
        board.tokens[: self.rows, lead:] = tokens.gather(1, order).to(device)
        board.order[: self.rows, lead:] = order.to(device) + lead
        self.u[: self.rows, lead:] = u.to(self.u.dtype).to(device)
        self.ends = plan.ends + lead
        if isinstance(self.body, CausalBody):
            board.tokens[:, 0] = self.body.start
            columns = torch.arange(order.shape[1] + lead)
            fixed = (columns < self.ends[:, :1]) | (columns >= self.ends[:, -1:])
            self.fixed.copy_(fixed)
            first = self.ends.min(0).values  # all rows read along, also those whose prompts are longer
            self.ends = torch.arange(int(first[0]), int(self.ends.max()) + 1).expand(len(order), -1)
        board.at[: self.rows] = self.ends[:, 0].to(device, torch.int32)

    def step(self, starts: Tensor, ends: Tensor, context: Tensor, whole: bool) -> None:
        """Decide the slots from starts to ends; context (B,): how many of the last known tokens to encode."""
        counts = ends - starts
        if _constant(counts) and _constant(starts) and _constant(context):
            n, k = int(context[0]), int(counts[0])
            self._play(("equal", n, k, whole), lambda: self._step(self._regular(n), self._regular(k), whole))
        elif self.grain and not whole:
            self._rounded(context, counts)
        else:
            self._step(self._packed(context), self._packed(counts), whole)

    def _rounded(self, context: Tensor, counts: Tensor) -> None:
        """A ragged step: the spare row takes what is missing to round sizes, so few kinds of step serve a run."""
        spans = []
        for bounds, lengths in zip(self.bounds, (context, counts), strict=True):
            ends = lengths.cumsum(0)
            total = int(ends[-1]) + (-int(ends[-1]) % self.grain)
            bounds[1:] = torch.cat([ends, torch.tensor([total])]).to(bounds)
            longest = max(int(lengths.max()), total - int(ends[-1]))
            spans.append((bounds, total, 1 << (longest - 1).bit_length()))
        self.board.at[self.rows :] = self.grain
        self._play(
            ("rounded", *(span[1:] for span in spans)),
            lambda: self._step(Offsets(*spans[0]), Offsets(*spans[1]), False),
        )

    def _play(self, kind: tuple[object, ...], step: Callable[[], None]) -> None:
        if self.graphs is None:
            step()
        else:
            self.graphs.play(kind, step)

    def _regular(self, length: int) -> Offsets:
        return Offsets(self.segments * length, self.rows * length, length, equal=True)

    def _packed(self, lengths: Tensor) -> Offsets:
        device = self.board.at.device
        return replace(Offsets.from_lengths(lengths), equal=False).map(lambda x: x.to(device))

    def _step(self, context: Offsets, targets: Offsets, whole: bool) -> None:
        board, head = self.board, self.body.head
        x, at = self.memory(board, context, targets, whole)
        logits = kernels.logits_of(kernels.normalise(x, head.offset), head.weight)
        drawn = self._draw(logits, at)
        if self.lead:  # a causal model reads along where the prompt is longer than the shortest
            drawn = torch.where(self.fixed.view(-1)[at], board.at_index(at)[1], drawn)
        board.tokens.view(-1).index_copy_(0, at, drawn)
        board.at[: len(targets)] += targets.longest if targets.equal else targets.bounds.diff()

    def _draw(self, logits: Tensor, at: Tensor) -> Tensor:
        u, head, filter = self.u.view(-1).index_select(0, at), self.body.head, self.filter
        if isinstance(filter, Truncation) and filter.top_k is None and filter.top_p in (None, 1):
            return kernels.draw(logits, head.bias, filter.temperature, u)
        rows, positions = at // len(self.board.columns), self.board.at_index(at)[0] - self.lead
        return lg.draw(filter((logits + head.bias)[:, : head.vocab], rows, positions), u)


class _Graphs:
    """Captured steps: the first of a kind is computed, the second captured, the others replayed."""

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.seen: set[tuple[object, ...]] = set()
        self.captured: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}

    def play(self, kind: tuple[object, ...], step: Callable[[], None]) -> None:
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            if kind not in self.seen:
                step()
            else:
                if kind not in self.captured:
                    self.captured[kind] = self._capture(step)
                self.captured[kind].replay()
        self.seen.add(kind)
        main.wait_stream(self.stream)

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """As torch.cuda.graph does it, without the garbage collection that costs more than the capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
        return graph


def _constant(x: Tensor) -> bool:
    return bool((x == x[0]).all())


def _decided(number: int, plan: Plan, decided: Tensor) -> Step:
    """What a step decided; decided (B, L) in the order of the plan."""
    starts, ends = plan.ends[:, number, None], plan.ends[:, number + 1, None]
    columns = torch.arange(decided.shape[1])
    rows, places = ((columns >= starts) & (columns < ends)).nonzero(as_tuple=True)
    return Step(number, rows, plan.order[rows, places], decided[rows, places])
