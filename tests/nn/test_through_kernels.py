"""A whole training pass through the Triton kernels, interpreted, has the loss and the gradients of plain torch."""

import os
from functools import partial

import pytest
import torch
from torch import Tensor

from maskless.mixture import Mixture
from maskless.nn import attention, blocks
from maskless.nn.loss import cost
from maskless.nn.partition import GroupSwap, PartitionConfig, PartitionTransformer
from maskless.objective import OBJECTIVES, noise
from maskless.objective import chain as chain_of
from maskless.train.distill import Stride, one_group
from tiny_networks import shaken

SIZES = {"vocab": 50, "length": 33, "width": 64, "heads": 2, "encoder": 2, "decoder": 2, "condition": 8}
PICTURES = {"classes": 2, "registers": True, "grid": (4, 8)}


def passed(kinds: dict, *, chain: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch, and the gradient of every parameter."""
    torch.manual_seed(0)
    network = shaken(PartitionTransformer(PartitionConfig(**SIZES, **kinds)), 0.1).train()
    tokens = torch.randint(40, (3, 33), generator=torch.Generator().manual_seed(1))
    t, u = noise(3, 33, seed=0, step=0)
    objective, labels = ("pgm-arccos", torch.tensor([0, 1, 2])) if "classes" in kinds else ("pgm", None)
    lead = int("classes" in kinds)
    draw = partial(Mixture.parse("random").draw, lead=lead)
    build = chain_of(draw, given=lead) if chain else OBJECTIVES[objective]
    task = build(tokens, t, u, torch.ones_like(tokens)).labelled(labels)
    loss = network(task.problems, partial(cost, answers=task.answers, weights=task.weights))
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in network.named_parameters()}


INTERPRETED = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="set TRITON_INTERPRET=1 where Triton is installed"
)


ORDERED = {"context": "ordered"}


@INTERPRETED
@pytest.mark.parametrize(
    ("kinds", "chain"),
    [
        pytest.param({}, False, id="full"),
        pytest.param(ORDERED, False, id="ordered"),
        pytest.param(ORDERED, True, id="chain"),
        pytest.param({"swap": "residual"}, False, id="residual"),
        pytest.param({"swap": "gated"}, False, id="gated"),
        pytest.param(PICTURES, False, id="pictures"),
        pytest.param({**PICTURES, **ORDERED, "rope": "2d"}, False, id="pictures, ordered, 2d"),
        pytest.param({**PICTURES, **ORDERED, "rope": "2d"}, True, id="pictures, chain, 2d"),
    ],
)
def test_a_training_pass_through_the_kernels_is_that_of_plain_torch(kinds, chain, monkeypatch):
    kernels = pytest.importorskip("maskless.nn.cuda")
    plain_loss, plain = passed(kinds, chain=chain)
    called = []

    class Counted:
        def __getattr__(self, name):
            called.append(name)
            return getattr(kernels, name)

    for module in (attention, blocks):
        monkeypatch.setattr(module, "KERNELS", Counted())
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    monkeypatch.setattr(attention, "_fits_kernels", lambda q: True)
    loss, gradients = passed(kinds, chain=chain)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], rtol=0, atol=1e-5 * (float(plain[name].abs().max()) + 1e-3))
    spread = "classes" in kinds and not chain  # the segments of a chain are equal
    assert set(called) == {"attend_rotated"} | ({"sum_segments"} if spread else set())


@INTERPRETED
@pytest.mark.parametrize("context", ["full", "ordered"])
def test_layers_are_compiled_for_contexts_of_any_size(context, monkeypatch):
    """The lessons of one group know another number of tokens in each step."""
    kernels = pytest.importorskip("maskless.nn.cuda")
    for module in (attention, blocks):
        monkeypatch.setattr(module, "KERNELS", kernels)
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    monkeypatch.setattr(attention, "_fits_kernels", lambda q: True)
    torch._dynamo.reset()
    network, graphs = PartitionTransformer(PartitionConfig(**SIZES, context=context)), []
    for layer in network.modules():
        if isinstance(layer, blocks.SelfBlock | blocks.CrossBlock | GroupSwap):
            layer.compile(backend="aot_eager")
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        tokens, draws = torch.randint(40, (3, 33), generator=generator), torch.rand(2, 3, 33, generator=generator)
        t, (u, v) = 0.2 + 0.6 * torch.rand(3, generator=generator).double(), draws.double()
        lesson = one_group(tokens, t, u, v, torch.ones_like(tokens).bool(), Stride(share=0.1, ratio=2))
        network(lesson.problems, blocks.read_logits).logsumexp(1).sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * 5
