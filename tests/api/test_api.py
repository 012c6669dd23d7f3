"""What a user calls: given text stays, gaps get their tokens, and every sample is its own."""

import pytest
import torch
from api_models import KINDS, L, over_bytes
from torch import Tensor

import maskless
from maskless import Model, Sampled, Text, fill, generate, log_likelihood
from maskless.codec.text import byte_codec, train_bpe
from maskless.objective import bound
from maskless.order import COUNTS, ORDERS
from maskless.texts import _texts
from nn.reference import random_state

WAYS = [*({"order": order} for order in ORDERS), *({"counts": counts} for counts in COUNTS)]
TEMPLATE = "ab[3]cd[4]e"
GAPS = [2, 3, 4, 7, 8, 9, 10]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tiny) -> Model:
    return over_bytes(tiny, request.param)


@pytest.fixture(scope="module")
def words(tiny) -> Model:
    """Over a byte-level BPE, where a space belongs to the word behind it."""
    codec = train_bpe(["the cat sat on the mat, the dog sat on the log"] * 4, 290)
    return Model(tiny("position", scale=0.25, vocab=codec.vocab, length=L), codec)


def consistent(text: Text, unknown: list[int], steps: int) -> None:
    """The attributes of a text tell one story of how it came."""
    assert isinstance(text, str)
    assert len(text.tokens) == len(text.steps)
    assert sorted(text.order) == unknown
    assert [i for i, step in enumerate(text.steps) if step >= 0] == unknown
    came = [text.steps[position] for position in text.order]
    assert came == sorted(came)
    assert set(came) <= set(range(steps))


@pytest.mark.parametrize("how", WAYS)
def test_generate_decides_every_token(model, how):
    texts = generate(model, 3, steps=6, **how)
    assert len(texts) == 3
    for text in texts:
        assert len(text.tokens) == L
        consistent(text, list(range(L)), 6)
        assert text == model.codec.decode(text.tokens)


def test_generate_takes_32_steps_or_as_many_as_there_are_tokens(plain, tiny):
    assert sorted(generate(plain)[0].steps) == list(range(L))
    long = Model(tiny("position", vocab=257, length=40), byte_codec())
    assert set(generate(long)[0].steps) == set(range(32))


def test_a_prompt_is_kept_and_a_length_respected(model):
    texts = generate(model, 2, prompt="Hello", length=11, steps=2)
    for text in texts:
        assert text.startswith("Hello")
        assert text.tokens[:5] == list(b"Hello")
        assert len(text.tokens) == 11
        consistent(text, list(range(5, 11)), 2)


@pytest.mark.parametrize("how", WAYS)
def test_sample_i_is_the_same_whatever_n_and_wherever_one_starts(model, how):
    many = generate(model, 5, steps=4, seed=3, **how)
    one = generate(model, 1, steps=4, seed=3, **how)
    later = generate(model, 2, first=3, steps=4, seed=3, **how)
    assert one == many[:1]
    assert later == many[3:]
    assert [t.tokens for t in later] == [t.tokens for t in many[3:]]
    assert [t.order for t in later] == [t.order for t in many[3:]]


def test_without_a_seed_each_call_gives_other_texts(plain):
    texts = [str(text) for _ in range(4) for text in generate(plain, 2, batch=1, seed=None)]
    assert len(set(texts)) == 8
    assert fill(plain, f"[{L}]", seed=None) not in texts
    scores = {float(log_likelihood(plain, "abcdefgh", samples=2, seed=None)) for _ in range(8)}
    assert len(scores) > 1


def test_greedy_texts_need_no_luck(plain):
    texts = {generate(plain, steps=L, order="left", temperature=0, seed=seed)[0] for seed in range(4)}
    assert len(texts) == 1
    top_one = generate(plain, steps=L, order="left", top_k=1)[0]
    nucleus = generate(plain, steps=L, order="left", top_p=1e-9)[0]
    assert {top_one, nucleus} == texts


@pytest.mark.parametrize("how", WAYS)
def test_fill_keeps_the_given_text_and_fills_every_gap(model, how):
    text = fill(model, TEMPLATE, steps=5, **how)
    assert len(text.tokens) == 12
    assert bytes(text.tokens[i] for i in range(12) if i not in [*GAPS, 11]) == b"abcd"
    consistent(text, GAPS, 5)
    assert text.tokens[11] == ord("e")
    assert (text[:2], text[-1]) == ("ab", "e")


def test_a_gap_may_stand_anywhere(plain):
    for template, unknown in (("[2]xy", [0, 1]), ("xy[2]", [2, 3]), ("[4]", [0, 1, 2, 3]), ("[1][2]", [0, 1, 2])):
        consistent(fill(plain, template), unknown, 4)


@pytest.mark.parametrize("how", WAYS)
def test_a_list_gives_what_its_texts_give_alone(model, how):
    templates = [TEMPLATE, "[9]", "so [5] x[7]!", TEMPLATE]
    for steps in (4, None):
        together = fill(model, templates, steps=steps, seed=2, **how)
        for text, template in zip(together, templates, strict=True):
            alone = fill(model, template, steps=steps, seed=2, **how)
            assert text == alone
            assert (text.tokens, text.steps, text.order) == (alone.tokens, alone.steps, alone.order)
    assert fill(model, [], **how) == []


def test_fill_of_words_keeps_the_spaces_before_gaps(words):
    for seed in range(8):
        text = fill(words, "the [3] sat on [2].", seed=seed)
        assert text.startswith("the ")
        assert " sat on " in text
        assert text.endswith(".")
        given = words.codec.encode("the"), words.codec.encode(" sat on"), words.codec.encode(".")
        kept = [token for token, step in zip(text.tokens, text.steps, strict=True) if step < 0]
        assert kept == [*given[0], *given[1], *given[2]]
        assert len(text.order) == 5


@pytest.mark.parametrize("how", WAYS)
def test_token_ids_are_filled_where_they_are_not_known(model, how):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(257, (3, 9), generator=generator)
    known = torch.rand(3, 9, generator=generator) < 0.4
    before = tokens.clone()
    done = fill(model, tokens, known=known, steps=3, **how)
    assert isinstance(done, Sampled)
    assert torch.equal(tokens, before)
    assert torch.equal(done.tokens[known], tokens[known])
    assert torch.equal(done.steps < 0, known)
    assert [sorted(order) for order in done.order] == [(~row).nonzero()[:, 0].tolist() for row in known]
    blank = fill(model, torch.where(known, tokens, -1), known=known, steps=3, **how)
    assert torch.equal(blank.tokens, done.tokens)


def test_a_row_of_ids_is_the_sample_of_its_number(plain):
    tokens, known = torch.arange(6).repeat(3, 1), torch.arange(6).expand(3, 6) < 2
    done = fill(plain, tokens, known=known).tokens
    turned = fill(plain, tokens, known=known, numbers=torch.tensor([2, 0, 1])).tokens
    assert torch.equal(turned, done[[2, 0, 1]])
    assert len({tuple(row) for row in done.tolist()}) == 3


def test_a_row_of_ids_without_a_gap_stays_as_it_is(plain):
    tokens, known = torch.arange(8).view(2, 4), torch.tensor([[True] * 4, [True, False, True, False]])
    done = fill(plain, tokens, known=known)
    assert done.tokens[0].tolist() == [0, 1, 2, 3]
    assert done.order[0] == []


def test_a_wrapped_model_starts_every_text_with_its_bos(tiny):
    model = Model(tiny("position", vocab=257, length=L), byte_codec(), layout="wrapped")
    text = generate(model, prompt="Hi", length=9)[0]
    assert text.tokens[:3] == [256, *b"Hi"]
    assert text.startswith("Hi")
    consistent(text, list(range(3, 9)), 6)
    filled = fill(model, "a[2]b")
    assert (filled.tokens[:2], filled.tokens[4]) == ([256, ord("a")], ord("b"))
    consistent(filled, [2, 3], 2)


def test_a_causal_model_continues_prompts_of_any_length(causal):
    templates = ["abc[4]", "abcdefg[5]", "[3]"]
    for text, template in zip(fill(causal, templates), templates, strict=True):
        alone = fill(causal, template)
        assert text == alone
        assert text.tokens == alone.tokens
        assert text.order == sorted(text.order)
    assert generate(causal, 1, prompt="abc", length=9) == generate(causal, 3, prompt="abc", length=9)[:1]


def rows_of(model: Model, n: int = 4, length: int = 6) -> Tensor:
    return torch.randint(256, (n, length), generator=torch.Generator().manual_seed(0))


def test_log_likelihood_is_minus_the_bound(model):
    tokens = rows_of(model)
    known = torch.arange(6) < torch.arange(4)[:, None]
    score = log_likelihood(model, tokens, samples=3, seed=5)
    assert score.shape == (4,)
    assert score.dtype == torch.float64
    assert torch.equal(score, -bound(model.network, tokens, samples=3, seed=5))
    given = log_likelihood(model, tokens, known, samples=3, seed=5)
    assert torch.equal(given, -bound(model.network, tokens, known, samples=3, seed=5))
    assert log_likelihood(model, tokens, torch.ones_like(tokens).bool()).tolist() == [0.0] * 4


def test_log_likelihood_takes_a_row_or_a_text_too(model):
    tokens, known = rows_of(model, n=1), torch.tensor([[True, False, False, True, True, False]])
    expected = log_likelihood(model, tokens, known, samples=2)
    assert log_likelihood(model, tokens[0], known[0], samples=2) == expected[0]
    assert log_likelihood(model, tokens[0], samples=2).ndim == 0
    assert torch.equal(log_likelihood(model, tokens, known.long(), samples=2), expected)
    assert log_likelihood(model, "").tolist() == [0.0]  # an empty text is certain
    text = log_likelihood(model, "abcd", samples=2)
    assert torch.equal(text, log_likelihood(model, torch.tensor([list(b"abcd")]), samples=2))


def test_load_reads_model_folders_run_folders_and_released_files(plain, tmp_path):
    plain.save_pretrained(tmp_path / "folder")
    plain.save_pretrained(tmp_path / "run" / "model")
    expected = generate(plain, steps=3)
    for name in ("folder", "run"):
        loaded = maskless.load(tmp_path / name, device="cpu")
        assert not loaded.training
        assert generate(loaded, steps=3) == expected
    state = random_state(vocab=258, width=16, heads=2, condition=8, encoder=1, decoder=1)
    torch.save({"state_dict": state}, tmp_path / "released.ckpt")
    released = maskless.load(tmp_path / "released.ckpt", weights="raw", tokenizer="bytes", device="cpu")
    assert (released.kind, released.layout) == ("partition", "wrapped")
    assert generate(released, length=6, prompt="ab")[0].tokens[:3] == [256, *b"ab"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "causal"])
def test_everything_runs_on_a_gpu(tiny, kind):
    model = over_bytes(tiny, kind).cuda()
    for how in [{}] if kind == "causal" else WAYS:
        texts = generate(model, 3, prompt="ab", **how)
        assert texts == generate(model, 3, prompt="ab", **how)
        assert [text[:2] for text in texts] == ["ab"] * 3
        assert generate(model, 2, **how)[0].steps.count(-1) == 0
    tokens = rows_of(model)
    on_gpu = log_likelihood(model, tokens)
    torch.testing.assert_close(on_gpu, log_likelihood(model.cpu(), tokens), rtol=0.05, atol=0)


def test_samples_do_not_depend_on_how_many_are_computed_at_once(model):
    seen: list[tuple[int, int]] = []
    whole = generate(model, 5, length=8, seed=3)
    parts = generate(model, 5, length=8, seed=3, batch=2, on_step=lambda step: seen.extend(pairs(step)))
    assert whole == parts
    assert len(seen) == len(set(seen)) == sum(len(text.order) for text in parts)


def pairs(step):
    return zip(step.rows.tolist(), step.positions.tolist(), strict=True)


def test_dropout_is_off_while_sampling_and_scoring_and_back_on_afterwards(model):
    calm = generate(model, 2, length=8, seed=3)
    row = torch.tensor([[1, 2, 3, 4]])
    score = log_likelihood(model, row, samples=2)
    model.train()
    try:
        assert generate(model, 2, length=8, seed=3) == calm
        assert torch.equal(log_likelihood(model, row, samples=2), score)
        assert model.training
    finally:
        model.eval()


def test_a_rare_refresh_keeps_what_is_given_and_needs_a_full_context(tiny):
    full = Model(tiny("position", scale=0.25, vocab=257, length=L), byte_codec())
    assert fill(full, "ab[6]cd", seed=1, refresh=3)[:2] == "ab"
    assert fill(full, "ab[6]cd", seed=1, refresh=1) == fill(full, "ab[6]cd", seed=1)
    with pytest.raises(ValueError, match="refresh 0 is out of range: expected 1 or more"):
        fill(full, "ab[6]", refresh=0)
    ordered = Model(tiny("ordered", scale=0.25, vocab=257, length=L), byte_codec())
    with pytest.raises(ValueError, match="refresh 2 goes with the full context"):
        fill(ordered, "ab[6]", refresh=2)


@pytest.mark.parametrize(
    ("layout", "given", "shown", "count"),
    [
        ("padded", 1, "a cat.", 6),
        ("padded", 3, "a cat.", 4),
        ("packed", 1, "a cat.no", 8),
        ("padded", 12, "a cat.no", 0),
    ],
)
def test_what_stands_behind_the_end_of_a_padded_text_is_neither_shown_nor_counted(tiny, layout, given, shown, count):
    model = Model(tiny("position", vocab=257, length=16), byte_codec(), layout)
    row = [256, *b"a cat.", 256, 256, *b"no", 256]
    steps = [-1] * given + list(range(12 - given))
    drawn = Sampled(torch.tensor([row]), torch.tensor([steps]), [list(range(given, 12))])
    (text,) = _texts(model, drawn)
    assert (text, text.written) == (shown, count)
    assert (text.tokens, text.steps) == (row, steps)
