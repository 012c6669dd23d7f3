"""Shipped models: a run becomes a small folder that loads by its name, offline, and the wheel carries it."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import maskless
import ship
from maskless import shipped
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.codec.vq import VQ, VQConfig
from maskless.mixture import Mixture
from maskless.problems import dense

ROOT = Path(__file__).parents[1]
KINDS = ["position", "ordered", "masked", "causal"]
WORDS = {"about": "Writes bytes. Badly.", "data": "None. MIT.", "limits": "All."}
PICTURES = {"length": 17, "classes": 2, "grid": (4, 4), "never": 9}
SETTINGS = {"batch": 32, "learning_rate": 1e-3, "decay": "cosine", "warmup": 5, "ema": 0.999, "seed": 7}


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch) -> Path:
    """An empty folder in place of that of the package."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "models")
    shipped.FOLDER.mkdir()
    return shipped.FOLDER


@pytest.fixture
def run(tiny, tmp_path):
    """run(kind): the folder of a finished run, and its model."""

    def make(kind: str = "position") -> tuple[Path, Model]:
        vocab = {"vocab": 258} if kind == "masked" else {"vocab": 257}
        model = Model(tiny(kind, scale=0.2, **vocab), byte_codec(), "padded")
        folder = tmp_path / "runs" / kind
        model.save_pretrained(folder / "model")
        (folder / "run.json").write_text(json.dumps({"train": SETTINGS, "network": {"length": 8, "width": 16}}))
        lines = [{"step": 10, "loss": 3.0, "seconds": 59}, {"step": 10, "perplexity": 4.5, "error": 0.1, "seconds": 60}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder, model

    return make


def log_probabilities(model: Model) -> torch.Tensor:
    tokens = torch.tensor([[256, 2, 3, 4], [256, 6, 7, 8]])
    with torch.no_grad():
        return model.predict(tokens, torch.arange(4).expand(2, 4), torch.tensor([[4], [4]])).log_softmax(-1)[..., :257]


@pytest.mark.parametrize("kind", KINDS)
def test_a_condensed_model_is_the_same_function_with_fewer_parameters(tiny, kind):
    model = Model(tiny(kind, scale=0.3, vocab=257))
    small = ship.condensed(model)
    torch.testing.assert_close(log_probabilities(small), log_probabilities(model), atol=1e-5, rtol=0)
    counts = [sum(p.numel() for p in each.parameters()) for each in (small, model)]
    assert counts[0] < 0.9 * counts[1]


def test_of_the_condition_of_classes_one_entry_for_each_is_enough(tiny):
    network = tiny("position", scale=0.3, **PICTURES)
    small = ship.condensed(Model(network, None, "image", ("cat", "dog"))).network
    problems = dense(torch.zeros(3, 2, dtype=torch.long), torch.arange(2).expand(3, 2), torch.full((3, 4), 5))
    labels = torch.tensor([0, 1, 2])  # the last stands for a label that was dropped
    with torch.no_grad():
        before, after = (each(problems.labelled(labels)) for each in (network, small))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    assert not torch.allclose(before[:4], before[4:8], atol=0.1)
    assert small.config.condition == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_shipped_and_loads_by_its_name(run, kind, models):
    folder, model = run(kind)
    made = ship.ship(folder, "tiny", words=WORDS)
    again = maskless.load("tiny", device="cpu")
    torch.testing.assert_close(log_probabilities(again), log_probabilities(model), atol=0.02, rtol=0)
    assert made.bytes == sum(path.stat().st_size for path in (models / "tiny").iterdir())
    assert (models / "tiny" / "model.safetensors").stat().st_size < 2.2 * made.parameters + 8000  # two bytes each
    assert made.parameters == sum(p.numel() for p in again.network.parameters())
    assert made.kind == {"position": "pgm", "ordered": "pgm, ordered", "masked": "mdlm", "causal": "ar"}[kind]
    assert made.about == WORDS["about"]
    assert isinstance(maskless.generate(again, 1, seed=0)[0], str)
    assert [path.name for path in models.iterdir()] == ["tiny"]  # nothing is left beside it


def test_a_model_of_pictures_is_shipped_with_its_codec_in_half_precision(run, models, tiny):
    folder, _ = run()
    codec = VQ(VQConfig(codes=9, code_width=4, latent=8, width=32, multipliers=(1, 1), blocks=1, channels=1))
    shutil.rmtree(folder / "model")
    Model(tiny("position", **PICTURES), codec.eval(), "image", ("cat", "dog")).save_pretrained(folder / "model")
    made = ship.ship(folder, "tiny", words=WORDS)
    again = maskless.load("tiny", device="cpu")
    assert made.parameters == sum(p.numel() for each in (again.network, codec) for p in each.parameters())
    assert load_file(models / "tiny" / "codec" / "model.safetensors")["quantize.embedding.weight"].dtype == torch.half
    tokens = torch.arange(16).view(1, 4, 4) % 9
    torch.testing.assert_close(again.codec.decode(tokens), codec.decode(tokens), atol=0.02, rtol=0)
    assert maskless.generate(again, labels=["dog"], seed=0)[0].label == "dog"


def test_the_card_has_the_figures_of_the_run_and_keeps_words_that_were_written(run, models):
    folder, _ = run()
    ship.ship(folder, "tiny", words=WORDS)
    card = models / "tiny" / "CARD.md"
    for part in ("4.500 ± 0.450", "10 of 32 sequences of 8 tokens", "| minutes | 1.0 |", "| seed | 7 |", WORDS["data"]):
        assert part in card.read_text()
    card.write_text(card.read_text().replace(WORDS["limits"], "It only knows bytes.").replace("4.500", "9.999"))
    ship.ship(folder, "tiny", words=WORDS | {"data": "Other."})
    assert "It only knows bytes." in card.read_text()
    assert "4.500" in card.read_text()
    assert "9.999" not in card.read_text()


@pytest.mark.parametrize(
    ("name", "limit", "said"),
    [("tiny", 0.001, "expected at most 0.001"), ("../tiny", 24, "no name for a model"), ("A b", 24, "no name")],
)
def test_what_cannot_be_shipped_leaves_the_old_one(run, models, name, limit, said):
    folder, _ = run()
    ship.ship(folder, "tiny", words=WORDS)
    before = {path: path.read_bytes() for path in models.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=said):
        ship.ship(folder, name, words=WORDS, limit=limit)
    assert {path: path.read_bytes() for path in models.rglob("*") if path.is_file()} == before


def test_a_run_that_measured_nothing_is_not_shipped(run, models):
    folder, _ = run()
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0, "seconds": 2}\n')
    with pytest.raises(ValueError, match="not a finished run"):
        ship.ship(folder, "tiny", words=WORDS)
    assert list(models.iterdir()) == []


def test_a_local_model_wins_over_a_shipped_one_and_another_folder_does_not_count(run, tiny, tmp_path, monkeypatch):
    folder, _ = run()
    ship.ship(folder, "tiny", words=WORDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("not a model")
    assert maskless.load("tiny").config.condition == 1  # the shipped one
    Model(tiny("position")).save_pretrained(tmp_path / "tiny")
    assert maskless.load("tiny").config.condition == 8


def test_a_name_that_is_almost_right_gets_a_hint(run):
    folder, _ = run()
    ship.ship(folder, "tiny", words=WORDS)
    with pytest.raises(ValueError, match=r"'tinny' is neither .*; did you mean 'tiny'\?"):
        maskless.load("tinny")
    for name in ("../models/tiny", "", ".", "nowhere"):
        assert shipped.find(name) is None


def test_the_command_lists_what_there_is(run, command):
    code, out, _ = command("models")
    assert code == 0
    assert out.startswith("no models are shipped")
    assert len(out.splitlines()) == 1
    ship.ship(run()[0], "tiny", words=WORDS)
    code, out, _ = command("models")
    assert code == 0
    assert all(part in out for part in ("tiny", "pgm", "0.0 M", "Badly."))
    (listed,) = json.loads(command("models", "--json")[1])
    assert listed["name"] == "tiny"
    assert command("models", "tiny")[1].startswith("# tiny\n")
    code, _, err = command("models", "large")
    assert (code, err) == (2, "error: unknown model 'large': expected one of those shipped (tiny)\n")


def test_the_wheel_carries_every_file_of_a_shipped_model(run, models):
    """What `setuptools` is told to take from the package has all that a folder holds, a codec's files too."""
    ship.ship(run()[0], "tiny", words=WORDS)
    (models / "tiny" / "codec").mkdir()
    (models / "tiny" / "codec" / "config.json").write_text("{}")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["maskless"]
    taken = {path for pattern in patterns for path in models.parent.glob(pattern) if path.is_file()}
    assert taken == {path for path in models.rglob("*") if path.is_file()}
    assert len(taken) == 5


def test_twins_share_one_tokenizer(run, models):
    folder, model = run("ordered")
    ship.ship(folder, "first", words=WORDS)
    ship.ship(run("causal")[0], "twin", words=WORDS)
    assert (models / "first" / "tokenizer.json").is_file()
    assert not (models / "twin" / "tokenizer.json").exists()
    assert maskless.load("twin").codec.tokenizer.to_str() == model.codec.tokenizer.to_str()
    shutil.rmtree(models / "first")
    with pytest.raises(ValueError, match="tokenizer 'first': expected a shipped model"):
        maskless.load("twin")


def test_orders_and_defaults_are_shipped_too(tiny, run, models):
    folder, model = run("ordered")
    model.mixture = Mixture.parse("strands=80,random=20")
    model.save_pretrained(folder / "model")
    ship.ship(folder, "chain", words=WORDS, defaults={"strands": 2, "top_p": 0.9}, quality="Gen-PPL 9")
    again = maskless.load("chain")
    assert (again.mixture, again.quality) == (model.mixture, "Gen-PPL 9")
    assert again.defaults == {"strands": 2, "top_p": 0.9}
    with pytest.raises(ValueError, match="defaults"):
        ship.ship(folder, "chain", words=WORDS, defaults={"best": 1})
    assert maskless.load("chain").defaults == again.defaults
