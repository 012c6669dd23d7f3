"""Pictures by label: one label is as good as a list of one. What concerns texts is refused, and the other way round."""

import copy

import numpy as np
import pytest
import torch

from maskless import fill, generate


def test_without_a_seed_each_call_gives_other_pictures(artist):
    drawn = [str(one.tokens) for _ in range(4) for one in generate(artist, 2, seed=None)]
    assert len(set(drawn)) > 4  # of tiny pictures two may be alike


@pytest.mark.parametrize("label", ["cat", 1])
def test_a_single_label_is_a_list_of_one(artist, label):
    (one,), (other,) = generate(artist, labels=label), generate(artist, labels=["cat"])
    assert one.label == other.label == "cat"
    assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize(
    "labels", [np.int64(1), np.array([1]), [np.int32(1)], torch.tensor(1), torch.tensor([1]), [torch.tensor(1)]]
)
def test_whole_numbers_of_any_library_are_labels(artist, labels):
    assert [one.label for one in generate(artist, labels=labels)] == ["cat"]


@pytest.mark.parametrize("labels", [1.5, [1.5], [1, 0.0], np.array([1.5]), [torch.tensor(1.0)], [None]])
def test_what_is_no_whole_number_is_no_label(artist, labels):
    with pytest.raises(ValueError, match=r"a label is .*: expected a name, or a whole number from 0 to 1"):
        generate(artist, labels=labels)


GREY = np.zeros((3, 3), np.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: generate(m, n=1, prompt="a"), "prompt= is for text models: this is an image model"),
        (lambda m: generate(m, n=1, strands=2), "strands 2 are of text: this is an image model"),
        (lambda m: generate(m, n=1, order="left"), "unknown order 'left': expected one of halton, confidence"),
        (lambda m: generate(m, labels="bird"), "unknown label 'bird': expected one of dog, cat"),
        (lambda m: generate(m, labels=2), "a label is 2: expected 0 to 1"),
        (lambda m: generate(m, labels=[1], guidance=-1), "guidance -1 is out of range"),
        (lambda m: generate(m, labels=[1], order="spiral"), "unknown order 'spiral'"),
        (lambda m: generate(m, labels=[1], steps=10), "steps 10 is out of range: expected 1 to 9"),
        (lambda m: generate(m, n=0), "n 0 is out of range"),
        (lambda m: fill(m, GREY[:2], known=GREY), r"a picture of \(2, 3\) pixels with a mask of \(3, 3\): expected 3"),
        (lambda m: fill(m, GREY), "known= is missing: expected a mask of the picture's pixels"),
        (lambda m: fill(m, "cat.jpg", known=GREY), "a picture is 'cat.jpg': expected a PIL image"),
    ],
)
def test_what_a_model_of_pictures_cannot_use_is_named(artist, call, message):
    with pytest.raises(ValueError, match=message):
        call(artist)


@pytest.mark.parametrize("order", ["halton", "confidence"])
def test_a_model_of_nan_is_named_instead_of_drawn_from(artist, order):
    broken = copy.deepcopy(artist)
    torch.nn.init.constant_(broken.network.head.norm.weight, torch.nan)
    with pytest.raises(ValueError, match="no token can be drawn: the model's logits are NaN"):
        generate(broken, 2, order=order, steps=3)
