"""The tasks of a step: a global batch of rows with their noise, shared out over processes, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from maskless.data.tokens import TokenRows, global_batch
from maskless.mixture import Mixture
from maskless.objective import OBJECTIVES, Objective, Task, chain, drop_labels, noise
from maskless.train.config import TrainConfig


def objective_of(config: TrainConfig, lead: int = 0, grid: tuple[int, int] | None = None) -> Objective:
    """What builds the tasks of a run. The lead of an image is never predicted; that of a text is, and soon learned."""
    if config.task != "chain":
        return OBJECTIVES[config.task]
    mixture = Mixture.parse(config.orders, image=grid is not None)
    return chain(partial(mixture.draw, lead=lead, grid=grid), given=lead if grid else 0)


def tasks_of(
    rows: TokenRows, config: TrainConfig, build: Objective, step: int, *, pad: int | None = None, **share: Any
) -> tuple[list[Task], int]:
    """This process's pieces of a step's global batch, and how many tokens of the whole batch count.

    share: as `pieces_of` takes it.
    """
    t, u = noise(config.batch, rows.length, seed=config.seed, step=step)
    numbers = global_batch(step, config.batch, len(rows), config.seed)

    def task(piece: slice, tokens: Tensor, counted: Tensor) -> Task:
        return build(tokens, t[piece], u[piece], counted)

    tasks = list(pieces_of(rows, config, numbers, u, task, pad=pad, **share))
    if pad is None:
        return tasks, config.batch * (rows.length - rows.given)
    return tasks, int(rows.counted(rows.rows(numbers), pad).sum())


def pieces_of(
    rows: TokenRows,
    config: TrainConfig,
    numbers: np.ndarray,
    u: Tensor,
    build: Callable[[slice, Tensor, Tensor], Any],
    *,
    world: int = 1,
    rank: int = 0,
    pad: int | None = None,
    pinned: bool = False,
) -> Iterator[Any]:
    """The pieces of a process's share of a global batch, made by `build`, with labels of which some are dropped.

    numbers, u: of the whole batch's rows, and their noise; build: takes which of them, their tokens, and which count.
    """
    size, first = config.batch // (world * config.accumulate), rank * config.accumulate
    for i in range(first, first + config.accumulate):
        piece = slice(i * size, (i + 1) * size)
        tokens, labels = rows.rows(numbers[piece]), rows.labels(numbers[piece])
        made = build(piece, tokens, rows.counted(tokens, pad))
        if labels is not None:
            made = made.labelled(drop_labels(labels, u[piece, 0], config.label_dropout, rows.classes))
        yield made.map(Tensor.pin_memory) if pinned else made
