"""Rows that step together come out as the library's own samplers have them, whoever shares the step."""

import base64
import io
import random

import numpy as np
import pytest
import torch
from PIL import Image

import maskless
from maskless.drafts import Drafts
from maskless.engine import Slots, slots_of
from maskless.how import How
from maskless.serve import pictures, texts
from maskless.serve.host import Host, Limits
from maskless.serve.rows import ActiveSequence, advance, batches, begin, due

TEMPLATES = ["the [3] cat [5] .", "anna gives [6]", "[9] so ben has the red ball .", "first [1] then [2] , [4]"]


class Still(Host):
    """A host without a thread."""

    def __init__(self, name, model, limits=None):
        self.name, self.model, self.limits = name, model, limits or Limits()


@pytest.fixture(params=["pgm", "mdlm", "ordered"])
def host(request, models, keeping):
    return Still(request.param, (models | keeping)[request.param])


@pytest.fixture(params=["pictures", "painter"])
def image_host(request, models, keeping):
    return Still(request.param, (models | keeping)[request.param])


def backend_of(host):
    return slots_of(host.model.network, int(host.model.config.length))


def rows_of(drafts: list[Drafts]) -> list[ActiveSequence]:
    return [ActiveSequence(one, at) for one in drafts for at in range(len(one))]


def finish(host, drafts: list[Drafts], late: list[Drafts] = ()) -> None:
    """Step drafts to their end; one of `late` joins before each step."""
    backend, active, late = backend_of(host), rows_of(drafts), rows_of(late)
    while active or late:
        if late:
            active.append(late.pop())
        if isinstance(backend, Slots):
            backend.keep({(row.drafts, row.at) for row in active if not row.due})
        for group in due(active, host.vocab):
            begin(group, backend)
        for group in batches(active, host.vocab):
            advance(group, backend)
        active = [row for row in active if not row.done]


def drafts_of(host, text: str, n: int = 1, **how) -> Drafts:
    return texts.drafts_of(host, [texts.from_template(host, text)], How(**how), n)


def drawn_by(host, label=None, canvas=None, **how) -> Drafts:
    return pictures.drafts_of(host, canvas or pictures.empty(host), How(**how), label)


def check_filled(host, text: str, drafts: Drafts, **how) -> None:
    """What the server fills is what the library fills."""
    finish(host, [drafts])
    own = maskless.fill(host.model, text, **how)
    assert (drafts.tokens[0].tolist(), drafts.came[0].tolist()) == (own.tokens, own.steps)


def check_drawn(host, drafts: Drafts, **how) -> None:
    """What the server draws of a dog is what the library draws."""
    finish(host, [drafts])
    (own,) = maskless.generate(host.model, labels=["dog"], **how)
    assert drafts.tokens[0, 1:].tolist() == own.tokens.flatten().tolist()


@pytest.mark.parametrize("order", ["random", "left", "strands"])
@pytest.mark.parametrize(
    "how",
    [{}, {"top_p": 0.8, "temperature": 0.7}, {"top_k": 3}, {"temperature": 0.0}, {"revise": 2, "counts": "mdlm"}],
)
def test_a_row_is_what_the_library_fills(host, order, how):
    how = how | ({"counts": "uniform"} if order == "strands" else {})  # strands settle them
    for seed, text in enumerate(TEMPLATES):
        drafts = drafts_of(host, text, steps=4, seed=seed, order=order, **how)
        check_filled(host, text, drafts, steps=drafts.plan.steps, seed=seed, order=order, **how)


@pytest.mark.parametrize("revise", [0, 2])
def test_generated_texts_are_those_of_the_library(host, revise):
    gapped = texts.from_prompt(host, "anna has", 40)
    how = {"steps": 11, "seed": 3, "counts": "mdlm", "revise": revise}
    drafts = texts.drafts_of(host, [gapped], How(**how), 5)
    finish(host, [drafts])
    own = maskless.generate(host.model, 5, prompt="anna has", length=40, **how)
    assert drafts.tokens.tolist() == [text.tokens for text in own]
    assert drafts.came.tolist() == [text.steps for text in own]


def test_revision_continues_the_count_of_steps(host):
    """The draft is that of a row without them; what each round decides again was decided before."""
    how = {"text": "[40]", "steps": 10, "seed": 4}
    draft, drafts = drafts_of(host, **how), drafts_of(host, revise=3, **how)
    finish(host, [draft])
    backend, row, landed = backend_of(host), ActiveSequence(drafts, 0), []
    while not row.done:
        if row.due:
            if row.round == (0, 3):
                assert torch.equal(drafts.tokens, draft.tokens)
            if isinstance(backend, Slots):
                backend.keep([])
            begin([row], backend)
        landed += advance([row], backend)[drafts]
    assert [one.number for one in landed] == list(range(10 + 2 + 1 + 1))
    assert drafts.steps == len(landed)
    assert [len(one.tokens) for one in landed[10:]] == [2, 3, 4, 3]
    pairs = [(one.number, *both) for one in landed for both in zip(one.positions, one.tokens, strict=True)]
    last = {int(place): (number, int(token)) for number, place, token in pairs}
    given = drafts.tokens.shape[1] - 40
    assert [last[place][0] for place in sorted(last)] == drafts.came[0, given:].tolist()
    assert [last[place][1] for place in sorted(last)] == drafts.tokens[0, given:].tolist()


def test_rows_do_not_depend_on_who_shares_their_steps(host):
    """Rows of all kinds, alone and then all together, joining in another order at different times."""
    rng = random.Random(0)
    choices = {"text": TEMPLATES, "steps": [1, 2, 3, 5, 9], "seed": range(1000)}
    choices |= {"order": ["random", "left", "strands", "confidence"], "temperature": [0.0, 0.8, 1.0, 1.3]}
    choices |= {"top_p": [None, 0.5, 0.9], "top_k": [None, 4], "counts": ["uniform", "mdlm", "arccos"]}
    choices |= {"revise": [0, 1, 3]}
    kinds = [{name: rng.choice(some) for name, some in choices.items()} for _ in range(40)]
    if host.name == "ordered":
        kinds += [{"text": text, "seed": 5, "exact": True, "draft": 4, "order": "random"} for text in TEMPLATES]
    for how in kinds[:40]:
        how["counts"] = "uniform" if how["order"] == "strands" else how["counts"]
    alone = [drafts_of(host, **how) for how in kinds]
    for one in alone:
        finish(host, [one])
    together = [drafts_of(host, **how) for how in kinds]
    finish(host, together[:5], late=together[5:])
    for one, other in zip(alone, together, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.came.tolist() == other.came.tolist()
        torch.testing.assert_close(one.chance, other.chance, rtol=1e-3, atol=1e-6, equal_nan=True)


def test_probabilities_are_the_networks_own(host):
    """Whatever the temperature: of one token, given all the others."""
    drafts = drafts_of(host, "anna gives [1] the ball .", temperature=0.3, top_k=2)
    order = drafts.plan.order
    finish(host, [drafts])
    tokens = drafts.tokens.gather(1, order)
    logits = host.model.predict(tokens[:, :-1], order[:, :-1], order[:, -1:])
    expected = logits[0, 0].softmax(-1)[tokens[0, -1]].item()
    assert drafts.chance[0, order[0, -1]].item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("order", ["halton", "confidence", "random", "raster"])
@pytest.mark.parametrize("guidance", [0.0, 2.0])
def test_pictures_are_those_of_the_library(image_host, order, guidance):
    host = image_host
    for seed in range(3):
        how = {"steps": 5, "seed": seed, "order": order, "guidance": guidance, "top_p": 0.95}
        check_drawn(host, drawn_by(host, "dog", **how), **how)


def test_a_row_whose_first_steps_are_empty_is_warmed_as_in_the_library(image_host):
    host, empty = image_host, 0
    for seed in range(6):
        how = {"steps": 16, "seed": seed, "order": "confidence", "counts": "mdlm", "warmup": 3, "noise": 0.5}
        drafts = drawn_by(host, "dog", **how)
        empty += int(drafts.number[0]) > 0
        check_drawn(host, drafts, **how)
    assert empty


def test_pictures_with_and_without_guidance_share_a_step(image_host):
    host = image_host

    def drafts() -> list[Drafts]:
        kinds = [(label, weight, seed) for label in (None, 0, 2) for weight in (0.0, 3.0) for seed in (0, 1)]
        return [drawn_by(host, label, guidance=w, seed=s, steps=4 + s) for label, w, s in kinds]

    alone, together = drafts(), drafts()
    for one in alone:
        finish(host, [one])
    finish(host, together)
    assert [one.tokens.tolist() for one in alone] == [one.tokens.tolist() for one in together]


def test_a_causal_model_writes_from_left_to_right(keeping):
    """Also when prompts of different lengths share its steps."""
    host = Still("ar", keeping["causal"])
    prompts = [("anna has", 12), ("ben", 20), ("", 9)]
    made = [texts.drafts_of(host, [texts.from_prompt(host, prompt, n)], How(seed=5), 2) for prompt, n in prompts]
    finish(host, made)
    for drafts, (prompt, length) in zip(made, prompts, strict=True):
        own = maskless.generate(host.model, 2, prompt=prompt, length=length, seed=5)
        assert drafts.tokens.tolist() == [text.tokens for text in own]
    with pytest.raises(ValueError, match="cannot fill a gap"):
        drafts_of(host, "anna [2] ball")
    with pytest.raises(ValueError, match="revise 2 with a causal model, which cannot go back: expected 0"):
        drafts_of(host, "anna [2]", revise=2)


def test_what_was_encoded_is_kept_where_it_stays_valid(models, keeping):
    """A step reads only the tokens that are new, of whoever is there."""
    kept = {name for name, model in (models | keeping).items() if isinstance(backend_of(Still(name, model)), Slots)}
    assert kept == {"ordered", "causal", "painter", "chain"}


def test_a_gap_after_a_space_begins_with_a_space(models):
    host = Still("pgm", models["pgm"])
    for seed in range(20):
        drafts = drafts_of(host, "the [2] .", seed=seed)
        place = int(drafts.spaced[0][0].long().argmax())
        finish(host, [drafts])
        assert host.piece(int(drafts.tokens[0, place])).startswith(" ")


def test_large_batches_are_cut_to_what_fits(models):
    host = Still("pgm", models["pgm"])
    rows = [ActiveSequence(drafts_of(host, text, steps=1), 0) for text in TEMPLATES]
    groups = batches(rows, host.vocab, cells=10 * host.vocab)
    assert [row for group in groups for row in group] == rows
    assert all(len(group) == 1 or sum(row.size for row in group) <= 10 for group in groups)
    assert len(groups) > 1


def test_underscores_are_gaps():
    assert texts.underscores("a ___ b _____.") == "a [3] b [5]."
    assert texts.underscores(r"a \___ b __ [2]") == "a ___ b __ [2]"


def test_pieces_read_as_the_text_does(host):
    tokens = host.text.encode("anna gives ben the red ball , so ben has it .")
    assert "".join(host.piece(token) for token in tokens) == host.text.decode(tokens)


def test_a_frame_shows_what_is_known_and_grey_elsewhere(image_host):
    tokens, known = torch.arange(16).view(4, 4) % 9, torch.rand(4, 4, generator=torch.manual_seed(0)) < 0.4
    canvas = pictures.empty(image_host)
    shown, whole = (read(pictures.frame(image_host, canvas, tokens, some)) for some in (known, torch.ones_like(known)))
    assert (shown == np.where(known, whole, 128)).all()
    assert (read(pictures.frame(image_host, canvas, tokens, torch.zeros_like(known))) == 128).all()


def read(image: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image))))


def test_what_was_kept_of_a_sent_picture_comes_back(models):
    host = Still("pictures", models["pictures"])
    before = (np.arange(16, dtype=np.uint8) * 16).reshape(4, 4)
    file = io.BytesIO()
    Image.fromarray(before).save(file, "PNG")
    mask = [[False] * 4, [True] * 4, [False] * 4, [False, True, False, False]]
    canvas = pictures.from_image(host, base64.b64encode(file.getvalue()).decode(), mask)
    drafts = drawn_by(host, canvas=canvas, seed=1)
    finish(host, [drafts])
    answer = pictures.answer(host, canvas, drafts, 0.0)
    after = read(answer["image"])
    kept = ~np.array(mask)
    assert (after[kept] == before[kept]).all()
    assert (np.array(answer["cell_steps"])[kept] == -1).all()
    assert (np.array(answer["cell_steps"])[~kept] >= 0).all()


EXACT = [{}, {"draft": 3, "order": "random", "top_p": 0.9}, {"strands": 2}]
CHAINS = [{}, {"strands": 3}, {"order": "strands", "steps": 4}, {"order": "random"}, {"revise": 2}]


@pytest.mark.parametrize("how", [*CHAINS, *({"exact": True, **how} for how in EXACT)])
def test_a_model_of_chains_writes_as_it_was_trained_here_as_in_the_library(keeping, how):
    host = Still("chain", keeping["chain"])
    for text in TEMPLATES:
        check_filled(host, text, drafts_of(host, text, seed=2, **how), seed=2, **how)
