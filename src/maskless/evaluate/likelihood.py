"""The validation bound of a model on prepared tokens, in nats per token, with its standard error.

Shapes: N sequences, L length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather
from torch import Tensor, nn

from maskless.data.tokens import TokenRows
from maskless.how import check_positive
from maskless.nn import Network, autocast, device_of
from maskless.objective import bound, paper_bound


@dataclass(frozen=True)
class Likelihood:
    """A bound on the negative log-likelihood per token, from N sequences."""

    nats: float
    error: float  # standard error of nats; nan: of one sequence
    sequences: int
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))

    @property
    def perplexity_error(self) -> float:
        return self.perplexity * self.error

    def bits_per_byte(self, bytes_per_token: float) -> float:
        return self.nats / math.log(2) / bytes_per_token

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity": self.perplexity, "perplexity_error": self.perplexity_error}


def likelihood(
    network: Network,
    rows: TokenRows,
    *,
    samples: int = 8,
    lead: int = 0,
    paper: bool = False,
    **how: Any,
) -> Likelihood:
    """The bound on evenly spread sequences of a split, shared out over the processes there are.

    paper: the paper's estimator (one time per sequence, one group), for comparison with its tables; otherwise both
    groups and `samples` splits per sequence. Padding does not count. lead: so many tokens begin every row and every
    order that a chain was trained on; they are given. how: keywords of `over_rows`.
    """
    check_positive(samples=samples)
    if paper and rows.given:
        raise ValueError("the paper's estimator is for text: pictures have the other one only")

    def cost(tokens: Tensor, counted: Tensor, numbers: np.ndarray, own: int) -> Tensor:
        if paper:
            return paper_bound(network, tokens, counted=counted, seed=own)
        known = (torch.arange(tokens.shape[1]) < max(lead, rows.given)).expand_as(tokens)
        labels = rows.labels(numbers)
        return bound(network, tokens, known, counted=counted, labels=labels, samples=samples, seed=own)

    return over_rows(network, rows, cost, **how)


# tokens, counted (B, L), numbers, seed -> nats (B,); it may clear what of counted is not to be counted
Cost = Callable[[Tensor, Tensor, np.ndarray, int], Tensor]


def over_rows(
    network: Network,
    rows: TokenRows,
    cost: Cost,
    *,
    sequences: int = 512,
    batch: int = 64,
    seed: int = 0,
    pad: int | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Likelihood:
    """The cost of evenly spread rows, each process computing its share, as nats per counted token."""
    check_positive(sequences=sequences, batch=batch)
    chosen = spread(len(rows), sequences)
    state = PartialState()
    share = -(-len(chosen) // state.num_processes)  # the same for all: a sharded network computes in step
    mine = np.resize(chosen, share * state.num_processes)[state.process_index :: state.num_processes]
    costs, counts = [], []
    for begin in range(0, len(mine), batch):
        numbers = mine[begin : begin + batch]
        tokens = rows.rows(numbers)
        counted = rows.counted(tokens, pad)
        own = seed + int(numbers[0])  # a batch's draws depend on its first row, not on the batches before it
        with autocast(device_of(network)), _as_written(network):
            costs.append(cost(tokens, counted, numbers, own))
        counts.append(counted.sum(1).double())
        if on_batch is not None:
            on_batch(len(numbers))
    return summary(_everywhere(torch.cat(costs), len(chosen)), _everywhere(torch.cat(counts), len(chosen)))


def _as_written(network: Network) -> AbstractContextManager[object]:
    """Layers that a training run has compiled are not compiled again for these shapes.

    That is a setting of the whole process, so it is left alone where nothing is compiled.
    """
    modules = network.modules() if isinstance(network, nn.Module) else ()
    compiled = any(module._compiled_call_impl is not None for module in modules)
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def spread(rows: int, sequences: int) -> np.ndarray:
    """The numbers of at most so many rows, evenly spread over all of them."""
    return np.unique(np.linspace(0, rows - 1, min(sequences, rows)).astype(np.int64))


def summary(costs: Tensor, counts: Tensor) -> Likelihood:
    """Ratio of sums, and the standard error of that ratio over sequences; of one sequence there is none."""
    n, tokens = len(costs), float(counts.sum())
    nats = float(costs.sum()) / tokens
    spread = (costs - nats * counts).square().sum().sqrt() / tokens
    return Likelihood(nats, float(spread) * math.sqrt(n / (n - 1)) if n > 1 else math.nan, n, int(tokens))


def _everywhere(values: Tensor, total: int) -> Tensor:
    """The values of all processes in the order of the sequences, without those that made the shares even."""
    state = PartialState()
    joined = gather(values.to(state.device)).cpu() if state.num_processes > 1 else values
    return joined.view(state.num_processes, -1).T.flatten()[:total]
