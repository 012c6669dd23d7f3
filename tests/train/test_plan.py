"""Sizes that nobody gave: they follow the text and the device, and always make a network."""

import itertools

import pytest
import torch

from maskless.checkpoint import NETWORKS
from maskless.codec.text import TextCodec, byte_codec
from maskless.train.config import MODELS, TEXT_MODELS, TrainConfig
from maskless.train.plan import network_config, plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = [10**n for n in range(3, 11)]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_longer_text_never_gets_less(device):
    for small, large in itertools.pairwise(plan(n, device) for n in SIZES):
        assert small.length <= large.length
        assert small.steps * small.batch * small.length <= large.steps * large.batch * large.length
        assert (small.vocab or 0) <= (large.vocab or 0)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("characters", SIZES)
def test_the_steps_pass_the_text_at_most_forty_times_or_are_fifty(characters, device):
    sizes = plan(characters, device)
    tokens = characters if sizes.vocab is None else characters / 3.5
    assert sizes.steps == 50 or sizes.steps * sizes.batch * sizes.length <= 40 * tokens
    assert sizes.vocab is None or (sizes.vocab.bit_count() == 1 and 512 <= sizes.vocab <= 8192)
    assert characters >= 50_000 or sizes.vocab is None


def test_with_minutes_the_clock_decides():
    assert plan(1000, CPU, minutes=1.0).steps == 10_000_000
    TrainConfig(steps=plan(1000, CPU, minutes=1.0).steps)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_every_plan_makes_a_network(model, device):
    sizes = plan(10**6, device)
    config = network_config(model, byte_codec(), sizes.length, width=sizes.width, layers=sizes.layers)
    with torch.device("meta"):
        network = NETWORKS[MODELS[model][0]][1](config)
    assert sum(p.numel() for p in network.parameters()) > 0
    assert config.length == sizes.length
    assert config.width % config.heads == 0


def test_a_masked_network_gets_a_mask_of_its_own_unless_the_vocabulary_has_one(tmp_path):
    plain = network_config("mdlm", byte_codec(), 16, width=32, layers=2)
    assert (plain.mask, plain.vocab) == (257, 258)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    bert = network_config("mdlm", TextCodec.load(tmp_path / "vocab.txt"), 16, width=32, layers=2)
    assert (bert.mask, bert.vocab) == (4, 6)
    assert network_config("pgm", byte_codec(), 16, width=32, layers=2).vocab == 257


@pytest.mark.parametrize(("given", "depth"), [({}, (3, 4)), ({"encoder": 2}, (2, 5)), ({"encoder": 6}, (6, 1))])
def test_layers_are_shared_out_over_encoder_and_decoder(given, depth):
    config = network_config("pgm", byte_codec(), 16, width=32, layers=7, **given)
    assert (config.encoder, config.decoder) == depth


@pytest.mark.parametrize(
    ("model", "wrong", "says"),
    [
        ("gpt", {}, "unknown model 'gpt': expected one of pgm, mdlm, mdlm-complementary, ar"),
        ("pgm", {"encoder": 4}, "encoder 4 of 4 layers: expected 1 to 3"),
        ("pgm", {"encoder": 0}, "encoder 0 of 4 layers: expected 1 to 3"),
        ("mdlm", {"encoder": 2}, "context, queries, swap, neighbours and encoder belong to pgm: the model is mdlm"),
        ("ar", {"context": "ordered"}, "context, queries, swap, neighbours and encoder belong to pgm: the model is ar"),
        ("mdlm-complementary", {"queries": "mean"}, "neighbours and encoder belong to pgm: the model is mdlm-comp"),
        ("pgm", {"layers": 1}, "layers 1 is out of range: expected 2 or more for pgm"),
        ("ar", {"layers": 0}, "layers 0 is out of range: expected 1 or more for ar"),
        ("ar", {"dropout": 1.0}, "dropout 1.0 is out of range: expected at least 0 and less than 1"),
        ("pgm", {"context": "half"}, "half"),
        ("pgm", {"queries": "maximum"}, "maximum"),
        ("pgm", {"rope": "2d"}, "rope '2d' is for pictures: a text has one dimension"),
    ],
)
def test_sizes_that_make_no_network_are_named(model, wrong, says):
    with pytest.raises(ValueError) as raised:
        network_config(model, byte_codec(), 16, **{"width": 32, "layers": 4} | wrong)
    assert says in str(raised.value)
