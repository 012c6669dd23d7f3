"""The demonstration shows what models really wrote, passes over those that are not there, and leaves a picture."""

import io
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from rich.text import Text as Line

import toy_text
from maskless import api, demo
from maskless.checkpoint import Model
from maskless.codec.text import train_bpe
from maskless.codec.vq import PixelCodec
from maskless.mixture import Mixture
from maskless.texts import document_end

SEED = 1
GAPS = "anna has the [3] , so [2] ball ."


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """Models of every sort that the demonstration takes."""
    codec = train_bpe(list(toy_text.corpus(300, 0)), 300)
    sizes = {"vocab": codec.vocab, "length": 40, "width": 32}
    made = {
        "pgm": Model(tiny("ordered", scale=0.2, **sizes), codec, "padded", mixture=Mixture.parse("left,strands8")),
        "packed": Model(tiny("position", scale=0.2, **sizes), codec),
        "mdlm": Model(tiny("masked", scale=0.2, **sizes | {"vocab": codec.vocab + 1}), codec, "padded"),
        "ar": Model(tiny("causal", scale=0.2, **sizes), codec, "padded"),
    }
    network = tiny("position", length=17, classes=3, grid=(4, 4))
    made["pictures"] = Model(network, PixelCodec(9), "image", ("cat", "dog", "ship"))
    folder = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        model.save_pretrained(folder / name)
    return folder


def shown(folder: Path, to: Path, *, terminal: bool = False, **names: str) -> str:
    console = Console(file=io.StringIO(), width=400, force_terminal=terminal)
    names = {"model": "pgm", "rival": "mdlm", "drawing": "pictures"} | names
    where = {what: str(folder / name) for what, name in names.items()}
    demo.show(console, rivals=[where.pop("rival")], **where, prompt="anna", text=GAPS, picture=to, seed=SEED)
    return console.file.getvalue()


def as_page(model: Model, text: api.Text) -> str:
    """What a finished page shows of a text; rich lets no control character through."""
    codec = model.codec
    end = document_end(codec, model.layout, text.tokens, text.steps)
    return Line("".join(codec.token_text(token) for token in text.tokens[:end] if token != codec.eos)).plain


def bare(text: str) -> str:
    """What can be seen of a text, wherever its lines break."""
    return "".join(one for one in text if one.isprintable() and not one.isspace())


def test_a_demonstration_shows_what_the_models_wrote(folder, tmp_path):
    said = shown(folder, tmp_path / "row.png")
    model = api.load(folder / "pgm")
    unknown = 39 - len(model.codec.encode("anna"))
    ways = ({}, {"strands": demo.STRANDS})
    stories = [api.generate(model, 1, prompt="anna", seed=SEED, **how)[0] for how in ways]
    assert [story.rounds for story in stories] == [unknown, -(-unknown // demo.STRANDS)]
    for text in (*stories, api.fill(model, GAPS, seed=SEED)):
        assert bare(as_page(model, text)) in bare(said)
        assert f"after {text.rounds} steps" in said
    assert said.count("after 0 steps") == 3
    assert "anna has the···" in said.replace(" ·", "·")
    for part in ("PGM, 8 strands", "MDLM", "3 pictures"):
        assert part in said
    with Image.open(tmp_path / "row.png") as picture:
        assert picture.width > 2 * picture.height  # three in a row


@pytest.mark.parametrize("name", ["pgm", "packed"])
def test_a_page_ends_as_the_text_that_was_generated(folder, name):
    model = api.load(folder / name)
    led = name == "pgm"
    page = demo.Page(model, [model.codec.bos] * 40, [led] + [False] * 39)
    assert page.line().plain == demo.UNKNOWN * (40 - led)
    (text,) = api.generate(model, 1, steps=7, seed=3, on_step=page.take)
    assert page.line().plain == as_page(model, text)
    assert page.came == text.steps


def test_on_a_terminal_the_text_appears_in_its_place(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    said = shown(folder, tmp_path / "row.png", terminal=True)
    assert "after 0 steps" not in said
    assert "\x1b[" in said
    model = api.load(folder / "pgm")
    ending = as_page(model, api.fill(model, GAPS, seed=SEED)).split()[-1]
    assert ending in said


def test_a_model_that_is_not_there_is_passed_over(folder, tmp_path):
    said = shown(folder, tmp_path / "row.png", rival="absent", drawing="nothing")
    assert said.count("passed over: ") == 2
    assert "absent" in said
    assert said.count("after 0 steps") == 3
    assert "tokens/s" not in said
    assert not (tmp_path / "row.png").exists()
    with pytest.raises(ValueError, match=r"nothing to show: neither '.*a' nor '.*c' is there"):
        shown(folder, tmp_path / "row.png", model="a", rival="b", drawing="c")


def test_a_left_to_right_rival_takes_a_step_for_each_token(folder, tmp_path):
    said = shown(folder, tmp_path / "row.png", rival="ar", drawing="absent")
    row = next(line for line in said.splitlines() if "AR" in line)
    assert " 39 " in row


@pytest.mark.parametrize(("names", "said"), [({"model": "pictures"}, "text model"), ({"drawing": "pgm"}, "pictures")])
def test_a_model_in_the_wrong_place_is_one_clear_line(folder, tmp_path, names, said):
    with pytest.raises(ValueError, match=said):
        shown(folder, tmp_path / "row.png", **names)
