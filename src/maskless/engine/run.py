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
        plain = network.config.classes is None and not network.config.registers  # of images: not folded yet
        return plain and network.config.queries == "position"  # an aggregate of the context is no table
    return isinstance(network, CausalTransformer) or (
        isinstance(network, MaskedTransformer) and network.config.always_full
    )


class Engine:
    """Samples from a network as `sampling.sample` does, from a copy of its weights.

    precision: by default bfloat16 on CUDA and float32 elsewhere. graphs: capture and replay steps, on CUDA. lanes: so
    many parts of a batch run side by side, each on a stream of its own, so that small kernels share the card.
    """

    def __init__(
        self, network: nn.Module, *, precision: torch.dtype | None = None, graphs: bool = True, lanes: int = 1
    ):
        if not serves(network):
            raise ValueError(f"the engine does not serve this network: {type(network).__name__}")
        self.device = device_of(network)
        self.dtype = precision or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.body = fold(network, self.dtype)
        self.graphs, self.lanes = graphs and self.device.type == "cuda", lanes
        self.runs: OrderedDict[tuple[object, ...], list[Run]] = OrderedDict()

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
        lead, ends = self.body.lead, plan.ends
        if lead:  # all rows of a causal model read along, also those whose prompts are longer
            ends = torch.arange(int(ends[:, 0].min()), int(ends.max()) + 1).expand(len(tokens), -1)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            lanes = []
            first = 0
            for run in self._runs(tokens.shape, filter, self.body.keeps or refresh > 1):
                rows = slice(first, first + run.rows)
                run.begin(tokens[rows], Plan(plan.order[rows], plan.ends[rows]), ends[rows, 0], keys[rows], filter)
                lanes.append(_Lane(run, ends[rows] + lead))
                first = rows.stop
            for number in range(plan.steps):
                for lane in lanes:
                    lane.step(number, anew=not self.body.keeps and number % refresh == 0)
                if on_step is not None and bool((plan.ends[:, number] < plan.ends[:, number + 1]).any()):
                    on_step(_decided(number, plan, torch.cat([lane.run.decided() for lane in lanes])))
            tokens.scatter_(1, plan.order, torch.cat([lane.run.decided() for lane in lanes]))

    def close(self) -> None:
        """Give the memory back."""
        self.runs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _runs(self, shape: torch.Size, filter: Filter, keeps: bool) -> list[Run]:
        """Buffers and graphs for a size of batch, for each lane; the least recently used ones go."""
        rows, length = shape
        key = (rows, length, keeps, filter if isinstance(filter, Truncation) else None)
        if key not in self.runs:
            while len(self.runs) >= SHAPES:
                self.runs.popitem(last=False)
            graphs = self.graphs and isinstance(filter, Truncation)  # another filter may change with each call
            parts = [len(part) for part in torch.arange(rows).chunk(self.lanes)]
            self.runs[key] = [Run(self.body, n, length, keeps, device=self.device, graphs=graphs) for n in parts]
        self.runs.move_to_end(key)
        return self.runs[key]


class _Lane:
    """The rows of a run on their way through a plan."""

    def __init__(self, run: Run, ends: Tensor):
        self.run, self.ends = run, ends
        self.encoded = torch.zeros_like(ends[:, 0])  # how many tokens of each row are in the cache

    def step(self, number: int, *, anew: bool) -> None:
        """Take a step of the plan; anew: what is in the cache is out of date."""
        starts, ends = self.ends[:, number], self.ends[:, number + 1]
        busy = ends > starts
        if not bool(busy.any()):
            return
        encoded = torch.zeros_like(starts) if anew else self.encoded
        self.run.step(starts, ends, torch.where(busy, starts - encoded, 0), bool((encoded[busy] == 0).all()))
        self.encoded = torch.where(busy, starts, encoded)


class Run:
    """One size of batch at work: static buffers, a stream of its own, and the captured steps."""

    def __init__(self, body: Body, rows: int, length: int, keeps: bool, *, device: torch.device, graphs: bool):
        self.body, self.rows = body, rows
        slots = length + body.lead
        self.grain = min(GRAIN, slots // 2) if graphs and rows > 1 and not body.lead else 0
        spare = 1 if self.grain else 0  # a row that rounds ragged steps up, so that they can be captured too
        self.board = Board.empty(rows + spare, slots, device)
        self.memory = body.open(rows + spare, slots, keeps)
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.u = torch.zeros(rows + spare, slots, dtype=wide, device=device)
        self.fixed = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.segments = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.bounds = torch.zeros(2, rows + spare + 1, dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graphs = _Graphs() if graphs else None

    def decided(self) -> Tensor:
        """The tokens, in the order of the plan.  -> (B, L)"""
        with torch.cuda.stream(self.stream):
            return self.board.tokens[: self.rows, self.body.lead :].cpu()

    def begin(self, tokens: Tensor, plan: Plan, known: Tensor, keys: Tensor, filter: Filter) -> None:
        """Lay out the rows; what is given stands at the front, and the first `known` (B,) of each row count."""
        lead, board, device, rows = self.body.lead, self.board, self.board.at.device, self.rows
        self.filter, order = filter, plan.order
        u = lg.uniforms(keys[:, None], order, DRAW)
        board.tokens[:rows, lead:] = tokens.gather(1, order).to(device)
        board.order[:rows, lead:] = order.to(device) + lead
        self.u[:rows, lead:] = u.to(self.u.dtype).to(device)
        board.at[:rows] = (known + lead).to(device, torch.int32)
        if isinstance(self.body, CausalBody):
            board.tokens[:, 0] = self.body.start
            columns = torch.arange(order.shape[1])
            self.fixed[:, lead:] = ((columns < plan.ends[:, :1]) | (columns >= plan.ends[:, -1:])).to(device)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def step(self, starts: Tensor, ends: Tensor, context: Tensor, whole: bool) -> None:
        """Decide the slots from starts to ends; context (B,): how many of the last known tokens to encode."""
        with torch.cuda.stream(self.stream):
            self._take(starts, ends - starts, context, whole)

    def _take(self, starts: Tensor, counts: Tensor, context: Tensor, whole: bool) -> None:
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
        if self.body.lead:  # a causal model reads along where the prompt is longer than the shortest
            drawn = torch.where(self.fixed.view(-1)[at], board.at_index(at)[1], drawn)
        board.tokens.view(-1).index_copy_(0, at, drawn)
        board.at[: len(targets)] += targets.longest if targets.equal else targets.bounds.diff()

    def _draw(self, logits: Tensor, at: Tensor) -> Tensor:
        u, head, filter = self.u.view(-1).index_select(0, at), self.body.head, self.filter
        if isinstance(filter, Truncation) and filter.top_k is None and filter.top_p in (None, 1):
            return kernels.draw(logits, head.bias, filter.temperature, u)
        rows, positions = at // len(self.board.columns), self.board.at_index(at)[0] - self.body.lead
        return lg.draw(filter((logits + head.bias)[:, : head.vocab], rows, positions), u)


class _Graphs:
    """Captured steps: the first of a kind is computed, the second captured, the others replayed."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.seen: set[tuple[object, ...]] = set()
        self.captured: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}

    def play(self, kind: tuple[object, ...], step: Callable[[], None]) -> None:
        if kind not in self.seen:
            self.seen.add(kind)
            step()
            return
        if kind not in self.captured:
            self.captured[kind] = self._capture(step)
        self.captured[kind].replay()

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
