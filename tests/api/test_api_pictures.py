"""Pictures by label: one label is as good as a list of one."""

from __future__ import annotations

import pytest
import torch

from maskless import Model, generate
from maskless.codec.vq import PixelCodec
from maskless.nn.partition import PartitionConfig, PartitionTransformer


@pytest.fixture(scope="module")
def artist() -> Model:
    torch.manual_seed(0)
    sizes = {"vocab": 7, "length": 10, "width": 16, "heads": 2, "encoder": 1, "decoder": 1, "condition": 8}
    network = PartitionTransformer(PartitionConfig(**sizes, grid=(3, 3), classes=2))
    return Model(network, PixelCodec(5), "image", ["dog", "cat"])


@pytest.mark.parametrize("label", ["cat", 1])
def test_a_single_label_is_a_list_of_one(artist, label):
    (one,), (other,) = generate(artist, labels=label), generate(artist, labels=["cat"])
    assert one.label == other.label == "cat"
    assert torch.equal(one.tokens, other.tokens)


def test_a_single_label_that_is_unknown_is_named_whole(artist):
    with pytest.raises(ValueError, match="unknown label 'bird': expected one of dog, cat"):
        generate(artist, labels="bird")
    with pytest.raises(ValueError, match="a label is 2: expected 0 to 1"):
        generate(artist, labels=2)
