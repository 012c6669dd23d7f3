"""Backends of the sampler: an engine that runs whole plans, or one that caches what it has encoded of each row.

What a network with ordered context, or a causal one, has encoded stays valid. Its rows can have slots in a cache, which
they take and leave between steps, and a step computes only the new tokens and the targets. Any other network encodes
all known tokens in every step.

Shapes: B rows, L length, U targets of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from maskless import logits as lg
from maskless.drafts import Ask, Drafts, OnStep
from maskless.draw import Filter, Truncation
from maskless.engine.backbones import PartitionBackbone
from maskless.engine.engine import GPU_LOCK, Engine
from maskless.engine.kv_slots import KVSlots, SlotQuery, keeps
from maskless.engine.networks import serves
from maskless.engine.registry import engine_of
from maskless.engine.rounds import RoundKind
from maskless.nn import Network
from maskless.plans import Plan
from maskless.sampling import Plain, cells_of

KEPT = 1 << 32  # bytes of keys and values of all rows of a network


def backend_of(network: nn.Module, *, draft: int = 0, length: int = 0) -> Plain:
    """The fastest backend for rows that start together: in step, or with drafts of `draft` tokens at their own pace."""
    if not serves(network):
        return Plain(network)
    engine = engine_of(network)
    return Slots(network, KVSlots(engine, length)) if draft and keeps(engine) else WholePlans(network, engine)


def slots_of(network: nn.Module, length: int) -> Slots | Plain:
    """The fastest backend for rows that come and go, at most `length` tokens each."""
    if not serves(network):
        return Plain(network)
    engine = Engine(network)
    return Slots(network, KVSlots(engine, length, KEPT)) if keeps(engine) else Plain(network, engine.answer)


class WholePlans(Plain):
    """A plan that is known beforehand is one run of the engine; an order found on the way is taken step by step."""

    def __init__(self, network: Network, engine: Engine):
        super().__init__(network, engine.answer)
        self.engine = engine

    def follow(self, drafts: Drafts, on_step: OnStep | None) -> None:
        if drafts.draft or (drafts.confident and not int(drafts.round.max())):
            super().follow(drafts, on_step)
            return
        first, past = not int(drafts.round.max()), int(drafts.past.max())
        self.engine.sample(
            drafts.tokens,
            drafts.current,
            drafts.keys,
            filter=_filter_of(drafts, torch.arange(len(drafts)), self.engine.device),
            never=drafts.never,
            warmup=drafts.warmup if first else 0,
            labels=drafts.labels,
            guidance=drafts.guidance,
            refresh=drafts.refresh,
            on_step=None if on_step is None else lambda step: on_step(replace(step, number=step.number + past)),
        )
        drafts.settle()


def _filter_of(drafts: Drafts, rows: Tensor, device: torch.device) -> Filter:
    """What logits of these rows (S,), all in the same round, go through before a draw."""
    (filter, *_) = drafts.filters(rows[:1])
    if drafts.spaced is not None:
        return _AfterSpace(drafts.spaced[0][rows].to(device), drafts.spaced[1].to(device), filter)
    return partial(filter) if int(drafts.round.max()) else filter  # a plain function: rounds share buffers


@dataclass(frozen=True, eq=False)
class _AfterSpace:
    """Where the text before a gap ends in a space, the gap begins with a token that brings it; then another filter."""

    spaced: Tensor  # (B, L)
    begins: Tensor  # (V,)
    then: Filter

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        wrong = self.spaced[rows, positions][:, None] & ~self.begins
        return self.then(logits.masked_fill(wrong, -torch.inf), rows, positions)


class Slots(Plain):
    """Every row has a slot; a guided one has two, the second for its logits without the label."""

    def __init__(self, network: Network, slots: KVSlots):
        super().__init__(network, slots.engine.answer)
        self.slots = slots

    def follow(self, drafts: Drafts, on_step: OnStep | None) -> None:
        """Exact drafts go through rounds of the engine's own, but for what those do not know, and empty contexts."""
        backbone = self.slots.backbone
        simple = drafts.draft and drafts.weights is None and not (drafts.warmup or drafts.top)
        while len(rows := drafts.next()):
            known = drafts.plan.ends[rows].gather(1, drafts.number[rows, None])
            if simple and isinstance(backbone, PartitionBackbone) and int(known.min()) + backbone.lead:
                self._in_rounds(drafts, rows, on_step)
            else:
                self.keep([(drafts, row) for row in rows.tolist()])
                self._step(drafts, rows, on_step)

    def _in_rounds(self, drafts: Drafts, rows: Tensor, on_step: OnStep | None) -> None:
        """Rounds of rows (S,) until all are done, or so many that others should have their place.

        On a CPU those are the ones that are not done: fewer rows make a faster round. On a GPU they are rows that wait,
        and a round is always as wide as the first, since it is captured.
        """
        if on_step is not None and self.slots.engine.lock is GPU_LOCK:
            on_step = GPU_LOCK.outside(on_step)
        engine, filter = self.slots.engine, _filter_of(drafts, rows, self.slots.engine.device)
        plan = Plan(drafts.plan.order[rows], drafts.plan.ends[rows])
        alone, waiting = engine.device.type == "cpu", int(drafts.open.sum()) > len(rows)
        kind = RoundKind(
            rows=len(rows) if alone else min(len(drafts), drafts.at_once or len(drafts)),
            length=plan.order.shape[1],
            draft=drafts.draft,
            filter=filter if isinstance(filter, Truncation) else None,
            never=drafts.never,
            cells=cells_of(engine.device),
        )
        enough = len(rows) // 2 if alone else len(rows) * 3 // 4 if waiting else 0  # that are left
        with engine.rounds(kind) as run:
            known = plan.ends.gather(1, drafts.number[rows, None])[:, 0]
            labels = None if drafts.labels is None else drafts.labels[rows]
            run.begin(drafts.tokens[rows], plan, drafts.keys[rows], known, drafts.taken[rows], filter, labels)
            left = run.left()
            while int((left > 0).sum()) > enough:
                last = int(left.sort().values[len(rows) - enough - 1])  # of those that have to be done
                for _ in range(1 if on_step is not None else -(-last // drafts.draft)):  # needed in any case
                    run.round()
                left = run.left()
                if on_step is not None:
                    for step in drafts.record(rows, *run.found()):
                        on_step(step)
            drafts.record(rows, *run.found())
            drafts.tally += run.tally()

    @property
    def room(self) -> int:
        """How many rows fit at once: their keys and values have to fit into memory."""
        return self.slots.most if self.slots.backbone.dropped is None else max(1, self.slots.most // 2)

    def logits(self, asks: Sequence[Ask]) -> Tensor:
        return self._guided(asks, _queries, self.slots.logits, torch.cat([ask.weights for ask in asks]))

    def check(self, asks: Sequence[Ask], drawn: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
        """The first of each draft was drawn from what it is checked by; rows with more tokens ask about the others."""
        first = torch.cat([ask.offsets.within == 0 for ask in asks]).to(before[0].device)
        checked, weights = torch.cat(list(before)), torch.cat([ask.weights for ask in asks])
        if bool(first.all()):
            return checked
        of = {id(ask): tokens for ask, tokens in zip(asks, drawn, strict=True)}

        def queries(ask: Ask, **how: Any) -> list[SlotQuery]:
            return _checks(_queries(ask, **how), ask, of[id(ask)])

        checked[~first] = self._guided(asks, queries, self.slots.check, weights[~first.cpu()])
        return checked

    def _guided(
        self,
        asks: Sequence[Ask],
        queries: Callable[..., list[SlotQuery]],
        answer: Callable[[Sequence[SlotQuery]], Tensor],
        weight: Tensor,
    ) -> Tensor:
        """Answers to the queries of all rows, guided by those of their twins."""
        own = [query for ask in asks for query in queries(ask)]
        twins = {at: twin for ask in asks for at, twin in _twins(ask, queries, self.slots.backbone.dropped)}
        logits = answer([*own, *twins.values()])
        if not twins:
            return logits
        parts = logits.split([query.asked for query in (*own, *twins.values())])
        without: dict[Hashable, Tensor] = dict(zip(twins, parts[len(own) :], strict=True))
        weights = weight.split([query.asked for query in own])
        found = []
        for query, part, weight in zip(own, parts, weights, strict=False):
            twin = without.get(query.owner)
            found.append(part if twin is None else lg.guide(part, twin, weight))
        return torch.cat(found)

    def keep(self, rows: Collection[tuple[Drafts, int]]) -> None:
        """All other rows have left."""
        self.slots.keep({(*row, twin) for row in rows for twin in (False, True)})


def _queries(ask: Ask, *, label: int | None = None, twin: bool = False) -> list[SlotQuery]:
    drafts, labels = ask.drafts, None if ask.drafts.labels is None else ask.drafts.labels.tolist()
    spans = zip(ask.rows.tolist(), ask.starts.tolist(), ask.ends.tolist(), strict=True)
    return [
        SlotQuery(
            (drafts, row, twin),
            drafts.tokens[row],
            drafts.plan.order[row],
            start,
            end,
            label if twin or labels is None else labels[row],
        )
        for row, start, end in spans
    ]


def _checks(queries: list[SlotQuery], ask: Ask, drawn: Tensor) -> list[SlotQuery]:
    """The same rows with their drafts known but for the last; those that drafted one token ask nothing."""
    lengths, found = [query.asked for query in queries], []
    for query, tokens in zip(queries, drawn.split(lengths), strict=True):
        drafted = len(tokens) - 1
        if drafted:
            known = query.tokens.index_copy(0, query.order[query.start : query.end], tokens)
            found.append(replace(query, tokens=known, start=query.end - 1, drafted=drafted))
    return found


def _twins(ask: Ask, queries: Callable[..., list[SlotQuery]], dropped: int | None) -> list[tuple[Hashable, SlotQuery]]:
    """Of rows that are guided: whose twin it is, and what it asks without the label."""
    if ask.drafts.weights is None:
        return []
    guided = ask.drafts.weights.any(1).tolist()
    twins = queries(ask, label=dropped, twin=True)
    owners = [cast(tuple[Drafts, int, bool], twin.owner) for twin in twins]
    return [((*own[:2], False), twin) for own, twin in zip(owners, twins, strict=True) if guided[own[1]]]
