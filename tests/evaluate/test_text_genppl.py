"""Generative perplexity: hand counts of variety, points that are not computed twice, documents that end."""

import gzip
import itertools
import json
import math
import random
import sys
import types

import pytest
import torch
from test_text_judge import TEXTS

from maskless.checkpoint import Model
from maskless.codec.text import TextCodec, byte_codec
from maskless.evaluate import genppl
from maskless.evaluate.corpora import corpus
from maskless.evaluate.genppl import Mean, Sample, distinct, entropy, longest_repeat, quality, sample_of, sweep
from maskless.evaluate.likelihood import likelihood
from maskless.evaluate.orders import drawing, unknown


@pytest.fixture(scope="module")
def model(tiny) -> Model:
    return Model(tiny("position", vocab=257, length=24, scale=0.2), byte_codec())


# Variety


def test_entropy_is_a_hand_count():
    assert entropy([7] * 9) == 0
    assert entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))
    assert entropy([1, 1, 1, 2]) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


@pytest.mark.parametrize("seed", range(30))
def test_repetition_is_what_brute_force_finds(seed):
    rng = random.Random(seed)
    row = [rng.randrange(rng.choice((1, 2, 3, 300))) for _ in range(rng.randrange(0, 25))]
    for n in (1, 2, 3, 4):
        grams = [row[i : i + n] for i in range(len(row) - n + 1)]
        kinds = [gram for i, gram in enumerate(grams) if gram not in grams[:i]]
        assert distinct(row, n) == (len(kinds) / len(grams) if grams else 1.0)
    pairs = ((k, *pair) for k in range(1, len(row)) for pair in itertools.combinations(range(len(row) - k + 1), 2))
    twice = [k for k, i, j in pairs if row[i : i + k] == row[j : j + k]]
    assert longest_repeat(row) == max(twice, default=0)


def test_means_have_the_error_of_a_mean():
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert Mean.of(values).value == pytest.approx(7 / 3)
    assert Mean.of(values).error == pytest.approx(float(values.std()) / math.sqrt(3))


# Points


def test_points_are_kept_and_not_computed_again(model, judged, tmp_path):
    path, asked = tmp_path / "points.json", []
    draw = drawing(model, seed=3)

    def counted(first: int, n: int, steps: int):
        asked.append(steps)
        return draw(first, n, steps)

    given = {"settings": {"seed": 3}, "batch": 2}
    first = list(sweep(counted, [4, 8], 5, judged, byte_codec(), path, **given))
    assert asked == [4, 4, 4, 8, 8, 8]
    again = list(sweep(counted, [8, 2, 4], 5, judged, byte_codec(), path, **given))
    assert asked == [4, 4, 4, 8, 8, 8, 2, 2, 2]
    assert [again[2], again[0]] == first
    assert [point["steps"] for point in json.loads(path.read_text())["points"]] == [2, 4, 8]
    assert first[0].texts is None
    (kept,) = sweep(counted, [4], 5, judged, byte_codec(), path, keep_texts=True, **given)
    assert kept.texts == [sample.text for sample in draw(0, 5, 4)]
    assert kept.quality == first[0].quality
    with pytest.raises(ValueError, match="was made with seed 3, not 4: name another file"):
        list(sweep(counted, [4], 5, judged, byte_codec(), path, settings={"seed": 4}))
    for damaged in ("{}", "[" * 100_000):
        path.write_text(damaged)
        with pytest.raises(ValueError, match="is not a file of generative perplexities"):
            list(sweep(counted, [4], 5, judged, byte_codec(), path, **given))


def test_a_point_does_not_depend_on_the_batches(model, judged):
    draw = drawing(model, seed=1, temperature=0.7, top_p=0.9)
    one, two = (next(sweep(draw, [6], 5, judged, byte_codec(), batch=batch)).quality for batch in (5, 2))
    assert one == two


def test_processes_share_the_samples(model, monkeypatch):
    """Each draws its own numbers, in order; together they are all of them, whatever the batch."""
    numbers: list[int] = []

    def draw(first: int, n: int, steps: int):
        numbers.extend(range(first, first + n))
        return [Sample([1, 2], "ab")] * n

    for rank in range(3):
        state = types.SimpleNamespace(process_index=rank, num_processes=3, is_main_process=rank == 0)
        monkeypatch.setattr(genppl, "PartialState", lambda state=state: state)
        monkeypatch.setattr(genppl, "gather_object", list)
        (point,) = sweep(draw, [4], 8, None, batch=2)
        assert point.quality.samples in (2, 3)
    assert numbers == list(range(8))


def test_the_first_batch_warms_up_and_its_time_does_not_count(monkeypatch):
    """Unless it is the only one."""
    clock = {"now": 0.0}

    def draw(first: int, n: int, steps: int):
        clock["now"] += 100 if first == 0 else n / 8
        return [Sample([1, 2], "ab", 24)] * n

    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    speeds = [next(sweep(draw, [4], n, None, batch=2)).tokens_per_second for n in (7, 2)]
    assert speeds == [24 * 8, pytest.approx(2 * 24 / 100)]


def test_samples_are_those_that_generate_gives(model):
    import maskless

    texts = maskless.generate(model, 4, steps=5, seed=2, temperature=0.5)
    drawn = drawing(model, seed=2, temperature=0.5)(1, 3, 5)
    assert drawn == [(text.tokens, str(text), 24) for text in texts[1:]]
    by_confidence = drawing(model, order="confidence", seed=2)
    assert by_confidence(1, 2, 5) == by_confidence(0, 3, 5)[1:]
    assert unknown(model) == 24
    assert unknown(Model(model.network, byte_codec(), "wrapped")) == 23


# Documents that end before their row does

STORY = list(b"a cat sat.")


@pytest.fixture(scope="module")
def padded(tiny) -> Model:
    return Model(tiny("position", vocab=257, length=24, scale=0.2), byte_codec(), "padded")


def test_what_follows_the_end_of_a_document_is_no_text():
    codec, row = byte_codec(), [256, *STORY, 256, *b"no", *[256] * 10]
    assert sample_of(row, codec, "padded") == ([256, *STORY], "a cat sat.", 24)
    assert sample_of([256, *STORY], codec, "padded") == ([256, *STORY], "a cat sat.", 11)  # it never ends
    assert sample_of([256] * 5, codec, "padded") == ([256], "", 5)
    for layout in ("packed", "wrapped"):  # there a row goes on with the next document
        assert sample_of(row, codec, layout) == (row, "a cat sat.no", 24)


@pytest.mark.parametrize("order", ["random", "confidence"])
def test_samples_end_where_their_document_ends_and_their_speed_counts_all_that_was_drawn(padded, order, monkeypatch):
    rows = torch.tensor([[256, *STORY, *[256] * 13], [256, *b"the dog and the dog and the"[:23]]])

    def wrote(drafts, *_):
        drafts.tokens.copy_(rows[: len(drafts)])
        return drafts.plan.decided()

    monkeypatch.setattr("maskless.decide.run", wrote)
    draw = drawing(padded, order=order)
    assert [(sample.text, sample.decided) for sample in draw(0, 2, 4)] == [
        ("a cat sat.", 24),
        ("the dog and the dog and", 24),
    ]
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    (point,) = sweep(draw, [4], 1, None)
    assert point.tokens_per_second == 24
    assert point.quality.entropy.value == pytest.approx(entropy([256, *STORY]))
    assert point.quality.longest_repeat.value == longest_repeat(STORY) == 2  # "at"


def test_a_judge_reads_documents_without_what_fills_their_rows_up(padded, judged):
    codec = byte_codec()
    ended = [sample_of([256, *STORY, *[256] * fill], codec, "padded") for fill in (1, 13)]
    one, other = (quality([sample], judged, codec) for sample in ended)
    assert one.raw == pytest.approx(other.raw, nan_ok=True)
    assert one.raw is not None
    assert one.raw.tokens == len(STORY)
    assert one.retokenised is not None
    assert one.retokenised.tokens == len(STORY) - 1


@pytest.mark.parametrize("with_pad", [False, True])
def test_real_documents_are_measured_as_drawn_ones_are(with_pad, tiny, tmp_path):
    """And bits per byte are all nats over all bytes, whether what fills rows up counts or not."""
    codec = byte_codec()
    if with_pad:
        codec.tokenizer.add_special_tokens(["[PAD]"])
        codec = TextCodec(codec.tokenizer)
    model = Model(tiny("position", vocab=258, length=24, scale=0.2), codec, "padded")
    documents = ["a cat sat.", "no", "the dog and the dog and the dog"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents * 4))
    kept = sum(len(text[:22]) for text in documents)
    with corpus(str(tmp_path / "d.jsonl"), model, "model") as plain:
        assert [sample.text for sample in plain.samples(3)] == [documents[0], documents[2][:22], documents[2][:22]]
        found = likelihood(model.network, plain.rows, sequences=12, pad=plain.pad)
        assert found.tokens == 4 * ((kept + 6) if with_pad else 72)
        assert found.bits_per_byte(plain.bytes_per_token) == pytest.approx(
            found.nats * found.tokens / math.log(2) / (4 * kept)
        )


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a"])
def test_plain_text_is_measured_to_its_end_in_rows_of_the_padded_layout(name, tiny, tmp_path):
    """It has no documents: cut to one row each, only its beginning would count."""
    text = "".join(f"line {i} of it.\n" for i in range(3000))
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    model = Model(tiny("position", vocab=257, length=24), byte_codec(), "padded")
    with corpus(str(tmp_path / name), model, "model") as found:
        assert len(found.rows) == -(-len(text) // 22)
        assert "".join(one.text for one in found.samples(len(found.rows))) == text
        assert found.bytes_per_token * len(found.rows) * 24 == pytest.approx(len(text))
        assert found.rows.rows([0, 1])[:, [0, -1]].tolist() == [[256, 256]] * 2


def test_mauve_comes_with_its_package_and_with_real_texts(model, judged, monkeypatch):
    fake = types.ModuleType("mauve")
    fake.__spec__ = types.SimpleNamespace()
    seen = []

    def compute(p_features, q_features, seed, verbose):
        seen.append((p_features.shape, q_features.shape))
        return types.SimpleNamespace(mauve=0.5 + 0.1 * seed)

    fake.compute_mauve = compute
    monkeypatch.setitem(sys.modules, "mauve", fake)
    real = judged.features(judged.encode(TEXTS))
    assert real.shape == (4, 16)
    samples = drawing(model)(0, 3, 4)
    found = quality(samples, judged, byte_codec(), reference=real).mauve
    assert found is not None
    assert found.value == pytest.approx(0.6)
    assert seen == [((4, 16), (3, 16))] * 3
    assert quality(samples, judged, byte_codec()).mauve is None
    monkeypatch.setattr(genppl, "mauve_installed", lambda: False)
    assert quality(samples, judged, byte_codec(), reference=real).mauve is None
