"""Recipes are values: each makes a network and settings, and the paper's sizes have the paper's parameters."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maskless.checkpoint import NETWORKS
from maskless.codec.text import TextCodec
from maskless.codec.vq import VQ
from maskless.data.image_tokens import PreparedImages
from maskless.problems import dense
from maskless.recipes import RECIPES, Goal, recipe
from maskless.train.codec import configure
from maskless.train.config import MODELS, TrainConfig
from maskless.train.plan import image_network_config, network_config

PAPERS = [name for name, found in RECIPES.items() if found.source.startswith("PGM, Tab. 5")]
CODECS = [name for name, found in RECIPES.items() if found.command == "train-codec"]
PICTURES = [name for name, found in RECIPES.items() if found.measure]
TEXTS = [name for name in RECIPES if name not in (*CODECS, *PICTURES)]
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


def perplexity(name: str) -> float:
    (goal,) = RECIPES[name].goals
    assert goal.figure == "perplexity"
    return goal.value


def tokens(codes: int, grid: int, classes: int) -> PreparedImages:
    """What prepared pictures say of themselves."""
    sizes = {"size": 8 * grid, "filter": "bilinear", "channels": 3, "grid": (grid, grid), "codes": codes}
    names = {"classes": tuple(map(str, range(classes))), "broken": (), "sources": ()}
    return PreparedImages(folder=Path("data"), dtype="uint16", flips=False, skipped=0, splits={}, **sizes, **names)


@pytest.mark.parametrize("name", [*TEXTS, *PICTURES])
def test_every_recipe_makes_a_network_and_settings(name, vocabulary):
    found = RECIPES[name]
    settings = TrainConfig(**found.train)
    if name in TEXTS:
        config = network_config(settings.model, vocabulary(300), found.length, **found.network)
    else:
        pictures = tokens(64, round((found.length - 1) ** 0.5), 10)
        config = image_network_config(settings.model, pictures, **found.network)
        assert settings.model == "maskgit" or settings.task == "pgm-arccos"
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
    assert 20 < perplexity(name) < 40


@pytest.mark.parametrize(("data", "millions"), [("cifar10", 33), ("pictures64", 61)])
def test_networks_on_the_same_tokens_are_of_one_size_and_trained_alike(data, millions):
    codec = recipe(f"{data}-codec", "train-codec")
    sizes = dict(codec.network)
    config = configure(Path("absent"), ["images"], factor=sizes.pop("factor"), codec=sizes, **codec.train)
    with torch.device("meta"):
        grid = config.size // VQ(config.codec).factor
    assert grid == 16
    assert codec.length == 1 + grid * grid
    found = [recipe(f"{data}-{model}") for model in ("pgm", "pgm-ordered", "maskgit")]
    made = tokens(config.codec.codes, grid, 10)
    configs = [image_network_config(one.train["model"], made, **one.network) for one in found]
    counts = [parameters(one.train["model"], config) for one, config in zip(found, configs, strict=True)]
    assert max(counts) < 1.07 * min(counts)
    assert abs(min(counts) - millions * 1e6) < 1e6
    assert len({str(one.train | {"model": ""}) for one in found}) == 1
    assert len({one.prepare for one in found}) == 1
    assert all(f"--codec runs/{codec.name} --size {config.size} " in one.prepare for one in found)


def test_models_of_stories_are_twins_and_small_enough_to_ship(vocabulary):
    found = [recipe(name) for name in ("stories", "stories-mdlm", "stories-ar")]
    configs = [network_config(one.train["model"], vocabulary(4096), one.length, **one.network) for one in found]
    shipped = [replace(config, condition=1) for config in configs]  # as tools/ship.py writes them
    counts = [parameters(one.train["model"], config) for one, config in zip(found, shipped, strict=True)]
    assert max(counts) < 1.05 * min(counts)
    assert 2 * max(counts) < 13.6 * 2**20  # and its tokenizer: 14 MiB in half precision
    own = {"model", "objective", "orders"}
    assert len({str({key: one.train[key] for key in one.train if key not in own}) for one in found}) == 1
    assert {one.commands[0] for one in found} == {f"maskless prepare {found[0].prepare} --out data/stories"}


@pytest.mark.parametrize("swap", ["gated", "released"])
def test_only_the_gated_swap_of_stories_tells_positions_apart_after_one_token(tiny, swap):
    assert recipe("stories").network["swap"] == "gated"
    network = tiny("ordered", scale=0.3, swap=swap)
    logits = network(dense(torch.tensor([[3]]), torch.tensor([[0]]), torch.arange(1, 8)[None]))
    spread = float((logits - logits[0]).abs().max().detach())
    assert spread > 1e-3 if swap == "gated" else spread < 1e-5


def test_the_figures_of_imagenet_are_the_papers():
    best = {}
    for name in ("maskgit", "pgm-12-12", "pgm-14-10"):
        goals = recipe(f"imagenet-{name}").goals
        assert len(goals) == 2 * 2 * 2 * 7  # figures, orders, steps, weights
        assert len(set(goals)) == len({(goal.figure, goal.at) for goal in goals}) == len(goals)
        halton = [goal for goal in goals if goal.figure == "FID" and goal.at.startswith("halton")]
        best[name] = min(halton, key=lambda goal: goal.value)
    assert best["pgm-12-12"] == Goal("FID", 4.56, "halton, 64 steps, w = 2")
    assert best["maskgit"] == Goal("FID", 5.35, "halton, 32 steps, w = 1")
    assert best["pgm-14-10"] == Goal("FID", 4.76, "halton, 64 steps, w = 2")
    assert Goal("Inception Score", 313.27, "confidence, 32 steps, w = 6") in recipe("imagenet-pgm-12-12").goals


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_needs_and_what_it_should_reach(name):
    found = RECIPES[name]
    assert found.name == name
    assert all(goal.value > 1 for goal in found.goals)
    assert found.goals or found.ran == "not run by us"
    assert found.source
    assert found.hardware
    assert found.ran
    if name in CODECS:
        assert found.commands == (f"maskless train-codec --recipe {name} --images {found.prepare} --out runs/{name}",)
        return
    prepare, train, *measure = found.commands
    folder = re.fullmatch(r"maskless prepare .* --out (\S+)", prepare)[1]
    assert train == f"maskless train --recipe {name} --data {folder} --out runs/{name}"
    if name in PICTURES:
        assert measure == [f"maskless evaluate runs/{name} --reference {found.measure} --out runs/{name}/quality.json"]
    else:
        assert not measure
        assert f"--length {found.length}" in prepare


def test_longer_training_reaches_a_lower_perplexity():
    pairs = [(RECIPES[name], RECIPES[f"{name}-200k"]) for name in RECIPES if f"{name}-200k" in RECIPES]
    assert len(pairs) == 7
    for late, early in pairs:
        assert perplexity(late.name) < perplexity(early.name)
        assert late.network == early.network
        assert (late.train["steps"], early.train["steps"]) == (1_000_000, 200_000)


# Their vocabulary holds a mask, so GPT-2's 50,257 words make 50,258 where a network has no mask of its own.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owt-mdlm", 169_627_218),
        ("owt-mdlm-complementary", 169_627_218),
        ("owt-pgm-6-6-200k", 171_996_498),
        ("owt-pgm-8-8", 202_708_818),
        ("owt-pgm-10-6-200k", 202_707_282),
        ("owt-pgm-6-6-1024", 268_092_754),
        ("lm1b-mdlm", 139_292_986),
        ("lm1b-pgm-6-6", 141_662_266),
        ("imagenet-pgm-12-12", 494_220_290),
        ("imagenet-pgm-14-10", 494_218_242),
        ("imagenet-maskgit", 480_443_393),
    ],
)
def test_networks_have_the_parameters_of_the_released_ones(name, expected, vocabulary):
    found = recipe(name)
    model = found.train["model"]
    if found.measure:
        config = image_network_config(model, tokens(16_384, 32, 1000), **found.network)
    else:
        masked, bert = MODELS[model][0] == "masked", name.startswith("lm1b")
        words = vocabulary(30_522 if bert else 50_257 if masked else 50_258, mask=bert)
        config = network_config(model, words, found.length, **found.network)
    assert parameters(model, config) == expected


@pytest.mark.parametrize(
    ("name", "command", "says"),
    [
        ("owt-gpt", "train", f"unknown recipe 'owt-gpt': expected one of {', '.join([*TEXTS, *PICTURES])}"),
        ("cifar10-codec", "train", "recipe 'cifar10-codec' is for train-codec: expected one of lm1b-mdlm"),
        ("storys", "train", "unknown recipe 'storys' (did you mean stories?): expected one of lm1b-mdlm"),
        ("cifar10-pgm", "train-codec", "recipe 'cifar10-pgm' is for train: expected one of cifar10-codec, pictures64"),
    ],
)
def test_an_unknown_recipe_lists_the_known_ones(name, command, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        recipe(name, command)
