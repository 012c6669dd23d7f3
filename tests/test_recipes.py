"""Recipes are values: each makes a network and settings, and the paper's sizes have the paper's parameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from maskless.checkpoint import NETWORKS
from maskless.codec.text import TextCodec
from maskless.recipes import RECIPES, recipe
from maskless.train.loop import MODELS, TrainConfig
from maskless.train.plan import network_config

PAPERS = [name for name, found in RECIPES.items() if found.source.startswith("PGM, Tab.")]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """vocabulary(n, mask): a tokenizer of n words, with or without a mask token."""

    def make(n: int, *, mask: bool = False) -> TextCodec:
        words = SPECIAL + ["[MASK]"] * mask
        path: Path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
        path.write_text("\n".join([*words, *(f"word{i}" for i in range(n - len(words)))]))
        return TextCodec.load(path)

    return make


def parameters(model: str, config) -> int:
    with torch.device("meta"):
        network = NETWORKS[MODELS[model][0]][1](config)
    return sum(p.numel() for p in network.parameters())


def size(name: str, codec: TextCodec) -> int:
    found = recipe(name)
    return parameters(found.train["model"], network_config(found.train["model"], codec, found.length, **found.network))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_network_and_settings(name, vocabulary):
    found = RECIPES[name]
    settings = TrainConfig(**found.train)
    config = network_config(settings.model, vocabulary(300), found.length, **found.network)
    assert parameters(settings.model, config) > 0
    assert config.length == found.length


@pytest.mark.parametrize("name", PAPERS)
def test_the_paper_trains_all_its_models_alike(name):
    found = RECIPES[name]
    settings = TrainConfig(**found.train)
    assert settings.steps in (200_000, 1_000_000)
    assert (settings.batch, settings.learning_rate, settings.warmup) == (512, 3e-4, 2_500)
    assert (settings.decay, settings.ema, settings.clip, settings.initial) == ("constant", 0.9999, 1.0, "released")
    assert settings.batch % 16 == 0  # over its GPUs
    assert 20 < found.perplexity < 40


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_needs_and_what_it_should_reach(name):
    found = RECIPES[name]
    assert found.name == name
    assert found.perplexity > 1
    assert found.source
    assert found.hardware
    assert found.ran
    prepare, train = found.commands
    folder = re.fullmatch(r"maskless prepare .* --out (\S+)", prepare)[1]
    assert f"--length {found.length}" in prepare
    assert train == f"maskless train --recipe {name} --data {folder} --out runs/{name}"


def test_longer_training_reaches_a_lower_perplexity():
    pairs = [(RECIPES[name], RECIPES[f"{name}-200k"]) for name in RECIPES if f"{name}-200k" in RECIPES]
    assert len(pairs) == 7
    for late, early in pairs:
        assert late.perplexity < early.perplexity
        assert late.network == early.network
        assert (late.train["steps"], early.train["steps"]) == (1_000_000, 200_000)


# The released networks' own counts; their vocabulary holds a mask, so GPT-2's 50,257 words make 50,258.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owt-mdlm", 169_627_218),
        ("owt-mdlm-complementary", 169_627_218),
        ("owt-pgm-6-6-200k", 171_996_498),
        ("owt-pgm-8-8", 202_708_818),
        ("owt-pgm-10-6-200k", 202_707_282),
        ("owt-pgm-6-6-1024", 268_092_754),
    ],
)
def test_networks_for_gpt2_have_the_parameters_of_the_released_ones(name, expected, vocabulary):
    masked = MODELS[recipe(name).train["model"]][0] == "masked"
    assert size(name, vocabulary(50_257 if masked else 50_258)) == expected


@pytest.mark.parametrize(("name", "expected"), [("lm1b-mdlm", 139_292_986), ("lm1b-pgm-6-6", 141_662_266)])
def test_networks_for_bert_have_the_parameters_of_the_released_ones(name, expected, vocabulary):
    assert size(name, vocabulary(30_522, mask=True)) == expected


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ValueError) as raised:
        recipe("owt-gpt")
    assert str(raised.value) == f"unknown recipe 'owt-gpt': expected one of {', '.join(RECIPES)}"
