"""How noisy the gradient of an objective is: its variance over random splits of one and the same batch.

For independent draws a and b of the splits, |g_a - g_b|^2 / 2 has the variance as its mean and g_a . g_b the square of
the mean gradient: pairs give both without bias, and their spread the standard errors.  PGM, Sec. 3.1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn

from maskless.how import check_positive
from maskless.nn import autocast, device_of
from maskless.nn.calls import evaluating
from maskless.nn.causal import CausalTransformer
from maskless.nn.loss import total_cost
from maskless.nn.masked import MaskedTransformer
from maskless.nn.partition import chains
from maskless.objective import OBJECTIVES, Objective, Task, chain, mixed_seed, noise

# By the network: what its objectives are called, and which they are. All of them estimate the same bound.
TWO_GROUPS = {"pgm": "pgm", "pgm-exact": "pgm-exact", "pgm-released": "pgm-released", "mdlm": "mdlm"}
MASKED = {"mdlm-complementary": "pgm", "mdlm": "mdlm"}


@dataclass(frozen=True)
class Variance:
    """Of the gradient per token; the square of its mean is the signal. Errors are standard errors over pairs."""

    objective: str
    variance: float
    error: float
    signal: float  # |mean gradient|^2
    signal_error: float
    cost: float  # tokens that a draw has the network process, per token of the batch
    pairs: int

    @property
    def noise(self) -> float:
        """Variance over signal: how many batches one would have to average for as much signal as noise."""
        return self.variance / self.signal if self.signal > 0 else math.nan

    @property
    def at_equal_cost(self) -> float:
        """The variance if as many draws were averaged as one pass over every token pays for."""
        return self.variance * self.cost

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"noise": self.noise, "at_equal_cost": self.at_equal_cost}


def objectives_of(network: nn.Module) -> dict[str, Objective]:
    """The objectives that a network can be trained with, by the names of `--model`."""
    if isinstance(network, CausalTransformer):
        raise ValueError("a causal model's gradient has no split to vary: expected pgm, mdlm or mdlm-complementary")
    names = MASKED if isinstance(network, MaskedTransformer) else TWO_GROUPS
    found = {name: OBJECTIVES[task] for name, task in names.items()}
    return found | ({"chain": chain(lambda t, u: u.argsort(1))} if chains(network) else {})


def gradient_variance(
    network: nn.Module,
    tokens: Tensor,
    objective: Objective,
    name: str,
    *,
    pairs: int = 16,
    seed: int = 0,
    valid: Tensor | None = None,
    on_pair: Callable[[int], None] | None = None,
) -> Variance:
    """The variance of the gradient of one objective on one batch, over times and splits.  (B, L) -> Variance

    Without dropout; times are stratified over the batch, as in training. Each process draws its share of the pairs.
    """
    check_positive(pairs=pairs)
    valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    state = PartialState()
    parameters = [p for p in network.parameters() if p.requires_grad]
    first, end = (pairs * rank // state.num_processes for rank in (state.process_index, state.process_index + 1))
    found: list[tuple[float, float, float]] = []
    with evaluating(network):
        for pair in range(first, end):
            own = mixed_seed(seed, pair)
            tasks = [objective(tokens, *noise(*tokens.shape, seed=own, step=i), valid) for i in (0, 1)]
            a, b = (_gradient(network, task, parameters, int(valid.sum())) for task in tasks)
            apart = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True)) / 2
            shared = sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
            found.append((apart, shared, sum(_processed(network, task) for task in tasks) / 2 / tokens.numel()))
            if on_pair is not None:
                on_pair(1)
    everyones = torch.tensor(gather_object(found), dtype=torch.float64)  # (pairs, 3)
    means, errors = everyones.mean(0), everyones.std(0) / math.sqrt(pairs) if pairs > 1 else torch.full((3,), math.nan)
    return Variance(name, float(means[0]), float(errors[0]), float(means[1]), float(errors[1]), float(means[2]), pairs)


def _gradient(network: nn.Module, task: Task, parameters: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Of the loss per token."""
    device = device_of(network)
    task = task.map(lambda x: x.to(device))
    with autocast(device), torch.enable_grad():
        total = total_cost(network, task.problems, task.answers, task.weights)
        found = torch.autograd.grad(total / tokens, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _processed(network: nn.Module, task: Task) -> float:
    """Tokens that pass through all layers: of a Partition Transformer a context one passes half of them, a target half;
    a masked one lays every problem out at full length."""
    if isinstance(network, MaskedTransformer):
        return len(task.problems) * network.config.length
    return (task.problems.offsets.total + task.problems.target_offsets.total) / 2
