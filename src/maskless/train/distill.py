"""Self-distillation through time: a student learns to decide in one step what its teacher decides in several.

From a partly known sequence the teacher takes some sampling steps. What it predicted for a token in the step that
decided it is what the student should predict at once; tokens that its steps left open take the last step's prediction.
A PGM has no input of time, so steps only say how much is known to begin with, and how much is decided in each.

So each target gets the prediction of one step, and the teacher looks at it in that step only: all its steps together
have as many targets as the student's one. What is decided when does not depend on what is drawn, so lessons are laid
out on the CPU, ahead of their use.

Shapes: B sequences, L length, S problems (B, or 2B with two groups), m teacher steps, U targets, U' those of a step,
T' context tokens of a step, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskless import logits as lg
from maskless.data.tokens import TokenRows, global_batch
from maskless.nn import autocast, device_of
from maskless.nn.blocks import Head
from maskless.nn.loss import chunk_size, product_type
from maskless.objective import mixed_seed, noise
from maskless.problems import Problems, partition, split
from maskless.train.config import TrainConfig
from maskless.train.distill_loss import RULED_OUT, Divergence, Linear, divergence
from maskless.train.loop import Workload
from maskless.train.tasks import pieces_of

DRAWS = 1 << 20  # keeps the seeds of draws apart from those of dropout, which end in the number of a process
GROUPS = ("one", "two")


@dataclass(frozen=True)
class Pace:
    """What share of the tokens is known after a share of the sampling steps, and the inverse of that."""

    known: Callable[[Tensor], Tensor]
    progress: Callable[[Tensor], Tensor]


UNIFORM = Pace(lambda r: r, lambda known: known)
ARCCOS = Pace(lambda r: r.asin() * (2 / math.pi), lambda known: (known * (math.pi / 2)).sin())  # pictures


@dataclass(frozen=True, kw_only=True)
class Stride:
    """The student's step: this share of all sampling (1 / its steps), for which the teacher takes `ratio` steps."""

    share: float
    ratio: int
    pace: Pace = UNIFORM

    def shares(self, known: Tensor) -> Tensor:
        """What share is known before each of the teacher's steps, and after the last.  (B,) -> (B, m+1)

        The step ends where nothing is unknown; what is left of it is divided into equal parts.
        """
        begin = self.pace.progress(known)[:, None]
        end = (begin + self.share).clamp_max(1)
        inside = begin + (end - begin) * torch.arange(1, self.ratio + 1) / self.ratio
        return torch.cat([known[:, None], self.pace.known(inside)], 1)


@dataclass(frozen=True)
class TeacherStep:
    """A step of the teacher: problems whose context tokens stand on the board, and where its answers go."""

    problems: Problems
    known: Tensor  # (T',) cells of the board that hold the context
    cells: Tensor  # (U',) cells that this step decides
    places: Tensor  # (U',) where each stands among the student's targets
    draws: Tensor  # (U',) uniform draws in [0, 1)

    def map(self, change: Callable[[Tensor], Tensor]) -> TeacherStep:
        tensors = (self.known, self.cells, self.places, self.draws)
        return TeacherStep(self.problems.map(change), *map(change, tensors))


@dataclass(frozen=True)
class Lesson:
    """The problems of the student, and the steps in which the teacher solves them on a board of its own."""

    problems: Problems  # S
    weights: Tensor  # (U,) float32
    board: Tensor  # (S * L,) what is known at first; 0 elsewhere
    asks: tuple[TeacherStep, ...]

    def labelled(self, labels: Tensor | None) -> Lesson:
        """The same lesson with the class label of each sequence.  (B,)"""
        problems = self.problems.labelled(labels)
        if problems.labels is None:
            return replace(self, problems=problems)
        L = len(self.board) // len(problems)
        own = [problems.labels[ask.cells[ask.problems.target_offsets.bounds[:-1].long()] // L] for ask in self.asks]
        asks = tuple(
            replace(ask, problems=replace(ask.problems, labels=each)) for ask, each in zip(self.asks, own, strict=True)
        )
        return replace(self, problems=problems, asks=asks)

    def map(self, change: Callable[[Tensor], Tensor]) -> Lesson:
        """The same lesson with every tensor changed: moved, pinned."""
        asks = tuple(ask.map(change) for ask in self.asks)
        return Lesson(self.problems.map(change), change(self.weights), change(self.board), asks)


@dataclass(frozen=True)
class Taught:
    """A lesson with the teacher's answers: what its last linear takes at each target."""

    problems: Problems
    weights: Tensor  # (U,)
    hidden: Tensor  # (U, D)

    def map(self, change: Callable[[Tensor], Tensor]) -> Taught:
        return Taught(self.problems.map(change), change(self.weights), change(self.hidden))


def one_group(
    tokens: Tensor, t: Tensor, u: Tensor, v: Tensor, valid: Tensor, stride: Stride, *, lead: int = 0
) -> Lesson:
    """Each sequence is partly known, and its other tokens are to be predicted.  PGM, Sec. 5.1; SDTT

    tokens (B, L); t (B,), u (B, L) and v (B, L) uniform draws in [0, 1), of how much is known, what, and for the
    teacher's tokens; valid (B, L): which tokens count; lead: so many first tokens (BOS) are known.
    """
    u = _led(u, lead)
    order, ends = u.argsort(1), _ends(u, stride.pace.known(t), stride)
    problems, index = split(tokens, order, ends[:, 0], ends[:, -1])
    return Lesson(problems, valid.flatten()[index].float(), *_laid_out(problems, tokens, order, ends, v))


def two_groups(
    tokens: Tensor, t: Tensor, u: Tensor, v: Tensor, valid: Tensor, stride: Stride, *, lead: int = 0
) -> Lesson:
    """Each sequence is split in two groups, and each of them is known in turn: twice the problems of `one_group`.

    A sequence has two rows, each with a board of its own. The second knows the second group (without the lead), and its
    teacher decides tokens of the first; what is known of one group in one row is not to be seen in the other.
    """
    u, known, L = _led(u, lead), stride.pace.known(t), tokens.shape[1]
    order, ends = u.argsort(1), _ends(u, known, stride)
    first, second = ends[:, :1], L - ends[:, :1]
    column = torch.arange(L) - second
    turned = order.gather(1, torch.where(column < 0, column + L, (column + lead) % first.clamp_min(1)))
    # The second group is known first, as if its tokens had come before the others: those of the first come after it.
    later = torch.where(u < 0, 2.0, (1 - known)[:, None] + u)
    decided = (later[:, None] < stride.shares(1 - known)[:, 1:-1, None]).sum(2).minimum(first - lead)
    turned_ends = torch.cat([second, second + decided, torch.full_like(second, L - lead)], 1)
    problems, index = partition(tokens, order, ends[:, 0], given=lead)
    orders, both = (torch.stack(each, 1).flatten(0, 1) for each in ((order, turned), (ends, turned_ends)))
    laid_out = _laid_out(problems, tokens.repeat_interleave(2, 0), orders, both, v)
    return Lesson(problems, valid.flatten()[index].float(), *laid_out)


def _led(u: Tensor, lead: int) -> Tensor:
    """Draws that put the first `lead` tokens before all others."""
    return torch.cat([torch.full_like(u[:, :lead], -1), u[:, lead:]], 1)


def _ends(u: Tensor, known: Tensor, stride: Stride) -> Tensor:
    """How many tokens are known before each of the teacher's steps; the last takes all that remain.  -> (B, m+1)"""
    ends = (u[:, None] < stride.shares(known)[:, :-1, None]).sum(2)
    return torch.cat([ends, torch.full_like(ends[:, :1], u.shape[1])], 1)


def _laid_out(
    problems: Problems, tokens: Tensor, order: Tensor, ends: Tensor, v: Tensor
) -> tuple[Tensor, tuple[TeacherStep, ...]]:
    """The board and the teacher's steps.  tokens, order (S, L), ends (S, m+1), v (B, L)"""
    S, L = tokens.shape
    known = torch.arange(L) < ends[:, :1]
    board = torch.zeros_like(tokens).scatter(1, order, tokens.gather(1, order) * known)
    v, asks = v.repeat_interleave(S // len(v), 0).flatten(), []
    for start, end in zip(ends[:, :-1].unbind(1), ends[:, 1:].unbind(1), strict=True):
        busy = (end > start).nonzero()[:, 0]
        if not len(busy):
            continue
        part, _ = split(board[busy], order[busy], start[busy], end[busy])
        rows = busy[part.target_offsets.owner]
        cells = rows * L + part.targets
        before = problems.target_offsets.bounds[:-1].long() + start - ends[:, 0]
        asks.append(
            TeacherStep(
                problems=part,
                known=busy[part.offsets.owner] * L + part.positions,
                cells=cells,
                places=before[rows] + part.target_offsets.within,
                draws=v[cells],
            )
        )
    return board.flatten(), tuple(asks)


class Teacher:
    """A frozen network that answers lessons; never: ids that it does not draw (a mask, a BOS)."""

    def __init__(self, network: nn.Module, never: tuple[int, ...] = ()):
        self.network = network.eval().requires_grad_(False)
        self.device = device_of(network)
        head = network.head
        assert isinstance(head, Head)
        self.conditional = getattr(network.config, "classes", None) is not None
        with torch.no_grad(), autocast(self.device):
            self.linear = self._linear(head)
        bias = self.linear.bias.clone()
        bias[list(never)] = RULED_OUT
        self.drawn = replace(self.linear, bias=bias)

    def _linear(self, head: Head) -> Linear:
        """Of a network without classes the modulations are constants, and folded into its linear."""
        weight: Tensor = head.linear.weight
        bias: Tensor | None = head.linear.bias
        dtype = product_type(weight)
        if not self.conditional:
            nothing = weight.new_zeros(1, weight.shape[1], dtype=dtype)
            _, weight, bias = head.operands(nothing, self.network.condition())  # type: ignore[operator]
        return Linear.of(weight, bias, head.never, dtype)

    def _read(self, head: Head, x: Tensor, condition: Tensor) -> Tensor:
        """What the last linear takes.  (U', D)"""
        if not self.conditional:
            return head.operands(x, condition)[0]
        n = max(2, len(x))  # a condition of one row would be folded into a linear of its own
        return head.operands(x.expand(n, -1), condition.expand(n, -1))[0][: len(x)]

    @torch.no_grad()
    def __call__(self, lesson: Lesson) -> Taught:
        """Solve a lesson in steps, drawing tokens on the way."""
        lesson = lesson.map(lambda x: x.to(self.device, non_blocking=True))
        board, U = lesson.board.clone(), len(lesson.weights)
        hidden = self.linear.weight.new_zeros(U, self.linear.weight.shape[1])
        for number, ask in enumerate(lesson.asks, 1):
            problems = replace(ask.problems, tokens=board[ask.known])
            with autocast(self.device):
                found = self.network(problems, self._read).to(hidden.dtype)
            hidden[ask.places] = found
            if number < len(lesson.asks):
                board[ask.cells] = self._draw(found, ask.draws)
        return Taught(lesson.problems, lesson.weights, hidden)

    def _draw(self, hidden: Tensor, u: Tensor) -> Tensor:
        """A token for each target.  (U', D), (U',) -> (U',)"""
        P = len(self.drawn.bias)
        rows = chunk_size(len(hidden), P, torch.float64)
        into, drawn = self.drawn.bias.new_empty(min(rows, len(hidden)), P), []
        for h, each in zip(hidden.split(rows), u.split(rows), strict=True):
            drawn.append(lg.draw(self.drawn.logits(h, into), each))
        return torch.cat(drawn)

    def loss(self, kind: Divergence, network: nn.Module, taught: Taught) -> Tensor:
        """The sum over a lesson of a student's divergence from this teacher."""
        given: dict[str, Any] = {"hidden": taught.hidden, "weights": taught.weights}
        return network(taught.problems, partial(divergence, teacher=self.linear, kind=kind, **given))


def lessons(
    rows: TokenRows,
    config: TrainConfig,
    stride: Stride,
    groups: str,
    step: int,
    *,
    pad: int | None = None,
    **share: Any,
) -> tuple[list[Lesson], int]:
    """This process's pieces of a step's global batch, and how many targets of the whole batch count.

    share: as `pieces_of` takes it.
    """
    numbers = global_batch(step, config.batch, len(rows), config.seed)
    t, u = noise(config.batch, rows.length, seed=config.seed, step=step)
    generator = torch.Generator().manual_seed(mixed_seed(config.seed, step, DRAWS))
    v = torch.rand(config.batch, rows.length, generator=generator, dtype=torch.float64)
    build = {"one": one_group, "two": two_groups}[groups]

    def lesson(piece: slice, tokens: Tensor, valid: Tensor) -> Lesson:
        return build(tokens, t[piece], u[piece], v[piece], valid, stride, lead=rows.given)

    found = list(pieces_of(rows, config, numbers, u, lesson, pad=pad, **share))
    counted = rows.counted(u if pad is None else rows.rows(numbers), pad)
    if groups == "one":
        counted = counted & (u >= stride.pace.known(t)[:, None])
    return found, max(1, int(counted.sum()))


def teaching(
    teacher: Teacher, kind: Divergence, rows: TokenRows, config: TrainConfig, stride: Stride, groups: str, **share: Any
) -> Workload:
    """What the steps of a round work on; share: as `lessons` takes it.

    Of the teacher's steps each has a shape of its own, so nothing is captured.
    """
    return Workload(
        pieces=lambda step: lessons(rows, config, stride, groups, step, **share),
        loss=partial(teacher.loss, kind),
        ready=teacher,
    )
