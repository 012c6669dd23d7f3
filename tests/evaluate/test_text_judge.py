"""Judges of text: the cost of a row is the judge's own loss, whatever the judge comes as."""

import math

import pytest
import torch

from maskless.codec.text import byte_codec
from maskless.evaluate import genppl
from maskless.evaluate.genppl import Sample, quality
from maskless.evaluate.judge import Judge, judge

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'maskless[judge]'"
)

TEXTS = ["the small cats that the old dog sees", "zero plus one is one .", "a", "ben has the red ball " * 4]


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
    with pytest.raises(ValueError, match="no text that a judge could read"):
        genppl.quality([Sample(rows[0], "")], judged)


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


def test_what_the_tokenizer_leads_with_is_context(judged):
    from tokenizers import processors

    tokenizer = byte_codec().tokenizer
    single = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    tokenizer.post_processor = single
    led = Judge(
        judged.network,
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>"),
        "led",
    )
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
