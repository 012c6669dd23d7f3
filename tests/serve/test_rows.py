"""Rows that step together come out as the library's own samplers have them, whoever shares the step."""

import base64
import io
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace

import maskless
from maskless.codec.text import TextCodec
from maskless.serve import pictures, texts
from maskless.serve.answers import Anew, Kept, answers_of
from maskless.serve.host import Host, Limits
from maskless.serve.requests import CompletionRequest
from maskless.serve.routes_text import _Completion
from maskless.serve.rows import Row, _surest, advance, batches, due, reconsider

TEMPLATES = ["the [3] cat [5] .", "anna gives [6]", "[9] so ben has the red ball .", "first [1] then [2] , [4]"]


class Still(Host):
    """A host without a thread."""

    def __init__(self, name, model, limits=None):
        self.name, self.model, self.limits = name, model, limits or Limits()


@pytest.fixture(params=["pgm", "mdlm", "ordered"])
def host(request, models, keeping):
    return Still(request.param, (models | keeping)[request.param])


@pytest.fixture(params=["pictures", "painter"])
def easel(request, models, keeping):
    return Still(request.param, (models | keeping)[request.param])


def finish(host, rows: list[Row], late: list[Row] = ()) -> None:
    """Step rows to their end; one of `late` joins before each step."""
    rules = host._rules()
    answers = answers_of(host.model, rules)
    active, late = list(rows), list(late)
    while active or late:
        if late:
            active.append(late.pop())
        answers.keep(active)
        for group in due(active, host.vocab):
            reconsider(group, answers)
        for group in batches(active, host.vocab):
            advance(group, answers, rules)
        active = [row for row in active if not row.done]


def fill_rows(host, text: str, **how) -> list[Row]:
    return texts.rows_of(host, texts.from_template(host, text), texts.Settings(**how))


@pytest.mark.parametrize("order", ["random", "left", "strands"])
@pytest.mark.parametrize(
    "how",
    [{}, {"top_p": 0.8, "temperature": 0.7}, {"top_k": 3}, {"temperature": 0.0}, {"revise": 2, "counts": "mdlm"}],
)
def test_a_row_is_what_the_library_fills(host, order, how):
    how = how | ({"counts": "uniform"} if order == "strands" else {})  # strands settle them
    for seed, text in enumerate(TEMPLATES):
        (row,) = fill_rows(host, text, steps=4, seed=seed, order=order, **how)
        steps = row.plan.steps
        finish(host, [row])
        own = maskless.fill(host.model, text, steps=steps, seed=seed, order=order, **how)
        assert row.tokens.tolist() == own.tokens
        assert row.came == own.steps


@pytest.mark.parametrize("revise", [0, 2])
def test_generated_texts_are_those_of_the_library(host, revise):
    gapped = texts.from_prompt(host, "anna has", 40)
    how = {"steps": 11, "seed": 3, "counts": "mdlm", "revise": revise}
    rows = texts.rows_of(host, gapped, texts.Settings(n=5, **how))
    finish(host, rows)
    own = maskless.generate(host.model, 5, prompt="anna has", length=40, **how)
    assert [row.tokens.tolist() for row in rows] == [text.tokens for text in own]
    assert [row.came for row in rows] == [text.steps for text in own]


def test_second_thoughts_go_on_counting(host):
    """The draft is that of a row without them; what each round decides again was decided before."""
    how = {"text": "[40]", "steps": 10, "seed": 4}
    (draft,), (row,) = fill_rows(host, **how), fill_rows(host, revise=3, **how)
    finish(host, [draft])
    answers, rules, landed = answers_of(host.model, host._rules()), host._rules(), []
    while not row.done:
        answers.keep([row])
        if row.due:
            if not row.round:
                assert row.tokens.tolist() == draft.tokens.tolist()
            reconsider([row], answers)
        landed += advance([row], answers, rules)
    assert [one.step for one in landed] == list(range(10 + 2 + 1 + 1))
    assert row.steps == len(landed)
    assert [len(one.tokens) for one in landed[10:]] == [2, 3, 4, 3]
    last = {place: (one.step, token) for one in landed for place, token in zip(one.positions, one.tokens, strict=True)}
    given = len(row.tokens) - 40
    assert [last[place][0] for place in sorted(last)] == row.came[given:]
    assert [last[place][1] for place in sorted(last)] == row.tokens[given:].tolist()


def test_rows_do_not_depend_on_who_shares_their_steps(host):
    """Rows of all kinds, alone and then all together, joining in another order at different times."""
    rng = random.Random(0)
    kinds = [
        {
            "text": rng.choice(TEMPLATES),
            "steps": rng.choice([1, 2, 3, 5, 9]),
            "seed": rng.randrange(1000),
            "order": rng.choice(["random", "left", "strands", "confidence"]),
            "temperature": rng.choice([0.0, 0.8, 1.0, 1.3]),
            "top_p": rng.choice([None, 0.5, 0.9]),
            "top_k": rng.choice([None, 4]),
            "counts": rng.choice(["uniform", "mdlm", "arccos"]),
            "revise": rng.choice([0, 1, 3]),
        }
        for _ in range(40)
    ]
    for how in kinds:
        how["revise"] *= how["order"] != "confidence"
        how["counts"] = "uniform" if how["order"] == "strands" else how["counts"]
    alone = [row for how in kinds for row in fill_rows(host, **how)]
    for row in alone:
        finish(host, [row])
    together = [row for how in kinds for row in fill_rows(host, **how)]
    finish(host, together[:5], late=together[5:])
    for one, other in zip(alone, together, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.came == other.came
        known = [p for p in one.probability if p is not None]
        assert known == pytest.approx([p for p in other.probability if p is not None], rel=1e-3, abs=1e-6)


def test_probabilities_are_the_networks_own(host):
    """Whatever the temperature: of one token, given all the others."""
    (row,) = fill_rows(host, "anna gives [1] the ball .", temperature=0.3, top_k=2)
    place = int(row.order[row.start])
    known = row.order[: row.start].tolist()
    finish(host, [row])
    logits = host.model.predict(row.tokens[known][None], torch.tensor([known]), torch.tensor([[place]]))
    expected = logits[0, 0].softmax(-1)[row.tokens[place]].item()
    assert row.probability[place] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("order", ["halton", "confidence", "random", "raster"])
@pytest.mark.parametrize("guidance", [0.0, 2.0])
def test_pictures_are_those_of_the_library(easel, order, guidance):
    host = easel
    for seed in range(3):
        how = {"steps": 5, "seed": seed, "order": order, "guidance": guidance, "top_p": 0.95}
        settings = pictures.PictureSettings(label="dog", **how)
        (row,) = pictures.rows_of(host, pictures.empty(host), settings)
        finish(host, [row])
        (own,) = maskless.generate(host.model, labels=["dog"], **how)
        assert row.tokens[1:].tolist() == own.tokens.flatten().tolist()


def test_a_row_whose_first_steps_are_empty_is_warmed_as_in_the_library(easel):
    host, empty = easel, 0
    for seed in range(6):
        how = {"steps": 16, "seed": seed, "order": "confidence", "counts": "mdlm", "warmup": 3, "noise": 0.5}
        (row,) = pictures.rows_of(host, pictures.empty(host), pictures.PictureSettings(label="dog", **how))
        empty += row.number > 0
        finish(host, [row])
        (own,) = maskless.generate(host.model, labels=["dog"], **how)
        assert row.tokens[1:].tolist() == own.tokens.flatten().tolist()
    assert empty


def test_rounding_does_not_decide_between_equally_sure_targets(host):
    (row,) = fill_rows(host, TEMPLATES[2], order="confidence")
    rounding = 1e-6 * torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert _surest(row, row.asked, 0.5 + rounding).tolist() == list(range(9))


def test_pictures_with_and_without_guidance_share_a_step(easel):
    host = easel

    def rows() -> list[Row]:
        kinds = [(label, weight, seed) for label in (None, 0, 2) for weight in (0.0, 3.0) for seed in (0, 1)]
        made = [pictures.PictureSettings(label=la, guidance=w, seed=s, steps=4 + s) for la, w, s in kinds]
        return [row for how in made for row in pictures.rows_of(host, pictures.empty(host), how)]

    alone, together = rows(), rows()
    for row in alone:
        finish(host, [row])
    finish(host, together)
    assert [row.tokens.tolist() for row in alone] == [row.tokens.tolist() for row in together]


def test_a_causal_model_writes_from_left_to_right(keeping):
    """Also when prompts of different lengths share its steps."""
    host = Still("ar", keeping["causal"])
    prompts = [("anna has", 12), ("ben", 20), ("", 9)]
    rows = [
        texts.rows_of(host, texts.from_prompt(host, prompt, length), texts.Settings(n=2, seed=5))
        for prompt, length in prompts
    ]
    finish(host, [row for some in rows for row in some])
    for some, (prompt, length) in zip(rows, prompts, strict=True):
        own = maskless.generate(host.model, 2, prompt=prompt, length=length, seed=5)
        assert [row.tokens.tolist() for row in some] == [text.tokens for text in own]
    with pytest.raises(ValueError, match="cannot fill a gap"):
        fill_rows(host, "anna [2] ball")
    with pytest.raises(ValueError, match="revise 2 with ar, which writes from left to right: expected 0"):
        fill_rows(host, "anna [2]", revise=2)


def test_what_was_encoded_is_kept_where_it_stays_valid(models, keeping):
    """A step reads only the tokens that are new, of whoever is there."""
    kinds = {name: type(answers_of(model, Still(name, model)._rules())) for name, model in (models | keeping).items()}
    anew, kept = {"pgm", "mdlm", "pictures"}, {"ordered", "causal", "painter", "chain"}
    assert kinds == dict.fromkeys(anew, Anew) | dict.fromkeys(kept, Kept)


def test_rows_that_leave_early_leave_nothing_behind(keeping):
    host = Still("ordered", keeping["ordered"])
    answers = answers_of(host.model, host._rules())
    rows = [row for seed in range(9) for row in fill_rows(host, TEMPLATES[seed % 4], steps=3, seed=seed)]
    advance(rows, answers, host._rules())
    assert len(answers.seats.owners) == 9
    answers.keep(rows[2:5])
    assert {row for row, _ in answers.seats.owners} == set(rows[2:5])
    answers.keep([])
    assert answers.seats.owners == []
    assert answers.seats.table is None  # more seats than are kept for nobody


def test_a_gap_after_a_space_begins_with_a_space(models):
    host = Still("pgm", models["pgm"])
    for seed in range(20):
        (row,) = fill_rows(host, "the [2] .", seed=seed)
        place = min(row.spaced)
        finish(host, [row])
        assert host.piece(int(row.tokens[place])).startswith(" ")


def test_large_batches_are_cut_to_what_fits(models):
    host = Still("pgm", models["pgm"])
    rows = [row for text in TEMPLATES for row in fill_rows(host, text, steps=1)]
    groups = batches(rows, host.vocab, cells=10 * host.vocab)
    assert [row for group in groups for row in group] == rows
    assert all(len(group) == 1 or sum(row.end - row.start for row in group) <= 10 for group in groups)
    assert len(groups) > 1


def test_blanks_are_gaps():
    assert texts.blanks("a ___ b _____.") == "a [3] b [5]."
    assert texts.blanks(r"a \___ b __ [2]") == "a ___ b __ [2]"


def test_pieces_read_as_the_text_does(host):
    tokens = host.text.encode("anna gives ben the red ball , so ben has it .")
    assert "".join(host.piece(token) for token in tokens) == host.text.decode(tokens)


def test_a_frame_shows_what_is_known_and_grey_elsewhere(easel):
    tokens, known = torch.arange(16).view(4, 4) % 9, torch.rand(4, 4, generator=torch.manual_seed(0)) < 0.4
    canvas = pictures.empty(easel)
    shown, whole = (read(pictures.frame(easel, canvas, tokens, some)) for some in (known, torch.ones_like(known)))
    assert (shown == np.where(known, whole, 128)).all()
    assert (read(pictures.frame(easel, canvas, tokens, torch.zeros_like(known))) == 128).all()


def read(image: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image))))


def test_what_was_kept_of_a_sent_picture_comes_back(models):
    host = Still("pictures", models["pictures"])
    before = (np.arange(16, dtype=np.uint8) * 16).reshape(4, 4)
    file = io.BytesIO()
    Image.fromarray(before).save(file, "PNG")
    mask = [[False] * 4, [True] * 4, [False] * 4, [False, True, False, False]]
    canvas = pictures.from_image(host, base64.b64encode(file.getvalue()).decode(), mask)
    (row,) = pictures.rows_of(host, canvas, pictures.PictureSettings(seed=1))
    finish(host, [row])
    answer = pictures.answer(host, canvas, row, 0.0)
    after = read(answer["image"])
    kept = ~np.array(mask)
    assert (after[kept] == before[kept]).all()
    assert (np.array(answer["came"])[kept] == -1).all()
    assert (np.array(answer["came"])[~kept] >= 0).all()


def test_a_streamed_completion_shows_no_token_that_lands_while_it_is_read(host):
    """Two positions are noted as decided after the tokens were read."""
    completion = _Completion(host, CompletionRequest(prompt="anna", max_tokens=4))
    row = SimpleNamespace(came=[-1] * len(completion.gapped.tokens))

    def landing() -> list[int]:
        for position in completion.gap[:2]:
            row.came[position] = 0
        return [5 if token is None else token for token in completion.gapped.tokens]  # as they were before

    row.tokens = SimpleNamespace(tolist=landing)
    assert completion.chunk(0, row) is None


def test_a_completion_reads_as_it_does_behind_its_prompt():
    """Pieces of words join what stands before them."""
    ids = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "on": 4}
    words = Tokenizer(WordPiece(ids, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = Whitespace(), WordPieceDecoder()
    host = SimpleNamespace(text=TextCodec(words), name="words", length=9, lead=[])
    completion = _Completion(host, CompletionRequest(prompt="the cat", max_tokens=3))
    assert completion._text([1, 2, 3, 4, 2])[0] == "s on cat"
    assert completion._text([1, 2, 4, 2, 3])[0] == " on cats"


@pytest.mark.parametrize(
    "how", [{}, {"strands": 3}, {"order": "strands", "steps": 4}, {"order": "random"}, {"revise": 2}]
)
def test_a_model_of_chains_writes_as_it_was_trained_here_as_in_the_library(keeping, how):
    host = Still("chain", keeping["chain"])
    for text in TEMPLATES:
        (row,) = fill_rows(host, text, seed=2, **how)
        finish(host, [row])
        own = maskless.fill(host.model, text, seed=2, **how)
        assert (row.tokens.tolist(), row.came) == (own.tokens, own.steps)


def test_strands_and_confidence_exclude_each_other(keeping):
    with pytest.raises(ValueError, match="strands 2 go with the order 'strands', not with 'confidence'"):
        fill_rows(Still("chain", keeping["chain"]), "a [4] b", order="confidence", strands=2)
