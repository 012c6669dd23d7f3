"""`maskless evaluate` of text models: every measure as JSON and as a table, and mistakes in one line."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import maskless
from in_process import done, one_line
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.data.prepare import prepare
from toy_text import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny) -> Path:
    """Models of every kind over bytes, 16 tokens long, with data."""
    path = tmp_path_factory.mktemp("text-cli")
    text = write(path / "toy.txt", 200, seed=0)
    write(path / "other.txt", 60, seed=1)
    (path / "little.txt").write_text("too little")
    prepare([text], path / "data", codec=byte_codec(), length=16)
    for name, kind in {"pgm": "position", "chain": "ordered", "mdlm": "masked", "ar": "causal"}.items():
        network = tiny(kind, vocab=257 + (kind == "masked"), length=16, scale=0.1)
        Model(network, byte_codec()).save_pretrained(path / name)
    return path


def strictly(text: str) -> dict:
    """What JSON says, without NaN and Infinity, which Python alone would read."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def found(ended) -> dict:
    return strictly(done(ended).out)


def test_bounds_of_other_texts_are_in_bits_too(folder, command):
    given = ["--data", folder / "data", "--data", folder / "other.txt", "--sequences", 8]
    results = found(command("evaluate", folder / "pgm", "--what", "bound", *given, "--json"))["bound"]
    assert list(results) == [str(folder / "data"), str(folder / "other.txt")]
    for text in results.values():
        ours = text["both groups, stratified"]
        assert ours["bits_per_byte"] == pytest.approx(ours["nats"] / 0.6931472, rel=0.1)  # a token is about a byte
        assert ours["bits_per_character"] == pytest.approx(ours["bits_per_byte"])
        assert ours["bits_per_byte_error"] == pytest.approx(ours["bits_per_byte"] * ours["error"] / ours["nats"])
    shown = command("evaluate", folder / "pgm", *given)
    assert f"{results[str(folder / 'other.txt')]['the paper' + chr(39) + 's']['perplexity']:.2f}" in shown.out
    plain = found(command("evaluate", folder / "pgm", *given[:2], *given[4:], "--json"))
    assert plain == results[str(folder / "data")]
    keys = {"nats", "error", "sequences", "tokens", "perplexity", "perplexity_error"}
    bits = {"bits_per_byte", "bits_per_byte_error", "bits_per_character", "bits_per_character_error"}
    assert set(plain["the paper's"]) == keys | bits
    assert found(command("evaluate", folder / "pgm", *given, "--json")) == results


def test_generative_perplexity_is_kept_in_a_file(folder, judge, command, tmp_path, monkeypatch):
    to = tmp_path / "points.json"
    given = ["evaluate", folder / "pgm", "--what", "genppl", "--judge", judge, "--texts", 3, "--steps", "4,16"]
    given += ["--data", folder / "data", "--top-p", 0.9, "--temperature", 0.8, "--out", to]
    results = found(command(*given, "--json", "--save-texts"))["genppl"]
    assert [point["steps"] for point in results["points"]] == [0, 4, 16]
    for point in results["points"]:
        quality = point["quality"]
        assert quality["samples"] == 3
        assert quality["raw"]["tokens"] == 3 * 15
        assert {*quality["distinct"]} == {"1", "2", "3", "4"}
        assert quality["entropy"]["value"] > 0
        assert (point["tokens_per_second"] is None) == (point["steps"] == 0)
        assert len(point["texts"]) == 3
    assert json.loads(to.read_text())["points"] == results["points"]
    monkeypatch.setattr("maskless.evaluate.orders.generate_texts", None)  # nothing is drawn again
    shown = command(*given)
    assert shown.code == 0
    assert "the data" in shown.out
    assert f"{results['points'][1]['quality']['retokenised']['perplexity']:.2f}" in shown.out
    other = command(*given[:-2], "--top-k", 5, "--out", to)
    assert other.code == 2
    assert "was made with top_k None, not 5: name another file" in other.err
    assert "was made with texts 3, not 2: name another file" in command(*given, "--texts", 2).err


def test_exact_samples_are_judged_too(folder, judge, command, tmp_path):
    given = ["evaluate", folder / "chain", "--what", "genppl", "--judge", judge, "--texts", 2, "--exact", "--draft", 4]
    to = tmp_path / "points.json"
    (point,) = found(command(*given, "--json", "--out", to, "--save-texts"))["genppl"]["points"]
    assert point["steps"] == 16
    assert point["texts"] == list(map(str, maskless.generate(maskless.load(folder / "chain"), 2, exact=True, draft=4)))


def test_points_of_other_data_or_of_another_tokenizer_are_not_taken_for_ours(folder, judge, command, tmp_path):
    """Though the names of the files are the same."""
    to, text, bare = tmp_path / "points.json", tmp_path / "real.txt", shutil.copytree(folder / "pgm", tmp_path / "bare")
    text.write_text("the cat sat on the mat. " * 9)
    path = (bare / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    given = ["evaluate", bare, "--tokenizer", path, "--what", "genppl", "--judge", judge, "--texts", 3, "--steps", 4]
    given += ["--data", text, "--out", to, "--json"]
    first = found(command(*given))
    assert found(command(*given)) == first
    text.write_text("a dog ran to the log... " * 9)
    changed = command(*given)
    assert (changed.code, changed.out) == (2, "")
    assert "points.json was made with data_sha256 " in changed.err
    text.write_text("the cat sat on the mat. " * 9)
    other = json.loads(path.read_text())
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    kept = path.read_text()
    path.write_text(json.dumps(other))
    assert "points.json was made with tokenizer " in command(*given).err
    path.write_text(kept)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"layout": "padded"}))
    assert "points.json was made with layout packed, not padded" in command(*given).err


def test_speeds_of_other_batches_say_so(folder, judge, command, tmp_path):
    """The texts are the same, so their figures are kept."""
    given = ["evaluate", folder / "pgm", "--what", "genppl", "--judge", judge, "--texts", 4]
    given += ["--out", tmp_path / "p.json"]
    (first,) = found(command(*given, "--steps", 4, "--batch", 1, "--json"))["genppl"]["points"]
    assert re.fullmatch(r"batch 1, 1 x \w+", first["drawn"])
    assert "batch" not in command(*given, "--steps", 4, "--batch", 4).out
    shown = command(*given, "--steps", "4,8", "--batch", 4).out
    points = found(command(*given, "--steps", "4,8", "--batch", 4, "--json"))["genppl"]["points"]
    assert points[0] == first
    assert re.findall(r"\((batch .*?)\)", shown) == [point["drawn"] for point in points]
    assert points[1]["drawn"] == first["drawn"].replace("batch 1", "batch 4")


def test_a_causal_model_is_judged_at_its_own_steps(folder, judge, command):
    given = ["evaluate", folder / "ar", "--what", "genppl", "--judge", judge, "--texts", 2, "--json"]
    assert [point["steps"] for point in found(command(*given))["genppl"]["points"]] == [16]
    assert "leave --steps out" in command(*given, "--steps", 4).err


def test_the_error_of_one_sequence_is_unknown(folder, command):
    given = ["evaluate", folder / "pgm", "--data", folder / "data", "--sequences", 1]
    ended = command(*given)
    assert ended.code == 0
    assert "nan" not in ended.out
    assert "± ?" in ended.out
    for estimator in found(command(*given, "--json")).values():
        assert (estimator["error"], estimator["perplexity_error"]) == (None, None)
    bits = found(command(*given, "--what", "bound", "--json"))["bound"]
    assert [one["bits_per_byte_error"] for text in bits.values() for one in text.values()] == [None, None, None]


def test_the_errors_of_one_text_are_unknown_in_its_file_too(folder, judge, command, monkeypatch):
    to = folder / "one.json"
    given = ["evaluate", folder / "pgm", "--what", "genppl", "--judge", judge, "--texts", 1, "--steps", 4, "--out", to]
    (point,) = found(command(*given, "--json"))["genppl"]["points"]
    assert point["quality"]["entropy"]["error"] is None
    assert point["quality"]["retokenised"]["perplexity_error"] is None
    assert strictly(to.read_text())["points"] == [point]
    monkeypatch.setattr("maskless.evaluate.orders.generate_texts", None)  # nothing is drawn again
    assert found(command(*given, "--json"))["genppl"]["points"] == [point]
    assert "± ?" in command(*given).out


def test_the_error_of_one_pair_of_gradients_is_unknown(folder, command):
    given = ["evaluate", folder / "pgm", "--what", "variance", "--data", folder / "data", "--pairs", 1, "--batch", 2]
    results = found(command(*given, "--json"))["variance"]["objectives"]
    assert {one["error"] for one in results} == {one["signal_error"] for one in results} == {None}
    shown = command(*given).out
    assert "± ?" in shown
    assert "nan" not in shown


@pytest.mark.parametrize("model", ["pgm", "mdlm"])
def test_orders_have_bounds_and_samples(model, folder, command):
    given = ["evaluate", folder / model, "--what", "orders", "--data", folder / "data", "--sequences", 4, "--texts", 3]
    results = found(command(*given, "--steps", "4,16", "--json"))["orders"]["orders"]
    assert [(one["order"], one["steps"]) for one in results] == [
        (order, steps) for order in ("random", "left", "strands", "confidence") for steps in (4, 16)
    ]
    assert all(one["bound"]["nats"] > 0 and one["samples"]["quality"]["retokenised"] is None for one in results)
    assert "strands" in command(*given).out


@pytest.mark.parametrize("model", ["pgm", "mdlm", "ar"])
def test_no_model_leaks(model, folder, command):
    given = ["evaluate", folder / model, "--what", "leak", "--sequences", 2]
    with_data = found(command(*given, "--data", folder / "data", "--json"))["leak"]
    without = found(command(*given, "--json"))["leak"]
    assert with_data["tight"]
    assert without["tight"]
    assert "leaks" in command(*given).out


@pytest.mark.parametrize(("model", "first"), [("pgm", "pgm"), ("mdlm", "mdlm-complementary")])
def test_gradients_have_a_variance(model, first, folder, command):
    given = ["evaluate", folder / model, "--what", "variance", "--data", folder / "data", "--pairs", 2, "--batch", 4]
    results = found(command(*given, "--json"))["variance"]["objectives"]
    assert results[0]["objective"] == first
    assert all(one["variance"] > 0 and one["error"] >= 0 and one["pairs"] == 2 for one in results)
    assert "of mdlm's" in command(*given).out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("{pgm} --what speed", "--what 'speed' is unknown: expected some of bound, genppl, orders, parallel, leak"),
        ("{pgm} --what genppl,orders --revise 2", "expected no --what orders beside it"),
        ("{pgm} --what orders", "expected --data DIR (a prepared folder) or a text file for --what orders"),
        ("{pgm} --what variance", "expected --data DIR"),
        ("{pgm} --data {little}", "has too little text: 11 tokens, and a row needs 16"),
        ("{pgm} --data {folder}/nowhere.txt", "no such file or folder"),
        ("{pgm} --data {data} --steps 4", "--steps goes with --what genppl or orders, not with bound"),
        ("{pgm} --data {data} --pairs 4", "--pairs goes with --what variance"),
        ("{pgm} --what genppl --save-texts", "expected --out FILE.json"),
        ("{pgm} --what genppl --out {folder}/no/such.json", "is not a folder"),
        ("{pgm} --what genppl --steps 4,many", "--steps '4,many': expected a whole number, or several: 8,16,32"),
        ("{pgm} --what genppl --steps 17", "steps 17 is out of range: expected 1 to 16"),
        ("{pgm} --what genppl --exact --steps 4", "--steps 4 with --exact, which settles them"),
        ("{pgm} --what genppl --exact --draft 4,8", "--draft 4,8 with --what genppl: expected one number"),
        ("{pgm} --what genppl --data {data} --data {data}", "2 texts: samples are compared with one --data at most"),
        ("{pgm} --what parallel --counts uniform", "--counts are settled by --draft"),
        ("{pgm} --what genppl --exact", "exact sampling checks tokens as a chain"),
        ("{pgm} --what genppl --judge {folder}/no.gguf", "no such file"),
        ("{pgm} --what genppl --judge {data}", "holds no config.json"),
        ("{pgm} --what variance --data {data} --pairs 0", "pairs 0 is out of range"),
        ("{pgm} --what leak --sequences 0", "sequences 0 is out of range"),
        ("{pgm} --what orders --data {data} --samples 0", "samples 0 is out of range"),
        ("{ar} --what orders --data {data}", "a causal model knows one order only"),
        ("{ar} --what variance --data {data}", "has no split to vary"),
    ],
)
def test_mistakes_are_one_line(words, says, folder, command):
    named = {name: folder / name for name in ("pgm", "ar", "data")} | {"little": folder / "little.txt"}
    assert says in one_line(command("evaluate", *shlex.split(words.format(folder=folder, **named))))
