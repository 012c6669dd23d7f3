"""A model's own defaults: what its folder names, where a user says nothing of that kind, at every door."""

import json

import pytest

import maskless
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.how import How
from maskless.mixture import Mixture

OWN = {"strands": 4, "top_p": 0.5, "temperature": 0.7}


@pytest.fixture(scope="module")
def model(tiny):
    network = tiny("ordered", scale=0.3, vocab=258, never=None, length=24)
    return Model(network, byte_codec(), mixture=Mixture.parse("strands=60,gaps=20,random=20"), defaults=OWN)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, OWN),
        ({"temperature": 1}, {"temperature": 1, "top_p": None, "strands": 4}),
        ({"top_k": 5}, {"temperature": 1.0, "top_k": 5, "top_p": None, "strands": 4}),
        ({"steps": 8}, {"steps": 8, "strands": None, "top_p": 0.5}),
        ({"exact": True}, {"exact": True, "strands": None, "top_p": 0.5}),
        ({"guidance": 0.0}, {"guidance": 0.0, **OWN}),
        ({"seed": 3}, OWN),
    ],
)
def test_what_is_said_replaces_the_defaults_of_its_kind(said, found):
    how = How(**said).with_defaults(OWN | {"guidance": 2.0} if "guidance" in said else OWN, 20)
    assert {name: getattr(how, name) for name in found} == found


def test_without_defaults_the_model_is_as_it_is():
    assert How().with_defaults({}, 20) == How(temperature=1.0, guidance=0.0)


def test_steps_are_at_most_the_unknown_tokens_and_a_second_time_changes_nothing():
    own = {"steps": 64, "revise": 4, "top_p": 0.9}
    how = How().with_defaults(own, 10)
    assert (how.steps, how.revise, how.top_p) == (10, 4, 0.9)
    assert how.with_defaults(own, 10) == how
    assert How(exact=True).with_defaults(own, 10).revise == 0


def test_generate_and_fill_take_them(model, tmp_path):
    assert maskless.generate(model, 2) == maskless.generate(model, 2, **OWN) != maskless.generate(model, 2, top_p=1)
    assert maskless.fill(model, "a [9] b") == maskless.fill(model, "a [9] b", **OWN)
    model.save_pretrained(tmp_path)
    again = maskless.load(tmp_path)
    assert again.defaults == OWN
    assert maskless.generate(again, 2) == maskless.generate(model, 2)
    assert maskless.generate(again)[0].rounds == 6


def test_evaluate_measures_what_generate_gives(model, tmp_path, command, judge):
    model.save_pretrained(tmp_path / "model")
    written = [str(text) for text in maskless.generate(model, 16)]
    ended = command(
        *("evaluate", tmp_path / "model", "--what", "genppl", "--judge", judge, "--texts", 16),
        *("--save-texts", "--out", tmp_path / "out.json"),
    )
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "out.json").read_text())
    (point,) = found["points"]
    assert point["steps"] == 6
    assert point["texts"] == written
    assert (found["conditions"]["temperature"], found["conditions"]["top_p"]) == (0.7, 0.5)


def test_figures_of_the_usual_order_are_not_taken_for_those_of_another(model, tmp_path, command, judge):
    model.save_pretrained(tmp_path / "model")
    words = ["evaluate", tmp_path / "model", "--what", "genppl", "--judge", judge, "--texts", 4, "--steps", 6]
    assert command(*words, "--out", tmp_path / "out.json").code == 0
    assert command(*words, "--out", tmp_path / "out.json", "--order", "strands").code == 0
    refused = command(*words, "--out", tmp_path / "out.json", "--order", "random")
    assert refused.code == 2
    assert "order" in refused.err


@pytest.mark.parametrize("wrong", [{"temprature": 1}, {"top_p": 3}, {"seed": 1}, [1], {"order": "left", "strands": 2}])
def test_defaults_that_cannot_be_are_refused(model, tmp_path, wrong):
    with pytest.raises((ValueError, TypeError)):
        Model(model.network, byte_codec(), defaults=wrong)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"defaults": wrong}))
    with pytest.raises(ValueError, match="not a maskless config"):
        maskless.load(tmp_path)
