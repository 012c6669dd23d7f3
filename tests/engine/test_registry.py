"""An engine is used as long as the weights are those it was made from, and no longer."""

import copy

import pytest
import torch
from torch import nn

from maskless import Model, generate
from maskless.codec.text import byte_codec
from maskless.engine import engine_of
from maskless.engine.registry import sums_of


def merged(weight: torch.Tensor) -> None:
    """As an adapter of low rank is merged."""
    weight.data += 0.3 * torch.outer(*(torch.randn(n) for n in weight.shape))


def one(weight: torch.Tensor) -> None:
    weight.data[3, 5] += weight.data[3, 5].nextafter(torch.ones_like(weight.data[3, 5])) - weight.data[3, 5]


def rows(weight: torch.Tensor) -> None:
    weight.data.copy_(weight.data.roll(2, 0))


def columns(weight: torch.Tensor) -> None:
    weight.data.copy_(weight.data.roll(2, 1))


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("change", [merged, one, rows, columns])
def test_a_change_that_torch_does_not_count_is_noticed(tiny, change, width):
    network = tiny("ordered", width=width)
    for name in ("encoder.0.qkv", "decoder.1.mlp.down", "head.linear"):
        weight, before = network.get_submodule(name).weight, engine_of(network)
        assert engine_of(network) is before
        version = weight._version
        change(weight)
        assert weight._version == version
        assert engine_of(network) is not before


@pytest.mark.parametrize("kind", ["position", "ordered", "masked", "causal"])
def test_texts_are_those_of_the_weights_there_are(tiny, kind):
    torch.manual_seed(0)
    model = Model(tiny(kind, scale=0.25, vocab=258, length=20), byte_codec())
    first = generate(model, 3)
    for parameter in model.network.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    second = generate(model, 3)
    assert second == generate(copy.deepcopy(model), 3) != first


def test_weights_of_any_type_and_place_are_looked_at():
    network, store = nn.Module(), torch.zeros(2000)
    network.odd = nn.Parameter(store[3:604])  # begins and ends in the middle of eight bytes
    network.rough = nn.Parameter(torch.zeros(7, 77, dtype=torch.bfloat16))
    network.turned = nn.Parameter(torch.zeros(20, 30).t())
    network.register_buffer("table", torch.zeros(5, dtype=torch.bool))
    network.none = nn.Parameter(torch.zeros(0))
    before = sums_of(network)
    for tensor in (network.odd, network.rough, network.turned, network.table):
        tensor.data[..., -1] = 1
        after = sums_of(network)
        assert after.shape == before.shape
        assert not torch.equal(after, before)
        before = after


@pytest.mark.gpu
@pytest.mark.parametrize("change", [one, rows, columns])
def test_a_change_on_a_gpu_is_noticed(tiny, change):
    network = tiny("ordered", width=64).cuda()
    for name in ("encoder.0.qkv", "decoder.1.mlp.down", "head.linear"):
        before = engine_of(network)
        assert engine_of(network) is before
        change(network.get_submodule(name).weight)
        assert engine_of(network) is not before
