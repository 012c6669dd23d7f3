"""The models in the package are what their cards say, and do what they are there for."""

import functools
import math
import shlex

import pytest
import torch

import maskless
from in_process import exit_code_of
from maskless import shipped
from maskless.checkpoint import digest
from maskless.cli.models import TRY

MIB = 2**20
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was stuck in a tree. Lily was sad."
)


load = functools.cache(maskless.load)


def test_there_are_four_and_they_are_small():
    sizes = {name: shipped.describe(name).bytes for name in shipped.names()}
    assert sizes.keys() == {"stories", "stories-ar", "stories-mdlm", "cifar10"}
    assert max(sizes.values()) < 24 * MIB
    assert sum(sizes.values()) < 64 * MIB


@pytest.mark.parametrize("name", shipped.names())
def test_a_card_is_that_of_the_weights_and_leaves_nothing_open(name):
    card, model = shipped.card(name), load(name)
    assert digest(model.network) in card
    for part in ("## Data and licence", "## Training", "## Limits", "## Figures", "seed", "minutes"):
        assert part in card
    assert "Not measured" not in card


def perplexity(model: maskless.Model, text: str) -> float:
    tokens = model.codec.encode(text)
    how = {"samples": 8} if model.kind == "masked" else {"order": "left"}
    found = maskless.log_likelihood(model, torch.tensor([tokens]), **how)
    return math.exp(-float(found) / len(tokens))


@pytest.mark.parametrize("name", ["stories", "stories-ar", "stories-mdlm"])
def test_a_story_is_likely_and_its_words_out_of_order_are_not(name):
    words = STORY.split()
    torch.manual_seed(0)
    mixed = " ".join(words[i] for i in torch.randperm(len(words)).tolist())
    story, nonsense = perplexity(load(name), STORY), perplexity(load(name), mixed)
    assert story < 8
    assert nonsense > 4 * story


def test_a_gap_that_has_one_answer_gets_it():
    for gapped, whole in (
        ("Once upon [2], there was a little boy.", "Once upon a time, there was a little boy."),
        ('There was a girl named Lily. One day, Lily\'s mom said, "[1], come here!"', "Lily"),
        ("Tom saw a dog. The [1] was happy and wagged its tail.", "The dog was"),
    ):
        assert whole in maskless.fill(load("stories"), gapped, temperature=0)


def test_pictures_have_their_class():
    """Ships lie on blue or grey, frogs do not: what a mean colour can tell."""
    model = load("cifar10")
    drawn = maskless.generate(model, labels=["ship"] * 6 + ["frog"] * 6, guidance=8.0, steps=16, seed=0)
    pixels = torch.stack([torch.tensor(list(one.image.getdata()), dtype=torch.float32).mean(0) for one in drawn])
    blue = pixels[:, 2] - pixels[:, 0]
    assert blue[:6].mean() > blue[6:].mean() + 10


def test_what_the_list_tells_to_try_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert TRY.keys() == set(shipped.names())
    assert exit_code_of("models") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line in TRY.values()] == [
        TRY[name] for name in shipped.names()
    ]
    for command in TRY.values():
        program, *words = shlex.split(command)
        assert program == "maskless"
        fewer = ("--steps", 4) if "--label" in words else ("--length", 24)
        assert exit_code_of(*words, "--n", 2, *fewer) == 0, capsys.readouterr().err
    assert "Once upon a time" in capsys.readouterr().out
    assert (tmp_path / "new.png").stat().st_size > 1000
