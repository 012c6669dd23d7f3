"""Generative perplexity: the judge's own loss, hand counts of variety, and points that are not computed twice."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import types
from pathlib import Path

import pytest
import torch

from maskless.checkpoint import Model
from maskless.codec.text import TextCodec, byte_codec
from maskless.evaluate import genppl
from maskless.evaluate.corpora import corpus
from maskless.evaluate.genppl import Mean, Sample, quality, sample_of, sweep
from maskless.evaluate.judge import Judge, judge
from maskless.evaluate.likelihood import likelihood
from maskless.evaluate.orders import drawing, unknown
from maskless.evaluate.variety import distinct, entropy, longest_repeat

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'maskless[judge]'"
)

TEXTS = ["the small cats that the old dog sees", "zero plus one is one .", "a", "ben has the red ball " * 4]


def fast(tokenizer, **special: str):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random GPT-2 over bytes with a context of 40 tokens."""
    torch.manual_seed(0)
    sizes = {"n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=257, **sizes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    path = tmp_path_factory.mktemp("judge")
    network.save_pretrained(path)
    fast(byte_codec().tokenizer, eos_token="<|endoftext|>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def judged(folder) -> Judge:
    return judge(str(folder))


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
    twice = [
        k
        for k in range(1, len(row))
        for i, j in itertools.combinations(range(len(row) - k + 1), 2)
        if row[i : i + k] == row[j : j + k]
    ]
    assert longest_repeat(row) == max(twice, default=0)


def test_means_have_the_error_of_a_mean():
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert Mean.of(values).value == pytest.approx(7 / 3)
    assert Mean.of(values).error == pytest.approx(float(values.std()) / math.sqrt(3))


# The judge


def test_the_cost_of_a_row_is_the_loss_of_transformers(judged):
    rows = judged.encode(TEXTS[:3])
    costs = judged.costs(rows, batch=2)
    for row, (nats, count) in zip(rows, costs.tolist(), strict=True):
        ids = torch.tensor([row])
        assert count == len(row) - 1
        if count:
            with torch.no_grad():
                expected = judged.network(input_ids=ids, labels=ids).loss
            assert nats / count == pytest.approx(float(expected), rel=1e-5)
    together = genppl.quality([Sample(row, "") for row in rows], None)
    assert together.retokenised is None


def test_generative_perplexity_is_the_exponential_of_the_loss_on_the_same_ids(judged):
    rows = judged.encode([text[:20] for text in (TEXTS[0], TEXTS[1], TEXTS[3])])  # of one length: a mean is a mean
    found = quality([Sample(row, byte_codec().decode(row)) for row in rows], judged, byte_codec())
    ids = torch.tensor(rows)
    with torch.no_grad():
        loss = float(judged.network(input_ids=ids, labels=ids).loss)
    assert found.raw is not None
    assert found.raw.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert found.retokenised == found.raw
    each = torch.tensor([[float(n) for n in row] for row in judged.costs(rows)])[:, 0] / (len(rows[0]) - 1)
    assert found.raw.error == pytest.approx(float(each.std()) / math.sqrt(3), rel=1e-4)


def test_texts_longer_than_the_context_count_every_token_once(judged):
    (row,) = judged.encode([TEXTS[3]])
    assert len(row) == 84
    nats, count = judged.costs([row])[0].tolist()
    assert count == 83
    expected = 0.0
    for begin, end, first in ((0, 40, 1), (20, 60, 40), (40, 80, 60), (60, 84, 80)):
        with torch.no_grad():
            log_p = judged.network(input_ids=torch.tensor([row[begin:end]])).logits[0].log_softmax(-1)
        expected -= sum(float(log_p[i - begin - 1, row[i]]) for i in range(first, end))
    assert nats == pytest.approx(expected, rel=1e-5)


def test_what_the_tokenizer_leads_with_is_context(folder, judged):
    from tokenizers import processors

    tokenizer = byte_codec().tokenizer
    single = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    tokenizer.post_processor = single
    led = Judge(judged.network, fast(tokenizer, bos_token="<|endoftext|>"), "led")
    assert led.lead == [256]
    assert judged.lead == []
    (row,) = led.encode(["abc"])
    assert row == list(b"abc")
    assert led.costs([row]).tolist() == [pytest.approx(judged.costs([[256, *row]])[0].tolist())]
    assert led.costs([[256, *row]]).equal(led.costs([row])), "a row that brings its BOS gets no second one"


def test_raw_tokens_are_judged_only_where_ids_mean_the_same(judged, tiny):
    from maskless.codec.text import train_bpe

    samples = [Sample(list(text.encode()), text) for text in ("some text", "other")]
    assert quality(samples, judged, byte_codec()).raw is not None
    assert quality(samples, judged, train_bpe(TEXTS, 280)).raw is None


def test_a_gguf_file_is_a_judge(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'maskless[judge]'")
    symbols = sorted(byte_codec().tokenizer.get_vocab().items(), key=lambda item: item[1])
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(258)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(symbol for symbol, _ in symbols), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    shapes = {"token_embd": (258, 32), "output_norm": (32,), "output": (258, 32)}
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (32, 32) for name in ("gate", "up", "down")}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = judge(str(tmp_path / "tiny.gguf"))
    assert found.context == 64
    rows = found.encode(["the cab"])
    assert rows == [[*b"the c", 257]]
    assert float(found.costs(rows)[0, 1]) == 5 + len(found.lead)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{tmp}/none.gguf", "no such file"),
        ("{tmp}/bad.gguf", "cannot be read"),
        ("{tmp}", "holds no config.json"),
        ("{tmp}/nowhere", "expected a hub id, a folder"),
    ],
)
def test_what_is_no_judge_is_one_line(name, says, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(ValueError, match=says):
        judge(name.format(tmp=tmp_path))


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
    path.write_text("{}")
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

    def wrote(tokens, *_, **__):
        tokens.copy_(rows[: len(tokens)])
        return iter(())

    monkeypatch.setattr("maskless.texts.sample", lambda network, tokens, *_, **__: wrote(tokens))
    monkeypatch.setattr("maskless.evaluate.orders.sample_confident", lambda network, tokens, *_, **__: wrote(tokens))
    monkeypatch.setattr("maskless.texts.serves", lambda network: False)
    monkeypatch.setattr("maskless.evaluate.orders.serves", lambda network: False)
    draw = drawing(padded, order=order)
    assert [(sample.text, sample.decided) for sample in draw(0, 2, 4)] == [
        ("a cat sat.", 24),
        ("the dog and the dog and", 24),
    ]
    monkeypatch.setattr(genppl.time, "perf_counter", itertools.count().__next__)
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
