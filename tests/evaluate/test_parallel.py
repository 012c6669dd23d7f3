"""What parallel steps lose: shares, tokens per round and divergence agree with each other and with extremes."""

import json

import pytest

from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.evaluate.orders import parallel
from maskless.mixture import Mixture


@pytest.fixture(scope="module")
def model(tiny) -> Model:
    codec = byte_codec()
    network = tiny("ordered", scale=0.2, vocab=codec.vocab, length=13, width=32)
    return Model(network, codec, mixture=Mixture.parse("random=1"))


def test_one_token_at_a_time_loses_nothing(model):
    (one,) = parallel(model, ["random"], [1], texts=4)
    assert (one.accepted, one.divergence, one.tokens_per_round) == (1.0, 0.0, 1.0)
    (one,) = parallel(model, ["random"], [6], texts=8, top_k=1)
    assert one.divergence is None  # of what a filter rules out
    assert one.tokens_per_round < 6


def test_more_tokens_at_once_lose_more(model):
    few, many = parallel(model, ["random"], [2, 12], texts=8, batch=3)
    assert 0 < few.divergence < many.divergence
    assert few.accepted > many.accepted
    assert 1 < few.tokens_per_round <= 2
    same = next(parallel(model, ["random"], [2], texts=8, batch=8))  # up to rounding in batches of another shape
    assert (same.accepted, same.tokens_per_round) == (few.accepted, few.tokens_per_round)
    assert same.divergence == pytest.approx(few.divergence, rel=1e-4)


def test_the_model_s_own_nucleus_is_left_out(model):
    narrow = Model(model.network, model.codec, mixture=model.mixture, defaults={"top_p": 0.5})
    own, said = (list(parallel(one, ["random"], [6], texts=4)) for one in (narrow, model))
    assert own == said  # with the nucleus the divergence would be infinite
    assert own[0].divergence is not None


def test_the_command_prints_a_row_for_each(model, tmp_path, command):
    model.save_pretrained(tmp_path)
    asked = ("--what", "parallel", "--draft", "2,3", "--order", "random", "--texts", 2, "--json")
    found = json.loads(command("evaluate", tmp_path, *asked).out)["parallel"]["parallel"]
    assert [one["draft"] for one in found] == [2, 3]
