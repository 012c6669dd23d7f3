"""`bench sample --exact`: a trained model, in each way to write with it."""

import json

import pytest

from in_process import one_line
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.mixture import Mixture


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """A chain model, a causal one, and one of two groups."""
    at, sizes = tmp_path_factory.mktemp("models"), {"vocab": 258, "length": 17}
    chain = Model(tiny("ordered", never=None, **sizes), byte_codec(), mixture=Mixture.parse("strands=50,random=50"))
    two = Model(tiny("position", never=None, **sizes), byte_codec())
    for name, model in {"chain": chain, "ar": Model(tiny("causal", **sizes), byte_codec()), "two": two}.items():
        model.save_pretrained(at / name)
    return at


def test_every_way_is_timed_at_every_batch(folders, command, tmp_path):
    ended = command(
        *("bench", "sample", "--exact", folders / "chain", "--against", folders / "ar", "--batch", "1,3"),
        *("--repeat", 2, "--device", "cpu", "--out", tmp_path / "out.json"),
    )
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    ways = list(dict.fromkeys(one["way"] for one in found))
    assert [(one["way"], one["batch"]) for one in found] == [(way, batch) for batch in (1, 3) for way in ways]
    assert ways[0] == "one token a step"
    assert ways[-1] == str(folders / "ar")
    for one in found:
        assert len(one["times"]) == 2
        assert one["tokens_per_second"] == pytest.approx(one["batch"] * one["tokens"] / one["seconds"])
        assert one["tokens_per_round"] == pytest.approx(one["tokens"] / one["rounds"])
        if one["way"] in (ways[0], ways[-1]):
            assert one["tokens_per_round"] == 1
        else:
            assert 1 < one["tokens_per_round"] <= (8 if "strands" in one["way"] else 16)
    assert all(part in ended.out for part in ("one token a step", "tokens/s"))


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [
        ("two", [], "--exact needs a text model trained on chains"),
        ("chain", ["--layers", 4], "--layers with --exact"),
        ("chain", ["--repeat", 0], "repeat 0 is out of range"),
        ("chain", ["--batch", "0"], "batch 0 is out of range"),
    ],
)
def test_mistakes_are_named(folders, command, model, more, says):
    assert says in one_line(command("bench", "sample", "--exact", folders / model, "--device", "cpu", *more))
