"""How a token is drawn: what is done to the logits first, and guidance by a class.

Shapes: B rows, K steps, S problems, U targets, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.nn import Network
from maskless.plans import Plan
from maskless.problems import Problems

BEGINS = 1 / 3  # where in the steps of a row the interval of guidance begins
DRAW, NOISE = 2, 3  # purposes of random numbers; those of plans are 0 and 1
Filter = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits (U, V), rows (U,), positions (U,) -> logits


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Temperature, then top-k, then nucleus; the defaults leave the model's distribution as it is."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is out of range: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is out of range: expected 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is out of range: expected more than 0 and at most 1")

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        logits = lg.temper(logits.float(), self.temperature)
        if self.top_k is not None:
            logits = lg.top_k(logits, self.top_k)
        return logits if self.top_p is None or self.top_p == 1 else lg.top_p(logits, self.top_p)


def constant(progress: Tensor) -> Tensor:
    """The whole weight of the guidance in every step."""
    return torch.ones_like(progress)


def ramp(progress: Tensor) -> Tensor:
    """A weight that grows from 0 in the first step, w * s / (S - 1): the first draws stay varied."""
    return progress


def check_warmup(steps: int) -> None:
    if steps < 0:
        raise ValueError(f"warmup {steps} is out of range: expected 0 (none) or more steps")


def cosine(progress: Tensor) -> Tensor:
    """A weight that grows from 0 slowly, then fast, then slowly: w * (1 - cos(pi s / (S - 1))) / 2."""
    return (1 - (math.pi * progress).cos()) / 2


def interval(progress: Tensor) -> Tensor:
    """No weight in the first third of the steps, then all of it.  Kynkaanniemi et al. 2024"""
    return (progress >= BEGINS).to(progress.dtype)


SCHEDULES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": constant,
    "ramp": ramp,
    "cosine": cosine,
    "interval": interval,
}


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Classifier-free guidance: logits (1 + w) * conditional - w * unconditional, on raw logits.

    dropped: the label that stands for none, with which the unconditional logits are computed; None where the network
    knows no labels. A weight of 0 is no guidance.
    """

    weight: float
    dropped: int | None
    schedule: Callable[[Tensor], Tensor] = ramp  # of a row's progress: the share of the weight

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"guidance {self.weight} is out of range: expected 0 (none) or more")
        if self.weight and self.dropped is None:
            raise ValueError(f"guidance {self.weight} needs a network with class labels: this one knows none")

    def weights(self, plan: Plan) -> Tensor:
        """The weight of each row in each step.  -> (B, K)"""
        return self.weight * self.schedule(plan.progress())


def guided(network: Network, weight: Tensor, dropped: int) -> Network:
    """A network that answers labelled problems with guided logits; weight (U,) at each target.

    Both halves go through the network in one call, twice as wide: a step of sampling is narrow, and two calls would
    read all weights twice. Where no problem has a weight, only the conditional half is computed.
    """
    if not bool(weight.any()):
        return network

    def answer(problems: Problems) -> Tensor:
        conditional, unconditional = network(problems.doubled(dropped)).chunk(2)
        return lg.guide(conditional, unconditional, weight.float().to(conditional.device))

    return answer
