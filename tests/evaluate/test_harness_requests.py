"""What the harness makes of each request: its room, its own random numbers, its target, and how to draw."""

import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from maskless.checkpoint import Model
from maskless.codec.text import byte_codec, train_bpe
from maskless.evaluate import harness
from maskless.evaluate.harness import Scorer

needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'maskless[lm-eval]'"
)
L = 12


def asked(*args: Any) -> types.SimpleNamespace:
    """A request of lm-eval."""
    return types.SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def model(tiny) -> Model:
    """Over bytes, decided enough that draws show."""
    return Model(tiny("position", vocab=257, length=L, scale=0.25), byte_codec())


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """A model whose tokenizer has one token for "answer" and one for "answ"."""
    codec = train_bpe(["answer question answer correct incorrect " * 300], 300)
    folder = tmp_path_factory.mktemp("answers")
    Model(tiny("position", vocab=codec.vocab, length=L, scale=0.25), codec).save_pretrained(folder)
    return folder


@pytest.fixture
def lm(saved) -> Callable[..., Any]:
    return lambda **how: harness.register()(str(saved), device="cpu", samples=4, **how)


@pytest.mark.parametrize(
    ("layout", "prompt", "most", "kept", "made"),
    [
        ("packed", 5, 256, 5, 7),  # lm-eval's default of new tokens is more than the whole context
        ("packed", 5, 3, 5, 3),
        ("packed", 9, 256, 6, 6),  # too little room is left: half of it is the answer's
        ("packed", 40, 256, 6, 6),
        ("packed", 40, 2, 10, 2),
        ("packed", 0, 256, 0, 12),
        ("wrapped", 5, 256, 5, 6),
        ("wrapped", 40, 256, 6, 5),
    ],
)
def test_the_prompt_comes_first_and_the_answer_gets_what_it_leaves(tiny, monkeypatch, layout, prompt, most, kept, made):
    def fill(model, rows, *, known, **how):
        seen.append([row[mask].tolist() for row, mask in zip(rows, known, strict=True)])
        return types.SimpleNamespace(tokens=torch.where(known, rows, 65))

    seen: list[list[list[int]]] = []
    monkeypatch.setattr(harness.api, "fill", fill)
    scorer = Scorer(Model(tiny("position", vocab=257, length=L), byte_codec(), layout), block=4)
    ids = list(range(prompt))
    assert scorer.continued([ids], [], most) == ["A" * made]
    assert seen[0] == [scorer.lead + ids[prompt - kept :]]


def test_repeats_differ_and_no_answer_depends_on_the_batch_size(model):
    prompts = [list(b"once")] * 4 + [list(b"upon"), list(b"a")] * 2
    found = [Scorer(model, batch=b, block=4).continued(prompts, [], 6, temperature=1.0) for b in (1, 2, 3, 32)]
    assert found[0] == found[1] == found[2] == found[3]
    assert len(set(found[0][:4])) == 4
    assert Scorer(model, seed=1).continued(prompts, [], 6, temperature=1.0) != found[0]


@needs_lm_eval
def test_requests_with_other_settings_are_numbered_on(lm):
    """Both groups of settings say the same, so only the number of a request tells its answers apart."""
    settings = [{"temperature": 1.0, "max_gen_toks": 5, **until} for until in ({}, {"until": []})]
    answers = lm(batch_size=1).generate_until([asked("answ", how) for how in settings], disable_tqdm=True)
    assert answers[0] != answers[1]


def scores(scorer: Scorer) -> list[float]:
    requests = [(list(b"once"), list(b"upon a"))] * 4 + [(list(b"a"), list(b"time")), (list(b"ab"), list(b"cde"))] * 2
    return [score for score, _ in scorer.score(requests)]


def documents(scorer: Scorer) -> list[float]:
    return scorer.whole([list(b"once upon a time")] * 4)


@pytest.mark.parametrize("asked_for", [scores, documents])
def test_nothing_depends_on_the_batch_size_and_the_same_request_is_split_anew(model, asked_for):
    found = [asked_for(Scorer(model, batch=b, samples=2)) for b in (1, 3, 32)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-4)
    assert len({round(score, 3) for score in found[0][:4]}) == 4


@needs_lm_eval
def test_processes_have_random_numbers_of_their_own(lm, monkeypatch):
    def process(rank: int) -> Callable[..., Any]:
        return lambda **_: types.SimpleNamespace(process_index=rank, num_processes=3, device=torch.device("cpu"))

    seeds = []
    for rank in range(3):
        monkeypatch.setattr(harness, "PartialState", process(rank))
        seeds.append(lm(seed=5).scorer.seed)
    assert seeds[0] == 5
    assert len(set(seeds)) == 3


@needs_lm_eval
def test_a_token_over_the_boundary_belongs_to_the_target(lm):
    model = lm()
    encode = model.tok_encode
    assert len(encode("answer")) == len(encode("answ")) == 1
    assert model._pair("answ", "er") == ([], encode("answer"))
    assert model._pair("correct answ", "er") == (encode("correct"), encode(" answer"))
    (score, _), (other, _) = model.loglikelihood([asked("answ", "er"), asked("answ", "x")], disable_tqdm=True)
    assert score < -0.1
    assert other < -0.1


@needs_lm_eval
@pytest.mark.parametrize(("context", "rest"), [("answer", " correct"), ("answer ", "correct"), ("question  ", "x")])
def test_where_no_token_is_over_the_boundary_the_split_is_that_of_lm_eval(lm, context, rest):
    model = lm()
    assert model._pair(context, rest) == model._encode_pair(context, rest)
    assert model._pair("", rest) == ([], model.tok_encode(rest))


@needs_lm_eval
@pytest.mark.parametrize("context", ["answer", "answer ", ""])
def test_an_empty_continuation_is_refused(lm, context):
    with pytest.raises(ValueError, match=rf"^the continuation '' of '{context}' is empty: expected a token to score$"):
        lm().loglikelihood([asked(context, " correct"), asked(context, "")], disable_tqdm=True)


@pytest.mark.parametrize(
    ("given", "temperature", "most"),
    [
        ({}, 0.0, 256),
        ({"do_sample": False, "temperature": 0.7}, 0.0, 256),
        ({"do_sample": False}, 0.0, 256),
        ({"do_sample": True}, 1.0, 256),
        ({"do_sample": True, "temperature": 0.7}, 0.7, 256),
        ({"do_sample": True, "temperature": 0.0}, 0.0, 256),
        ({"temperature": 0.7}, 0.7, 256),
        ({"temperature": 0.0}, 0.0, 256),
        ({"max_gen_toks": 9}, 0.0, 9),
        ({"max_new_tokens": 5}, 0.0, 5),
        ({"max_tokens": 5}, 0.0, 5),
        ({"max_completion_tokens": 5}, 0.0, 5),
        ({"max_tokens": 5, "max_new_tokens": 6, "max_gen_toks": 7}, 0.0, 7),
    ],
)
def test_how_to_draw_follows_the_rules_of_lm_eval(given, temperature, most):
    asked_for = {"until": ["\n"], **given}
    until, tokens, how = harness._generation(asked_for)
    assert (until, tokens, how) == (["\n"], most, {"temperature": temperature})
    if find_spec("lm_eval") is None:
        return
    import lm_eval.models.utils as theirs

    if hasattr(theirs, "normalize_gen_kwargs"):  # the oldest has none
        normal = theirs.normalize_gen_kwargs(asked_for)
        assert (normal["until"], normal["max_gen_toks"]) == (until, tokens)
        unset = 1.0 if normal["do_sample"] else 0.0  # transformers draws at 1 where nothing is said
        assert normal.get("temperature", unset) == temperature


def test_a_greedy_answer_takes_no_filter():
    assert harness._generation({"do_sample": False, "temperature": 1.0, "top_p": 0.9, "top_k": 5})[2] == {
        "temperature": 0.0
    }
    assert harness._generation({"do_sample": True, "top_p": 0.9})[2] == {"temperature": 1.0, "top_p": 0.9}
