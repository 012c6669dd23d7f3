"""Weights of any precision are folded in float32: a network that was cast is sampled from as its float32 copy is."""

import pytest
import torch

from maskless.engine import Engine
from maskless.logits import row_keys
from maskless.order import ORDERS, uniform
from maskless.plans import plan, plan_causal

B, L = 4, 8


@pytest.mark.parametrize("kind", ["position", "ordered", "masked", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_any_precision_are_folded(tiny, kind, dtype):
    network, keys, known = tiny(kind).to(dtype), row_keys(1, torch.arange(B)), torch.arange(L).expand(B, L) < 3
    tokens = torch.arange(L).repeat(B, 1) * known
    way = plan(known, ~known, keys, steps=3, order=ORDERS["random"], counts=uniform)
    way = plan_causal(known, ~known) if kind == "causal" else way
    mine = tokens.clone()
    Engine(network).sample(mine, way, keys)
    Engine(network.float()).sample(tokens, way, keys)
    assert torch.equal(mine, tokens)
