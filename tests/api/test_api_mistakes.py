"""A user's mistakes are value errors that name what was given and what was expected."""

from pathlib import Path

import pytest
import torch
from api_models import KINDS, L, over_bytes

import maskless
from maskless import Model, fill, generate, log_likelihood


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"steps": 2}, r"one step per token \(4 here\) from left to right"),
        ({"order": "left", "steps": 3}, "from left to right"),
        ({"strands": 2}, "a causal model writes from left to right, not by strands"),
    ],
)
def test_a_causal_model_says_what_it_cannot_do(causal, how, message):
    with pytest.raises(ValueError, match=message):
        generate(causal, length=4, **how)
    with pytest.raises(ValueError, match="cannot fill a gap that has text after it"):
        fill(causal, "a[2]b")
    with pytest.raises(ValueError, match="a causal model knows one order only: expected 'left'"):
        log_likelihood(causal, "ab", order="strands")


ROW, HALF = torch.zeros(1, 4, dtype=torch.long), torch.tensor([[True, True, False, False]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: generate(m, steps=L + 1), f"steps {L + 1} is out of range: expected 1 to {L}"),
        (lambda m: fill(m, "ab[5]c", steps=6), "steps 6 is out of range: expected 1 to 5"),
        (lambda m: generate(m, n=0), "n 0 is out of range"),
        (lambda m: generate(m, length=L + 1), f"length {L + 1} is out of range: expected 1 to {L}"),
        (lambda m: generate(m, prompt="abc", length=3), "length 3 is out of range: expected 4 to"),
        (lambda m: generate(m, prompt="a" * L), f"the prompt is {L} tokens long: expected less than the model's"),
        (lambda m: generate(m, regions=2), "regions 2 are of images: this is a text model"),
        (lambda m: generate(m, order="spiral"), "unknown order 'spiral': expected one of random, left, strands"),
        (lambda m: generate(m, counts="sine"), "unknown counts 'sine': expected one of uniform, mdlm"),
        (lambda m: fill(m, f"a[{L}]"), f"{L + 1} tokens long: expected at most the model's context of {L}"),
        (lambda m: fill(m, f"a[{L + 1}]"), f"the gaps are {L + 1} tokens long: expected at most {L} with the text"),
        (lambda m: fill(m, "[0000999999999]"), "the gaps are 999,999,999 tokens long: expected at most"),
        (lambda m: fill(m, "no gap here"), "no gap in the template"),
        (lambda m: fill(m, "a[2]", known=torch.ones(1, 3)), "known= goes with token ids"),
        (lambda m: log_likelihood(m, "abc", torch.ones(1, 3)), "known= goes with token ids"),
        (lambda m: generate(m, prompt=["a", "b"]), r"a text is \['a', 'b'\]: expected one string, not a list"),
        (lambda m: fill(m, 7), "a text is 7: expected one string, not a int"),
        (lambda m: log_likelihood(m, [["a"], ["b"]]), "tokens is a list: expected whole numbers"),
        (lambda m: log_likelihood(m, [[1, 2], [3]]), "tokens is a list: expected whole numbers, as many in each row"),
        (lambda m: log_likelihood(m, torch.zeros(1, 3)), "tokens of torch.float32: expected whole numbers"),
        (lambda m: m.predict([[0.5]], [[0]], [[1]]), "tokens of torch.float64: expected whole numbers"),
        (lambda m: fill(m, ["a[2]"], n=2), "n 2 goes with one text: expected no list"),
        (lambda m: fill(m, ROW, known=HALF, n=2), "n 2 goes with one text: expected token ids once"),
        (lambda m: fill(m, "a[2]", n=0), "n 0 is out of range: expected 1 or more"),
        (lambda m: log_likelihood(m, torch.zeros(1, 3).long(), known=[[True]]), r"known \(1, 1\): expected \(B, L\)"),
        (lambda m: log_likelihood(m, "abc", seed=-1), "seed -1 is out of range"),
        (lambda m: generate(m, seed=1.5), "seed 1.5: expected a whole number from 0 to"),
        (lambda m: fill(m, torch.zeros(0, 3).long(), known=torch.zeros(0, 3)), r"\(0, 3\): expected 1 row or more"),
        (lambda m: fill(m, torch.zeros(1, 3).long()), "with known= a mask of the same shape"),
        (lambda m: fill(m, "a[2]", numbers=torch.zeros(1)), "numbers= does"),
        (lambda m: fill(m, ROW, known=HALF, numbers=torch.arange(3)), r"numbers \(3,\) of 1 rows: expected one"),
        (lambda m: fill(m, torch.zeros(1, 99).long(), known=torch.zeros(1, 99)), f"model's context of {L}"),
        (lambda m: log_likelihood(m, "x" * (L + 1)), f"rows of {L + 1} tokens exceed the model's context of {L}"),
        (lambda m: log_likelihood(m, ROW + 257), "a token is 257: expected 0 to 256"),
        (lambda m: log_likelihood(m, ROW.repeat(2, 1), ROW), r"tokens \(2, 4\), known \(1, 4\): expected \(B, L\) for"),
        (lambda m: log_likelihood(m, ROW, samples=0), "samples 0 is out of range: expected 1 or more"),
        (lambda m: fill(m, ROW + 257, known=HALF), "a token is 257: expected 0 to 256"),
        (lambda m: generate(m, length=4, seed=2**64), "seed 18446744073709551616 is out of range: expected 0 to"),
    ],
)
def test_mistakes_are_named_with_what_was_expected(plain, call, message):
    with pytest.raises(ValueError, match=message):
        call(plain)


@pytest.mark.parametrize("model", ["stories", Path("stories"), None, torch.zeros(2)])
def test_what_is_not_a_model_is_named(model):
    given = "'stories'" if isinstance(model, str | Path) else f"a {type(model).__name__}"
    for call in (lambda: generate(model), lambda: fill(model, "a[2]"), lambda: log_likelihood(model, "a")):
        with pytest.raises(ValueError, match=f"model is {given}: expected what maskless.load gives"):
            call()


def test_a_compiled_model_is_a_model(plain):
    assert generate(torch.compile(plain), length=4) == generate(plain, length=4)


def test_a_model_without_a_tokenizer_says_so(tiny):
    bare = Model(tiny("position"))
    for call in (lambda: generate(bare), lambda: fill(bare, "a[2]"), lambda: log_likelihood(bare, "abc")):
        with pytest.raises(ValueError, match="brings no tokenizer: name one with tokenizer="):
            call()
    assert fill(bare, torch.zeros(1, 4).long(), known=torch.zeros(1, 4)).tokens.shape == (1, 4)


@pytest.mark.parametrize(
    ("part", "how", "says"),
    [
        ("", {"tokenizer": "bytes"}, "the tokenizer bytes has 257 ids, the model .* only 11"),
        ("", {"weights": "raw"}, "weights and queries are chosen for released files only: {folder} is none"),
        ("", {"device": "cuda:99"}, "device 'cuda:99' cannot be used: "),
        ("", {"device": "abacus"}, "device 'abacus' cannot be used: "),
        ("", {"device": torch.device("cuda:99")}, "device 'cuda:99' cannot be used: "),
        ("model.safetensors", {}, "model.safetensors is a part of a model: give its folder, {folder}$"),
        ("config.json", {}, "config.json is a part of a model: give its folder, {folder}$"),
    ],
)
def test_what_cannot_be_loaded_is_named(tiny, tmp_path, part, how, says):
    Model(tiny("position")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says.format(folder=tmp_path)):
        maskless.load(tmp_path / part, **{"device": "cpu"} | how)


@pytest.mark.parametrize("kind", [*KINDS, "causal"])
@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"temperature": 0}, {"on_step": lambda step: None}])
def test_a_model_of_nan_is_named_instead_of_sampled_from(tiny, kind, how):
    model = over_bytes(tiny, kind)
    torch.nn.init.constant_(model.network.head.norm.weight, torch.nan)
    for call in (lambda: generate(model, 2, length=6, **how), lambda: fill(model, "ab[4]", **how)):
        with pytest.raises(ValueError, match="no token can be drawn: the model's logits are NaN, or rule out"):
            call()
