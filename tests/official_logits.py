"""Sizes of small released checkpoints, and how far a network's logits are from the released architecture's."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from maskless.nn.partition import PartitionTransformer
from maskless.problems import partition
from nn.reference import masked_logits, partition_logits

SIZES = {"vocab": 13, "width": 16, "heads": 2, "condition": 8}
PGM, MDLM = SIZES | {"encoder": 2, "decoder": 1}, SIZES | {"blocks": 2}
LENGTH = 12


def split_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(12, (3, LENGTH), generator=generator)
    return tokens, torch.randint(2, (3, LENGTH), generator=generator)


@torch.no_grad()
def difference(network, state, mode: str = "learn+freqs") -> float:
    """The largest gap between a network's logits and those of the released architecture with this state."""
    tokens, groups = split_batch()
    order = groups.argsort(dim=1, stable=True)
    problems, index = partition(tokens, order, (groups == 0).sum(1))
    if isinstance(network, PartitionTransformer):
        expected = partition_logits(state, tokens, groups, 2, mode).flatten(0, 1)[index]
    else:
        shown = [masked_logits(state, tokens.masked_fill(groups != g, 12), 2) for g in (0, 1)]
        predicted_from = 1 - groups.flatten()[index]
        expected = torch.stack(shown).flatten(1, 2)[predicted_from, index]
    return float((network.eval()(problems)[:, :-1] - expected[:, :-1]).abs().max())


def one_line(error: pytest.ExceptionInfo, path: Path) -> bool:
    message = str(error.value)
    return str(path) in message and "\n" not in message
