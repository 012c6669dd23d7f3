"""Exact rounds: tokens are drafted, checked as a chain and accepted on the device, without a word to the host.

Every row has k targets in every round, also where fewer are left: what is beyond its end is computed and thrown away.
So all rounds have the same shapes, and on CUDA one is captured and replayed. What a check has encoded stays: only the
last token that a row has decided is encoded in its next round.

Shapes: B rows, L length, N columns of a row, k drafted tokens of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.drafts import Tally
from maskless.draw import DRAW, Filter, Truncation
from maskless.engine import kernels
from maskless.engine.backbones import PartitionBackbone, PartitionCache
from maskless.engine.batch_state import BatchState
from maskless.engine.graphs import Equal, Graphs
from maskless.plans import Plan
from maskless.problems import Offsets
from maskless.speculation import ACCEPT, RESIDUAL

FIGURES = 5  # rounds, drafted, accepted, decided, nats: those of a `Tally`


@dataclass(frozen=True, kw_only=True)
class RoundKind:
    """What the buffers of exact rounds are made for."""

    rows: int
    length: int
    draft: int
    filter: Truncation | None  # None: any other, which may change with each call
    never: tuple[int, ...] = ()  # ids that are not drawn
    cells: int  # logits that are drawn from at once


class Rounds:
    """Rows that are decided exactly, each at its own pace."""

    def __init__(self, backbone: PartitionBackbone, kind: RoundKind, *, device: torch.device, graphs: bool):
        self.backbone, self.kind = backbone, kind
        columns = backbone.lead + kind.length + kind.draft
        self.state = BatchState.empty(kind.rows, columns, device)
        self.cache = PartitionCache(backbone, kind.rows, columns, keeps=True)
        self.keys, self.ends, self.taken = torch.zeros(3, kind.rows, dtype=torch.long, device=device)
        self.came = torch.zeros(kind.rows, columns, dtype=torch.long, device=device)
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.chance = torch.zeros(kind.rows, columns, dtype=wide, device=device)
        self.figures = torch.zeros(FIGURES, dtype=wide, device=device)
        self.largest = torch.zeros((), dtype=torch.long, device=device)  # id that was drawn
        self.within = torch.arange(kind.draft, device=device)
        self.segments = torch.arange(kind.rows + 1, dtype=torch.int32, device=device)
        never = torch.tensor(kind.never, dtype=torch.long, device=device)
        self.ruled_out = torch.zeros(len(backbone.head.bias), device=device).index_fill(0, never, -torch.inf)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graphs = Graphs() if graphs else None

    def begin(
        self,
        tokens: Tensor,
        plan: Plan,
        keys: Tensor,
        known: Tensor,
        taken: Tensor,
        filter: Filter,
        labels: Tensor | None = None,
    ) -> None:
        """Lay out rows (n, L) of which the first `known` (n,) of their orders are known, and encode all but the last.

        taken (n,): the rounds that each has behind it. If there are fewer rows than buffers, the others are done.
        """
        state, lead, order = self.state, self.backbone.lead, plan.order
        self.filter, rows, unused = filter, len(tokens), self.kind.rows - len(tokens)
        assert int(known.min()) + lead > 0, "a row without any context has nothing to begin from"
        if labels is None:
            labels = torch.full((rows,), self.backbone.dropped or 0)

        def put(buffer: Tensor, values: Tensor) -> None:
            values = torch.cat([values, values[:1].expand(unused, *values.shape[1:])])  # unused rows are like the first
            buffer.copy_(values.to(buffer.dtype).to(buffer.device))

        span = slice(lead, lead + order.shape[1])
        put(state.tokens[:, span], tokens.gather(1, order))
        put(state.order[:, span], order + self.backbone.places)
        if lead:
            ids, positions = self.backbone.first(plan)
            put(state.tokens[:, 0], ids)
            put(state.order[:, 0], positions)
        put(self.keys, keys)
        put(self.taken, taken)
        put(self.ends, plan.ends[:, -1] + lead)
        self.ends[rows:] = 0
        for buffer in (self.figures, self.largest):
            buffer.zero_()
        self.came.fill_(-1)
        self.chance.fill_(torch.nan)
        self.cache.norms.label(torch.cat([labels, labels[:1].expand(unused)]))
        before = known + lead - 1
        put(state.known, before)
        if int(before.max()):
            lengths = torch.cat([before, torch.zeros(unused, dtype=before.dtype)])
            self.cache.encode(state, Offsets.from_lengths(lengths).map(lambda x: x.to(state.known.device)))
        put(state.known, known + lead)
        self.rows = rows
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def left(self) -> Tensor:
        """How many tokens of each row are still to be decided, 0 or less where none are.  -> (n,)"""
        with torch.cuda.stream(self.stream):
            lg.check_drawn(int(self.largest), self.backbone.head.vocab)
            return (self.ends - self.state.known)[: self.rows].cpu()

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, the round that decided each and its probability, in the order of the plan.  -> (n, L) x 3"""
        span = slice(self.backbone.lead, self.backbone.lead + self.kind.length)
        with torch.cuda.stream(self.stream):
            tokens, came, chance = (x[: self.rows, span].cpu() for x in (self.state.tokens, self.came, self.chance))
        return tokens, came, chance.double()

    def tally(self) -> Tally:
        """What the drafts of all rounds were worth."""
        with torch.cuda.stream(self.stream):
            rounds, drafted, accepted, decided, nats = self.figures.tolist()
        return Tally(int(rounds), int(drafted), int(accepted), int(decided), nats)

    def round(self) -> None:
        """Draft, check, accept; nothing waits for the device."""
        with torch.cuda.stream(self.stream):
            if self.graphs is None:
                self._round()
            else:
                self.graphs.play(Equal(self.kind.rows, 1, self.kind.draft, False), lambda _: self._round())

    def _round(self) -> None:
        state, k = self.state, self.kind.draft
        x, at = self.cache.forward(state, self._regular(1), self._regular(k), whole=False)
        logits = kernels.logits_of(x, self.backbone.head.weight)
        if kernels.fuses(logits, self.filter):
            self._fused(logits, at)
            return
        start, p = state.known.clone(), self.backbone.head.biased(logits)  # (B * k, V)
        at = at.view(-1, k)
        drawn = torch.cat([self._draw(p.view(-1, k, p.shape[1])[rows], at[rows], rows) for rows in self._chunks()])
        torch.maximum(self.largest, drawn.amax(), out=self.largest)  # looked at later: a round waits for nothing
        drawn.clamp_(max=self.backbone.head.vocab - 1)
        state.tokens.view(-1).index_copy_(0, at.flatten(), drawn.flatten())
        p, q = p.view(-1, k, p.shape[1]), p.view(-1, k, p.shape[1])[:, :1]  # the first was drawn from what checks it
        if k > 1:
            behind = self.backbone.head.biased(self._behind())
            q = torch.cat([q, behind.view(-1, k - 1, behind.shape[1])], 1)
        for rows in self._chunks():
            self._accept(drawn[rows], p[rows], q[rows], at[rows], start[rows], rows)

    def _behind(self) -> Tensor:
        """Logits of all drafted tokens but the first, given those before them.  -> (B * (k - 1), V)"""
        more = self._regular(self.kind.draft - 1)
        self.state.known += self.kind.draft - 1
        return kernels.logits_of(self.cache.chain(self.state, more, more, False), self.backbone.head.weight)

    def _fused(self, logits: Tensor, at: Tensor) -> None:
        """The same by a few kernels, on CUDA."""
        state, head, k, cuda = self.state, self.backbone.head, self.kind.draft, kernels.triton()
        of = cuda.Drafting(
            at=at,
            k=k,
            order=state.order.view(-1),
            places=self.backbone.places,
            tokens=state.tokens.view(-1),
            keys=self.keys,
            taken=self.taken,
            bias=head.bias,
            never=self.ruled_out,
            vocab=head.vocab,
            filter=self.filter,
        )
        p = cuda.draft(logits, self.largest, of, draws=True)
        q = cuda.draft(self._behind(), self.largest, of, draws=False) if k > 1 else None
        buffers = self.came.view(-1), self.chance.view(-1), self.figures, self.largest
        cuda.accept(p, q, of, state.known, self.ends, *buffers)

    def _draw(self, p: Tensor, at: Tensor, rows: slice) -> Tensor:
        """Tokens from logits (b, k, V) of the targets at index (b, k), each without the others.  -> (b, k)"""
        keys, columns = self._random(at, rows)
        return lg.draw(self._shaped(p, at), lg.uniforms(keys, columns, DRAW)).view(at.shape)

    def _accept(self, drawn: Tensor, p: Tensor, q: Tensor, at: Tensor, start: Tensor, rows: slice) -> None:
        """Write down what of the drafted tokens stands: `speculation.accept`, on the device."""
        keys, columns = self._random(at, rows)
        shape = *at.shape, -1
        own, after = (self._shaped(x, at).to(self.chance.dtype).softmax(-1).view(shape) for x in (p, q))
        before, checked = (x.gather(2, drawn[:, :, None])[:, :, 0] for x in (own, after))
        ratio = checked / before
        lengths = (self.ends[rows] - start).clamp(0, self.kind.draft)[:, None]  # 0: this row is done
        inside = self.within < lengths
        taken = (lg.uniforms(keys, columns, ACCEPT).view(at.shape) < ratio) | (self.within == 0)
        accepted = (taken & inside).long().cumprod(1).sum(1, keepdim=True)
        here = accepted.clamp_max(self.kind.draft - 1)  # where a row has its first refusal, if it has one
        of, instead = (x.gather(1, here[:, :, None].expand(-1, -1, x.shape[2]))[:, 0] for x in (own, after))
        lacking = (instead - of).clamp_min(0)
        lacking = torch.where(lacking.sum(1, keepdim=True) > 0, lacking, instead)  # equal but for rounding
        u = lg.uniforms(self.keys[rows], columns.view(at.shape).gather(1, here)[:, 0], RESIDUAL)
        tokens = torch.where(self.within == accepted, lg.draw(lacking.log(), u)[:, None], drawn)
        decided = (accepted + 1).minimum(lengths)
        stands = self.within < decided
        torch.maximum(self.largest, torch.where(stands, tokens, 0).amax(), out=self.largest)
        tokens = tokens.clamp_max(self.backbone.head.vocab - 1)
        chance = lg.log_probability(q.flatten(0, 1), tokens.flatten()).view(at.shape).to(self.chance.dtype).exp()
        for buffer, values in (
            (self.state.tokens, tokens),
            (self.came, self.taken[rows, None].expand_as(tokens)),
            (self.chance, chance),
        ):
            flat = buffer.view(-1)
            flat.index_copy_(0, at.flatten(), torch.where(stands, values, flat[at]).flatten())
        self.state.known[rows] = (start + decided[:, 0]).int()
        self.taken[rows] += (lengths[:, 0] > 0).long()
        nats = torch.where(inside & (self.within > 0), -ratio.log(), 0).sum()
        counts = ((lengths > 0).sum(), lengths.sum(), accepted.sum(), decided.sum(), nats)
        self.figures += torch.stack([one.to(self.figures.dtype) for one in counts])

    def _shaped(self, logits: Tensor, at: Tensor) -> Tensor:
        """Logits as they are drawn from.  (b, k, V), (b, k) -> (b * k, V)"""
        flat, rows = at.flatten(), at.flatten() // len(self.state.columns)
        return self.filter(logits.flatten(0, 1) + self.ruled_out[: logits.shape[2]], rows, self._positions(flat))

    def _random(self, at: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Keys and columns of the random numbers of targets: those that are still open draw again in each round."""
        step = (self.taken[rows] << 32)[:, None].expand_as(at)
        return self.keys[rows, None].expand_as(at).flatten(), self._positions(at.flatten()) + step.flatten()

    def _positions(self, at: Tensor) -> Tensor:
        return self.state.order.view(-1)[at] - self.backbone.places

    def _chunks(self) -> list[slice]:
        """Rows whose logits are drawn from at once."""
        some = max(1, self.kind.cells // (self.kind.draft * self.backbone.head.vocab))
        return [slice(begin, begin + some) for begin in range(0, self.kind.rows, some)]

    def _regular(self, length: int) -> Offsets:
        return Offsets(self.segments * length, self.kind.rows * length, length, equal=True)
