"""Revision: the tokens that a finished draft makes least likely are decided again.

Two groups that predict each other say in one pass how likely each token is beside the others: nothing but a network
that answers problems is needed. Decided again, those tokens see nearly the whole text, which no token of the draft did.
So a text comes to agree with itself; like a temperature below 1, that is no longer the model's own distribution.

Shapes: B rows, L length.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.nn import Network
from maskless.nn.loss import answer_costs
from maskless.order import random
from maskless.problems import split

FIRST, LAST = 1 / 8, 1 / 16  # share of the decided tokens that the first and the last round revise
GROUP, ORDER = 4, 5  # purposes of random numbers; those of sampling are 0 to 3


def share(number: int, rounds: int) -> float:
    """Of the decided tokens, how many a round revises."""
    return FIRST + (LAST - FIRST) * number / max(1, rounds - 1)


def cooled(temperature: float, number: int, rounds: int) -> float:
    """The temperature of a round: it falls, and the last one takes the most likely tokens."""
    return temperature * (1 - (number + 1) / rounds)


def steps_of(steps: int, rounds: int) -> list[int]:
    """The steps of each round after a draft of so many, with about as much time for each token."""
    return [math.ceil(steps * share(number, rounds)) for number in range(rounds)]


def to_revise(
    network: Network,
    tokens: Tensor,
    known: Tensor,
    wanted: Tensor,
    keys: Tensor,
    *,
    number: int,
    rounds: int,
    labels: Tensor | None = None,
) -> Tensor:
    """Which of the wanted tokens of each row a round revises: the least likely ones.  -> (B, L) bool

    tokens (B, L), decided where wanted; known (B, L) are given and stay; keys (B,) from `row_keys`; labels (B,) of
    classes.
    """
    count = (wanted.sum(1).double() * share(number, rounds)).ceil()
    rank = likelihoods(network, tokens, known, wanted, keys, labels).argsort(dim=1, stable=True).argsort(1)
    return wanted & (rank < count[:, None])


@torch.no_grad()
def likelihoods(
    network: Network, tokens: Tensor, known: Tensor, wanted: Tensor, keys: Tensor, labels: Tensor | None = None
) -> Tensor:
    """log p of each wanted token given the known ones and half of the other wanted ones; elsewhere inf.  -> (B, L)"""
    B, L = tokens.shape
    u = [lg.uniforms(keys[:, None], torch.arange(L), purpose) for purpose in (GROUP, ORDER)]
    rank = u[0].masked_fill(~wanted, torch.inf).argsort(1).argsort(1)
    group = (rank >= (wanted.sum(1, keepdim=True) + 1) // 2).long()  # halves of the wanted
    stages = [torch.where(known, 0, torch.where(wanted, 1 + one, 3)) for one in (group, 1 - group)]
    order = torch.cat([random(stage, u[1]) for stage in stages])  # known, one half, the other half, absent
    starts, ends = (torch.cat([(stage <= last).sum(1) for stage in stages]) for last in (1, 2))
    twice = tokens.repeat(2, 1)
    problems, index = split(twice, order, starts, ends)
    problems = replace(problems, labels=None if labels is None else labels.repeat(2))
    found = torch.zeros(2 * B * L, dtype=torch.float64)
    found[index] = -answer_costs(network, problems, twice.flatten()[index])
    return found.view(2, B, L).sum(0).masked_fill(~wanted, torch.inf)  # each is a target in one of its row's problems
