"""Every choice of `How` is a field of a request, and of nothing else than its own name and range."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from maskless.how import How
from maskless.serve.requests import CompletionRequest, FillRequest, GenerateRequest, PictureFillRequest, PictureRequest
from maskless.serve.state import how_of

CHOICES = {one.name: one for one in fields(How)}
BODIES = [GenerateRequest, FillRequest, CompletionRequest, PictureRequest, PictureFillRequest]


@pytest.mark.parametrize("body", BODIES)
def test_every_choice_is_a_field_with_the_same_default_and_the_same_help(body):
    for name, choice in CHOICES.items():
        assert body.model_fields[name].default == choice.default
        assert body.model_fields[name].description == choice.metadata["help"]


def test_a_request_has_nothing_to_sample_with_that_is_no_choice():
    apart = {"model", "stream", "prompt", "length", "n"}
    assert set(GenerateRequest.model_fields) - apart == set(CHOICES)


def test_what_is_not_said_is_left_to_the_model():
    assert how_of(GenerateRequest()) == How()
    assert how_of(GenerateRequest(steps=4, order="left", revise=2)) == How(steps=4, order="left", revise=2)


@pytest.mark.parametrize("name", [name for name, choice in CHOICES.items() if choice.metadata["least"] is not None])
def test_what_the_library_refuses_the_server_refuses(name):
    below = CHOICES[name].metadata["least"] - 1
    with pytest.raises(ValidationError):
        GenerateRequest(**{name: below})
    with pytest.raises(ValueError, match="out of range"):
        How(**{name: below})
