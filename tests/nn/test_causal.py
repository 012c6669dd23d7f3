"""The causal transformer: a token sees only those before it."""

import pytest
import torch
from torch import Tensor

from maskless.problems import Problems, dense

L = 8


def prefix(tokens: Tensor, targets: Tensor) -> Problems:
    return dense(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), targets)


def rows(n: int, count: int = 3) -> Tensor:
    return torch.randint(11, (count, n), generator=torch.Generator().manual_seed(1))


def all_positions(n: int, count: int = 3) -> Tensor:
    return torch.arange(n).expand(count, n)


@torch.no_grad()
def test_a_token_moves_only_the_logits_behind_it(tiny):
    network, tokens = tiny("causal"), rows(L - 1)
    before = network(prefix(tokens, all_positions(L))).unflatten(0, (3, L))
    for position in range(L - 1):
        changed = tokens.clone()
        changed[1, position] = (tokens[1, position] + 1) % 11
        moved = (network(prefix(changed, all_positions(L))).unflatten(0, (3, L)) != before).any(-1)
        assert not moved[[0, 2]].any()
        assert moved[1].tolist() == [target > position for target in range(L)]


@torch.no_grad()
def test_longer_contexts_leave_earlier_targets_as_they_are(tiny):
    network, tokens = tiny("causal"), rows(L)
    target = torch.full((3, 1), 4)
    short, long_ = (network(prefix(tokens[:, :n], target)) for n in (4, L))
    torch.testing.assert_close(short, long_, atol=1e-6, rtol=0)


def test_problems_that_are_no_prefixes_are_refused(tiny):
    network, tokens, target = tiny("causal"), rows(4), torch.full((3, 1), 4)
    network.check(prefix(tokens, target))
    network.check(prefix(tokens[:, :0], torch.zeros(3, 1, dtype=torch.long)))
    shuffled = dense(tokens, torch.tensor([1, 0, 2, 3]).expand(3, 4), target)
    late = dense(tokens, torch.arange(1, 5).expand(3, 4), torch.full((3, 1), 5))
    far = prefix(tokens, torch.full((3, 1), 5))
    ragged = dense(tokens, torch.arange(4).expand(3, 4), target, torch.tensor([4, 3, 4]))
    for problems in (shuffled, late, far, ragged):
        with pytest.raises(ValueError, match="contexts must be prefixes of one length"):
            network.check(problems)
