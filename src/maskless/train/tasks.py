"""The tasks of a step: a global batch of rows with their noise, shared out over processes, in pieces."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from maskless.data.image_tokens import ImageTokens
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
    rows: TokenRows,
    config: TrainConfig,
    build: Objective,
    step: int,
    world: int,
    rank: int,
    pad: int | None,
    device: torch.device,
) -> tuple[list[Task], int]:
    """This process's pieces of a step's global batch, and how many tokens of the whole batch count."""
    numbers = global_batch(step, config.batch, len(rows), config.seed)
    t, u = noise(config.batch, rows.length, seed=config.seed, step=step)
    tasks = []
    for piece in pieces_of(config, world, rank):
        tokens = rows.rows(numbers[piece])
        task = build(tokens, t[piece], u[piece], counts(rows, tokens, pad))
        task = task.labelled(labels_of(rows, numbers[piece], u[piece, 0], config.label_dropout))
        tasks.append(task.map(Tensor.pin_memory) if device.type == "cuda" else task)
    if isinstance(rows, ImageTokens):
        return tasks, config.batch * (rows.length - 1)
    count = config.batch * rows.length if pad is None else int(counts(rows, rows.rows(numbers), pad).sum())
    return tasks, count


def pieces_of(config: TrainConfig, world: int, rank: int) -> list[slice]:
    """Which rows of the global batch each piece of a process's share has."""
    size, first = config.batch // (world * config.accumulate), rank * config.accumulate
    return [slice((first + i) * size, (first + i + 1) * size) for i in range(config.accumulate)]


def labels_of(rows: TokenRows, numbers: np.ndarray, u: Tensor, dropped: float) -> Tensor | None:
    """The labels of some rows, a share of them dropped; None where there are no classes.  (n,), (n,) -> (n,)"""
    if not isinstance(rows, ImageTokens) or (labels := rows.labels(numbers)) is None:
        return None
    return drop_labels(labels, u, dropped, rows.classes)


def counts(rows: TokenRows, tokens: Tensor, pad: int | None) -> Tensor:
    """Which tokens count in the loss: all but padding, and the BOS of a picture.  (B, L) -> (B, L) bool"""
    counted = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
    if isinstance(rows, ImageTokens):
        counted[:, 0] = False
    return counted
