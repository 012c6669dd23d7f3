"""A whole training pass through the Triton kernels, interpreted, has the loss and the gradients of plain torch."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor

from maskless.nn import attention, blocks
from maskless.nn.loss import cost
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.objective import OBJECTIVES, noise

SIZES = {"vocab": 50, "length": 33, "width": 64, "heads": 2, "encoder": 2, "decoder": 2, "condition": 8}
PICTURES = {"classes": 2, "registers": True, "grid": (4, 8)}


def passed(kinds: dict) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch, and the gradient of every parameter."""
    torch.manual_seed(0)
    network = PartitionTransformer(PartitionConfig(**SIZES, **kinds))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    tokens = torch.randint(40, (3, 33), generator=torch.Generator().manual_seed(1))
    t, u = noise(3, 33, seed=0, step=0)
    objective, labels = ("pgm-arccos", torch.tensor([0, 1, 2])) if "classes" in kinds else ("pgm", None)
    task = OBJECTIVES[objective](tokens, t, u, torch.ones_like(tokens)).labelled(labels)
    loss = network(task.problems, partial(cost, answers=task.answers, weights=task.weights))
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="set TRITON_INTERPRET=1 where Triton is installed")
@pytest.mark.parametrize(
    "kinds",
    [{}, {"context": "ordered"}, {"swap": "residual"}, PICTURES, {**PICTURES, "context": "ordered", "rope": "2d"}],
    ids=["full", "ordered", "residual", "pictures", "pictures, ordered, 2d"],
)
def test_a_training_pass_through_the_kernels_is_that_of_plain_torch(kinds, monkeypatch):
    kernels = pytest.importorskip("maskless.nn.cuda")
    plain_loss, plain = passed(kinds)
    called = []

    class Counted:
        def __getattr__(self, name):
            called.append(name)
            return getattr(kernels, name)

    for module in (attention, blocks):
        monkeypatch.setattr(module, "KERNELS", Counted())
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    monkeypatch.setattr(attention, "_fits_kernels", lambda q: True)
    loss, gradients = passed(kinds)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], rtol=0, atol=1e-5 * (float(plain[name].abs().max()) + 1e-3))
    assert set(called) == {"attend_turned"} | ({"sum_segments"} if "classes" in kinds else set())
