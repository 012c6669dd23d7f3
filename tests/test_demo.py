"""The demonstration shows what models really wrote, passes over those that are not there, and leaves a picture."""

import io
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from rich.text import Text as Line

from maskless import api, demo
from maskless.checkpoint import Model
from maskless.codec.text import train_bpe
from maskless.codec.vq import PixelCodec
from maskless.data import toy

GAPS = "anna has the [3] , so [2] ball ."
STEPS = 5 + demo.ROUNDS  # of its gaps: a round of so few tokens is one step


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """Models of every sort that the demonstration takes."""
    codec = train_bpe(list(toy.corpus(300, 0)), 300)
    sizes = {"vocab": codec.vocab, "length": 40, "width": 32}
    made = {
        "pgm": Model(tiny("ordered", scale=0.2, **sizes), codec, "padded"),
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
    demo.show(console, **where, prompt="anna", text=GAPS, picture=to, seed=1)
    return console.file.getvalue()


def as_page(model: Model, text: api.Text) -> str:
    """What a finished page shows of a text; rich lets no control character through."""
    end = model.codec.eos
    return Line("".join(model.codec.token_text(token) for token in text.tokens if token != end)).plain


def test_a_demonstration_shows_what_the_models_wrote(folder, tmp_path):
    said = shown(folder, tmp_path / "row.png")
    model = api.load(folder / "pgm")
    unknown = 39 - len(model.codec.encode("anna"))
    story = api.generate(model, 1, prompt="anna", steps=unknown, seed=1, **demo.HOW)[0]
    filled = api.fill(model, GAPS, steps=5, seed=1, **demo.HOW)
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for text in (story, filled):
        assert " ".join(as_page(model, text).split()) in " ".join(lines)
    assert f"after 0 of {STEPS} steps" in said
    assert "anna has the···" in said.replace(" ·", "·")
    assert f"after {STEPS} of {STEPS} steps" in said
    for part in ("PGM", "MDLM", "times the speed", "3 pictures"):
        assert part in said
    with Image.open(tmp_path / "row.png") as picture:
        assert picture.width > 2 * picture.height  # three in a row


@pytest.mark.parametrize("name", ["pgm", "packed"])
def test_a_page_ends_as_the_text_that_was_generated(folder, name):
    model = api.load(folder / name)
    led = name == "pgm"
    page = demo.Page(model.codec, [model.codec.bos] * 40, [led] + [False] * 39)
    assert page.line().plain == demo.UNKNOWN * (40 - led)
    (text,) = api.generate(model, 1, steps=7, seed=3, on_step=page.take)
    assert page.line().plain == as_page(model, text)
    assert page.came == text.steps


def test_on_a_terminal_the_text_appears_in_its_place(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    said = shown(folder, tmp_path / "row.png", terminal=True)
    assert "after 0 of" not in said
    assert "\x1b[" in said
    model = api.load(folder / "pgm")
    ending = as_page(model, api.fill(model, GAPS, steps=5, seed=1, **demo.HOW)).split()[-1]
    assert ending in said


def test_a_model_that_is_not_there_is_passed_over(folder, tmp_path):
    said = shown(folder, tmp_path / "row.png", rival="absent", drawing="nothing")
    assert said.count("passed over: ") == 2
    assert "absent" in said
    assert f"after {STEPS} of {STEPS} steps" in said
    assert "times the speed" not in said
    assert not (tmp_path / "row.png").exists()
    with pytest.raises(ValueError, match=r"nothing to show: neither '.*a' nor '.*c' is there"):
        shown(folder, tmp_path / "row.png", model="a", rival="b", drawing="c")


def test_a_left_to_right_rival_takes_a_step_for_each_token(folder, tmp_path):
    said = shown(folder, tmp_path / "row.png", rival="ar", drawing="absent")
    row = next(line for line in said.splitlines() if "causal" in line)
    assert " 39 " in row


@pytest.mark.parametrize(("names", "said"), [({"model": "pictures"}, "text model"), ({"drawing": "pgm"}, "pictures")])
def test_a_model_in_the_wrong_place_is_one_clear_line(folder, tmp_path, names, said):
    with pytest.raises(ValueError, match=said):
        shown(folder, tmp_path / "row.png", **names)
