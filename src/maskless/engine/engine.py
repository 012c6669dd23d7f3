"""The engine: a network's weights as it uses them, and runs of any size of batch.

Guidance doubles the rows of a batch: first those with their labels, then the same ones with their labels dropped, in
one call. Steps in which no row has a weight leave the second half out, but where encoded tokens are cached (ordered
context, refresh) it goes along in every step of a guided run: what is left out now would have to be encoded later, in a
step of another shape, and a ramp has only its first and smallest step without weight.

Calls may come from any thread, and from inside each other's on_step: they share the weights, which never change, and
each has a run to itself. On a GPU they take turns.

Shapes: B rows, L length, K steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from maskless.drafts import Step
from maskless.draw import Filter, Guidance, Truncation, check_warmup
from maskless.engine.answer import answer
from maskless.engine.backbones import CausalBackbone, PartitionBackbone
from maskless.engine.networks import fold, serves
from maskless.engine.rounds import RoundKind, Rounds
from maskless.engine.run import BatchRun, Kind, RowsToDecide
from maskless.nn import device_of
from maskless.nn.calls import ForkSafeLock
from maskless.nn.threads import DRAWING, Size, threads_for
from maskless.plans import Plan
from maskless.problems import Problems

SHAPES = 4  # how many runs an engine keeps, with their buffers and graphs, when no call uses them
GPU_LOCK = ForkSafeLock()  # of calls on a GPU: a capture must not meet another one, nor memory that is given back
_runs_lock = ForkSafeLock()  # of the lists of runs


class Engine:
    """Samples from a network as `sampling.sample` does, from a copy of its weights.

    precision: by default bfloat16 on CUDA and float32 elsewhere. graphs: capture and replay steps, on CUDA.
    """

    def __init__(self, network: nn.Module, *, precision: torch.dtype | None = None, graphs: bool = True):
        if not serves(network):
            raise ValueError(f"the engine does not serve this network: {type(network).__name__}")
        self.device = device_of(network)
        usual = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.backbone = fold(network, precision or usual)
        self.graphs = graphs and self.device.type == "cuda"
        self.size = Size.of(network)
        self.lock = GPU_LOCK if self.device.type == "cuda" else nullcontext()
        self.runs: list[tuple[Kind | RoundKind, Any]] = []  # which no call uses, the last used ones last

    def sample(
        self,
        tokens: Tensor,
        plan: Plan,
        keys: Tensor,
        *,
        filter: Filter | None = None,
        never: tuple[int, ...] = (),
        warmup: int = 0,
        labels: Tensor | None = None,
        guidance: Guidance | None = None,
        refresh: int = 1,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Decide tokens (B, L) as planned, in place; on_step sees each step as it is decided.

        labels (B,) and guidance: as in `sampling.sample`. never: ids that are not drawn. warmup: the first steps of a
        row that draw at temperature 2. Both come before the filter, as `Never` and `warmed` do.

        refresh: a Partition Transformer with full context encodes all that is known in every step. With refresh=r it
        does so only in every r-th, and otherwise encodes the new tokens beside the old, which is no longer exact.
        """
        if refresh < 1:
            raise ValueError(f"refresh {refresh} is out of range: expected 1 or more")
        if refresh > 1 and not (isinstance(self.backbone, PartitionBackbone) and not self.backbone.keeps):
            raise ValueError(f"refresh {refresh} goes with the full context of a Partition Transformer only")
        check_warmup(warmup)
        filter, task = filter or Truncation(), self._task(tokens, plan, keys, warmup, labels, guidance)
        kind = Kind(
            rows=len(tokens),
            length=tokens.shape[1],
            keeps=self.backbone.keeps or refresh > 1,
            filter=filter if isinstance(filter, Truncation) else None,
            never=never,
            warm=task.warm is not None,
            guided=task.weights is not None,
        )
        ends = plan.ends
        if isinstance(self.backbone, CausalBackbone):  # all rows read along, also those whose prompts are longer
            ends = torch.arange(int(ends[:, 0].min()), int(ends.max()) + 1).expand(len(tokens), -1)
        if on_step is not None and self.lock is GPU_LOCK:
            on_step = GPU_LOCK.outside(on_step)
        with self.computing(), self._lent(kind) as run:
            run.begin(task, ends[:, 0], filter)
            stepper = _Stepper(run, ends + self.backbone.lead, task.weights, self.size)
            for number in range(plan.steps):
                stepper.step(number, refresh=not self.backbone.keeps and number % refresh == 0)
                if on_step is not None and bool((plan.ends[:, number] < plan.ends[:, number + 1]).any()):
                    on_step(_decided(number, plan, run.decided()))
            tokens.scatter_(1, plan.order, run.decided())

    @contextmanager
    def rounds(self, kind: RoundKind) -> Iterator[Rounds]:
        """Exact rounds of a kind of batch, for as long as a call needs them."""
        passes = self.size.work(kind.rows, 2 * kind.rows * kind.draft)
        work = passes + 3 * DRAWING * kind.rows * kind.draft * self.backbone.head.vocab
        alone = self.device.type == "cpu"  # where the next rounds have fewer rows
        with self.computing(work), nullcontext(self._made(kind)) if alone else self._lent(kind) as run:
            assert isinstance(run, Rounds)
            yield run

    def answer(self, problems: Problems) -> Tensor:
        """Logits at the targets of problems, as the network gives them: for orders that are found on the way."""
        if isinstance(self.backbone, CausalBackbone):
            raise ValueError("a causal model goes from left to right: expected `sample`")
        tokens = problems.offsets.total + problems.target_offsets.total
        with self.computing(self.size.work(len(problems), tokens)):
            return answer(self.backbone, problems, self.device)

    @contextmanager
    def computing(self, work: int = 0) -> Iterator[None]:
        """Without gradients and autocast; on a GPU alone, on a CPU with as many threads as the work is worth."""
        threads = threads_for(work if self.device.type == "cpu" else 0)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False), self.lock, threads:
            yield

    def close(self) -> None:
        """Give the memory back."""
        self.runs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _task(
        self, tokens: Tensor, plan: Plan, keys: Tensor, warmup: int, labels: Tensor | None, guidance: Guidance | None
    ) -> RowsToDecide:
        rows, dropped = len(tokens), self.backbone.dropped
        if labels is not None:
            if dropped is None:
                raise ValueError("labels were given to a network without classes: expected none")
            if labels.shape != (rows,):
                raise ValueError(f"labels {tuple(labels.shape)}: expected one for each of {rows} rows")
            if not bool(((labels >= 0) & (labels <= dropped)).all()):
                raise ValueError(f"labels {labels.tolist()}: expected 0 to {dropped}")
        weights = warm = None
        if guidance is not None and guidance.weight:
            if labels is None:
                raise ValueError(f"guidance {guidance.weight} needs labels, one for each row")
            if guidance.dropped != dropped:
                raise ValueError(f"guidance drops labels to {guidance.dropped}: expected {dropped}, as in the network")
            weights = guidance.weights(plan)
            weights = weights if bool(weights.any()) else None  # of a schedule that gives none
        if warmup:
            warm = torch.arange(plan.steps) < plan.first()[:, None] + warmup
        if labels is None:
            labels = torch.full((rows,), dropped or 0)
        return RowsToDecide(tokens=tokens, plan=plan, keys=keys, labels=labels.cpu(), weights=weights, warm=warm)

    @contextmanager
    def _lent(self, kind: Kind | RoundKind) -> Iterator[Any]:
        """Buffers and graphs for a kind of batch that no other call uses meanwhile; the least recently used ones go."""
        with _runs_lock:
            mine = next((one for one in reversed(self.runs) if one[0] == kind), None)
            if mine is not None:
                self.runs.remove(mine)
            else:
                del self.runs[: max(0, len(self.runs) - SHAPES + 1)]
        if mine is None:
            mine = kind, self._made(kind)
        try:
            yield mine[1]
        finally:
            with _runs_lock:
                self.runs.append(mine)
                del self.runs[:-SHAPES]

    def _made(self, kind: Kind | RoundKind) -> BatchRun | Rounds:
        graphs = self.graphs and kind.filter is not None  # another filter may change with each call
        if isinstance(kind, Kind):
            return BatchRun(self.backbone, kind, device=self.device, graphs=graphs)
        assert isinstance(self.backbone, PartitionBackbone)
        return Rounds(self.backbone, kind, device=self.device, graphs=graphs)


class _Stepper:
    """The rows of a run on their way through a plan; weights (B, K) of the guidance."""

    def __init__(self, run: BatchRun, ends: Tensor, weights: Tensor | None, size: Size):
        self.run, self.ends, self.weights, self.size = run, ends, weights, size
        self.encoded = torch.zeros_like(ends[:, 0])  # how many tokens of each row are in the cache

    def step(self, number: int, *, refresh: bool) -> None:
        """Take a step of the plan; refresh: what is in the cache is out of date."""
        starts, ends = self.ends[:, number], self.ends[:, number + 1]
        busy = ends > starts
        if refresh:  # also of rows that rest in this step: they do not depend on those beside them
            self.encoded = torch.zeros_like(starts)
        if not bool(busy.any()):
            return
        encoded = self.encoded
        whole, guided = bool((encoded[busy] == 0).all()), False
        if self.weights is not None:
            guided = bool(self.run.cache.tensors) or bool(self.weights[busy, number].any())
        context = torch.where(busy, starts - encoded, 0)
        with threads_for(self._work(context, ends - starts, 2 if guided else 1)):
            self.run.step(starts, ends, context, whole, guided)
        self.encoded = torch.where(busy, starts, encoded)

    def _work(self, context: Tensor, targets: Tensor, times: int) -> int:
        """Of a step on the CPU."""
        if self.run.stream is not None:
            return 0
        asked = int(targets.sum())
        drawn = DRAWING * asked * self.run.backbone.head.vocab
        return times * self.size.work(len(targets), int(context.sum()) + asked) + drawn


def _decided(number: int, plan: Plan, decided: Tensor) -> Step:
    """What a step decided; decided (B, L) in the order of the plan."""
    starts, ends = plan.ends[:, number, None], plan.ends[:, number + 1, None]
    columns = torch.arange(decided.shape[1])
    rows, places = ((columns >= starts) & (columns < ends)).nonzero(as_tuple=True)
    return Step(number, rows, plan.order[rows, places], decided[rows, places])
