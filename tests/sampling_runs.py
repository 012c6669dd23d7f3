"""Tokens of which some are known, logits that leave no doubt, and what `sample` makes of them."""

import torch
from torch import Tensor

from maskless.logits import row_keys
from maskless.order import COUNTS, ORDERS
from maskless.plans import plan
from maskless.sampling import sample

KINDS = ["position", "mean", "logsumexp", "ordered", "masked"]
WAYS = [(order, counts) for order in ORDERS for counts in COUNTS]
EACH = [way for way in WAYS if way[0] == "random" or way[1] == "uniform"]  # every order and all counts, not every pair
B, L, V = 4, 6, 10


def state(rows: int = B, length: int = L, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Random tokens and a random mask of known ones; row 0 knows nothing, row 1 all but one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (rows, length), generator=generator)
    known = torch.rand(rows, length, generator=generator) < 0.4
    known[0] = False
    if rows > 1:
        known[1] = torch.arange(length) != 2
    return tokens, known


def run(network, tokens, known, *, wanted=None, steps=1, order="random", counts="uniform", seed=0, keys=None, **how):
    """What `sample` made of a copy of the tokens, its steps, and the plan; ways by name or as functions."""
    tokens = tokens.clone()
    keys = row_keys(seed, torch.arange(len(tokens))) if keys is None else keys
    ways = {"order": ORDERS.get(order, order), "counts": COUNTS.get(counts, counts)}
    planned = plan(known, ~known if wanted is None else wanted, keys, steps=steps, **ways)
    return tokens, list(sample(network, tokens, planned, keys, **how)), planned


def certain(answers: Tensor, vocab: int = V) -> Tensor:
    """Logits that leave no doubt."""
    return torch.full((len(answers), vocab), -torch.inf).scatter(1, answers[:, None], 0.0)
