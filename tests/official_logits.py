"""Sizes of small released checkpoints, and how far a network's logits are from the released architecture's."""

from pathlib import Path

import pytest
import torch

from maskless.nn.partition import PartitionTransformer
from maskless.problems import partition
from nn.reference import State, masked_logits, partition_logits

SIZES = {"vocab": 13, "width": 16, "heads": 2, "condition": 8}
PGM, MDLM = SIZES | {"encoder": 2, "decoder": 1}, SIZES | {"blocks": 2}
LENGTH = 12


@torch.no_grad()
def difference(network, state: State, mode: str = "learn+freqs") -> float:
    """The largest gap between a network's logits and those of the released architecture with this state."""
    generator, heads, last = torch.Generator().manual_seed(5), network.config.heads, network.config.vocab - 1
    tokens = torch.randint(last, (4, LENGTH), generator=generator)
    groups = torch.randint(2, (4, LENGTH), generator=generator)
    groups[-1] = 1  # every query of the last row has nothing to look at
    problems, index = partition(tokens, groups.argsort(dim=1, stable=True), (groups == 0).sum(1))
    if isinstance(network, PartitionTransformer):
        expected = partition_logits(state, tokens, groups, heads, mode).flatten(0, 1)[index]
    else:
        shown = [masked_logits(state, tokens.masked_fill(groups != g, last), heads) for g in (0, 1)]
        predicted_from = 1 - groups.flatten()[index]
        expected = torch.stack(shown).flatten(1, 2)[predicted_from, index]
    assert expected.std() > 0.3
    return float((network.eval()(problems)[:, :-1] - expected[:, :-1]).abs().max())


def without(state: State, part: str) -> State:
    return {name: value for name, value in state.items() if part not in name}


def one_line(error: pytest.ExceptionInfo, path: Path) -> bool:
    message = str(error.value)
    return str(path) in message and "\n" not in message
