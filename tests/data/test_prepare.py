"""Preparing: the rows hold the documents, the split is even and fixed, and nothing half-written is left behind."""

import errno
import itertools
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from maskless.codec.text import TextCodec, byte_codec
from maskless.data import parts, sources, unpack
from maskless.data import prepare as module
from maskless.data.prepare import prepare
from maskless.data.split import in_valid
from maskless.data.tokens import open_tokens
from maskless.data.unpack import InputLimits

BYTES = byte_codec()
DOCUMENTS = [f"document {i} " + "é漢 word " * (i % 17) + "end" for i in range(400)]


@pytest.fixture
def jsonl(tmp_path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


@pytest.fixture
def bert(tmp_path) -> TextCodec:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "document", "word", "end", *map(str, range(10))]
    words += [f"##{i}" for i in range(10)]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    return TextCodec.load(tmp_path / "vocab.txt")


def split_documents(valid: Fraction = Fraction(1, 20)) -> dict[str, list[str]]:
    return {
        name: [text for i, text in enumerate(DOCUMENTS) if in_valid(i, valid) == (name == "valid")]
        for name in ("train", "valid")
    }


def stream(folder: Path, split: str) -> list[int]:
    rows = open_tokens(folder).split(split)
    return rows.rows(range(len(rows))).flatten().tolist()


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_packed_rows_are_the_documents_in_order_with_an_end_after_each(jsonl, tmp_path):
    out = prepare([jsonl], tmp_path / "out", codec=BYTES, length=32)
    assert left_in(out) == {"train.bin", "valid.bin", "index.json", "tokenizer.json"}
    for name, documents in split_documents().items():
        whole = [token for text in documents for token in (*text.encode(), 256)]
        tokens = stream(out, name)
        assert tokens == whole[: len(whole) // 32 * 32]
        split = open_tokens(out).splits[name]
        assert split.tokens == len(tokens) == split.rows * 32
        # byte tokens: all but the ends are text; a character cut by the last row counts as the decoder shows it
        assert abs(split.bytes - sum(token != 256 for token in tokens)) <= 3


def test_files_are_prepared_as_one_that_holds_them_all(jsonl, tmp_path):
    lines = jsonl.read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:7]), ("b", lines[7:300]), ("c", lines[300:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    whole = prepare([jsonl], tmp_path / "whole", codec=BYTES, length=32)
    out = prepare([tmp_path / f"{name}.jsonl" for name in "abc"], tmp_path / "out", codec=BYTES, length=32)
    for name in ("train.bin", "valid.bin"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_wrapped_rows_are_packed_rows_between_begin_and_end(jsonl, tmp_path):
    packed = prepare([jsonl], tmp_path / "packed", codec=BYTES, length=30)
    wrapped = prepare([jsonl], tmp_path / "wrapped", codec=BYTES, length=32, layout="wrapped")
    for name in ("train", "valid"):
        rows = np.array(stream(wrapped, name)).reshape(-1, 32)
        assert (rows[:, 0] == 256).all()
        assert (rows[:, -1] == 256).all()
        assert rows[:, 1:-1].flatten().tolist() == stream(packed, name)


def test_padded_rows_hold_a_document_each(jsonl, tmp_path, bert):
    out = prepare([jsonl], tmp_path / "out", codec=bert, length=16, layout="padded")
    prepared = open_tokens(out)
    for name, documents in split_documents().items():
        rows = prepared.split(name)
        assert len(rows) == len(documents)
        for text, row in zip(documents, rows.rows(range(len(rows))).tolist(), strict=True):
            kept = bert.encode(text)[:14]
            assert row == [bert.bos, *kept, bert.eos] + [bert.pad] * (14 - len(kept))
        assert prepared.splits[name].tokens == sum(min(len(bert.encode(t)), 14) + 2 for t in documents)
        assert 0 < prepared.splits[name].bytes < sum(len(t.encode()) for t in documents)


def test_padded_rows_fill_up_with_eos_where_there_is_no_pad(jsonl, tmp_path):
    prepared = open_tokens(prepare([jsonl], tmp_path / "out", codec=BYTES, length=4096, layout="padded"))
    assert prepared.pad is None  # so the filling counts in the loss
    text, row = split_documents()["train"][0], prepared.split("train").rows([0])[0].tolist()
    kept = BYTES.encode(text)[:4094]
    assert row == [BYTES.bos, *kept] + [BYTES.eos] * (4095 - len(kept))


def test_a_text_file_gives_all_its_text_and_an_end_where_a_side_leaves_off(tmp_path):
    lines = [f"line number {i}\n" for i in range(5000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    out = prepare([tmp_path / "a.txt"], tmp_path / "out", codec=BYTES, length=8, valid=0.1)
    stretches = {
        name: bytes(t if t < 256 else 0 for t in stream(out, name)).decode().split("\0") for name in ("train", "valid")
    }
    every = [line for name in stretches for stretch in stretches[name] for line in stretch.splitlines(keepends=True)]
    assert len(set(lines) - set(every)) <= 2  # the dropped ends
    for stretch in [s for name in stretches for s in stretches[name] if s]:
        assert stretch in "".join(lines)
    assert len(stretches["valid"]) >= 6


def test_two_runs_give_the_same_bytes_and_a_learnt_vocabulary(jsonl, tmp_path):
    outs = [prepare([jsonl], tmp_path / name, vocab=300, length=32) for name in ("one", "two")]
    for name in left_in(outs[0]):
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes()
    prepared = open_tokens(outs[0])
    assert prepared.vocab == prepared.codec().vocab == 300
    assert prepared.codec().decode(stream(outs[0], "train")).startswith(DOCUMENTS[0])


def test_many_tokens_need_wide_integers(jsonl, tmp_path):
    codec = byte_codec()
    codec.tokenizer.add_tokens([f"unused {i}" for i in range(1 << 16)])
    out = prepare([jsonl], tmp_path / "out", codec=TextCodec(codec.tokenizer), length=32)
    assert open_tokens(out).dtype == "uint32"
    assert stream(out, "train")[:5] == list(b"docum")


def test_data_sets_with_a_split_of_their_own_keep_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "lm1b").mkdir()
    for name, text in (("train", "a b ."), ("test", "c d .")):
        datasets.Dataset.from_dict({"text": [text] * 30}).to_parquet(str(tmp_path / "lm1b" / f"{name}.parquet"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        out = prepare([f"lm1b:{tmp_path / 'lm1b'}"], tmp_path / "out", codec=BYTES, length=5)
    assert stream(out, "train") == [*b"a b.", 256] * 30
    assert stream(out, "valid") == [*b"c d.", 256] * 30
    assert open_tokens(out).sources == ("lm1b",)


@pytest.mark.parametrize("valid", [Fraction(1, 20), Fraction(1, 2), Fraction(3, 10), Fraction(1, 1000)])
def test_the_split_holds_out_its_share_evenly(valid):
    held = [unit for unit in range(10_000) if in_valid(unit, valid)]
    assert len(held) == 10_000 * valid
    assert held[0] == 1
    assert len({b - a for a, b in itertools.pairwise(held)}) > 1 or valid > Fraction(1, 4)


def collect(seen: list[tuple[int, int, int]], *now: int) -> None:
    seen.append(now)


def test_progress_ends_at_the_total(jsonl, tmp_path):
    for name, kind in (("one", {"codec": BYTES}), ("two", {"vocab": 300})):
        seen: list[tuple[int, int, int]] = []
        prepare([jsonl], tmp_path / name, length=32, on_progress=partial(collect, seen), **kind)
        assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
        assert seen[-1][0] == seen[-1][1] == jsonl.stat().st_size * len(seen)
        assert seen[-1][2] > 0


def test_a_vocabulary_is_learnt_from_text_spread_over_the_input(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BPE_CHARACTERS", 20_000)
    texts = [f"{i:05d}" * 20 for i in range(10_000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = module.read([tmp_path / "a.jsonl"])
    taken = list(module._training_text(corpus, Fraction(1, 20), lambda _: None))
    assert 15_000 <= sum(map(len, taken)) <= 21_000
    numbers = [int(text[:5]) for text in taken]
    assert min(numbers) < 500
    assert max(numbers) > 9000
    assert not any(in_valid(number, Fraction(1, 20)) for number in numbers)


def test_too_little_text_says_how_much_there_was_and_is_needed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n' * 2)
    with pytest.raises(ValueError, match="too little text for the train split: 11 tokens, and a row needs 64"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", codec=BYTES, length=64)
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n')
    with pytest.raises(ValueError, match="too little text for the valid split: 0 tokens, and a row needs 8"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", codec=BYTES, length=8)
    assert left_in(tmp_path) == {"a.jsonl"}


@pytest.mark.parametrize("size", [100, 300, 1000, 2000])
def test_a_hundred_characters_are_enough_to_hold_some_out(tmp_path, size):
    text = ("First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n" * 30)[:size]
    (tmp_path / "a.txt").write_text(text)
    made = open_tokens(prepare([tmp_path / "a.txt"], tmp_path / "out", codec=BYTES, length=16))
    assert all(split.rows >= 1 for split in made.splits.values())
    if size >= 300:
        assert made.splits["valid"].tokens < 0.25 * size
    (tmp_path / "a.txt").write_text(text[:60])
    with pytest.raises(ValueError, match=r"0 tokens, and a row needs 16; give more text \(at least 100 characters"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", codec=BYTES, length=16, overwrite=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "loose"}, "unknown layout 'loose': expected packed, wrapped, padded"),
        ({"codec": None}, "give either a codec, or the vocab"),
        ({"vocab": 300}, "give either a codec, or the vocab"),
        ({"length": 2}, "length is 2"),
        ({"valid": 0.0}, "valid is 0.0"),
        ({"valid": 0.7}, "valid is 0.7"),
        ({"field": "body"}, "line 1: no field 'body'"),
        ({"field": "body", "codec": None, "vocab": 300}, "line 1: no field 'body'"),
    ],
)
def test_bad_arguments_leave_nothing_behind(jsonl, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        prepare([jsonl], tmp_path / "out", **{"codec": BYTES, "length": 32} | change)
    assert left_in(tmp_path) == {jsonl.name}


def test_only_prepared_folders_are_overwritten_and_only_when_asked(jsonl, tmp_path):
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    prepare([jsonl], out, codec=BYTES, length=32)  # an empty folder is nobody's
    with pytest.raises(ValueError, match=r"exists already: .*, or say overwrite=True \(--overwrite\)"):
        prepare([jsonl], out, codec=BYTES, length=16)
    prepare([jsonl], out, codec=BYTES, length=16, overwrite=True)
    assert open_tokens(out).length == 16
    (out / "train.bin").write_bytes(b"")  # damaged, but ours
    prepare([jsonl], out, codec=BYTES, length=16, overwrite=True)
    assert left_in(out.parent) == {"out"}
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not a prepared folder"):
        prepare([jsonl], foreign, codec=BYTES, length=16, overwrite=True)
    assert left_in(foreign) == {"thesis.txt"}


def test_a_full_disk_leaves_nothing_behind(jsonl, tmp_path):
    program = f"""
import resource, sys
from maskless.codec.text import byte_codec
from maskless.data.prepare import prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # the nearest thing to a full disk without being root
try:
    prepare([{str(jsonl)!r}], {str(tmp_path / "out")!r}, codec=byte_codec(), length=32)
except OSError:
    sys.exit(28)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 28
    assert left_in(tmp_path) == {jsonl.name}


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_CHARACTERS", 1 << 17)
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 1 << 15)
    monkeypatch.setattr(module, "AT_ONCE", 1 << 15)
    monkeypatch.setattr(sources, "PIECE", 1 << 13)
    monkeypatch.setattr(unpack, "BLOCK", 1 << 13)
    peaks, line = [], "a line of quite ordinary words\n"
    for size in (1, 3):
        (tmp_path / f"{size}.txt").write_text(line * (size * 30_000))
        tracemalloc.start()
        prepare([tmp_path / f"{size}.txt"], tmp_path / str(size), codec=BYTES, length=256)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 60_000 * len(line) / 4  # a quarter of the text that is more


def test_a_long_document_is_encoded_and_learnt_from_in_pieces(tmp_path, monkeypatch):
    """A tokenizer takes 200 bytes for each character that it is given at once."""
    words = [f"word{n % 89}, number {n % 1013}" + " \n\n"[: 1 + n % 3] for n in range(30_000)]
    long, others = "".join(words), ["a short one", "another one"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (*others, long)))
    given: list[str] = []
    encode, learn = TextCodec.encode_batch, module.train_bpe

    def watched(codec: TextCodec, texts: Sequence[str]) -> list[list[int]]:
        given.extend(texts)
        return encode(codec, texts)

    monkeypatch.setattr(TextCodec, "encode_batch", watched)
    monkeypatch.setattr(module, "train_bpe", lambda texts, vocab: learn([given.append(t) or t for t in texts], vocab))
    out = prepare([tmp_path / "a.jsonl"], tmp_path / "out", vocab=300, length=8)
    assert len(long) > 500_000
    assert max(map(len, given)) <= 4 * sources.PIECE
    assert "".join(given) == others[0] + long + "".join((*others, long))  # what is held out teaches nothing
    monkeypatch.undo()
    codec = open_tokens(out).codec()
    assert codec.tokenizer.to_str() == learn([others[0], long], 300).tokenizer.to_str()
    whole = [*codec.encode(others[0]), codec.eos, *codec.encode(long), codec.eos]
    assert stream(out, "train") == whole[: len(whole) // 8 * 8]


def test_a_line_that_is_too_long_is_named_before_it_is_read(tmp_path):
    lines = [json.dumps({"text": text}) for text in ("short", "x" * 200_000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    how = {"codec": BYTES, "length": 4}
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: longer than 150 kB, .*`maskless prepare --max-line`"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", limits=InputLimits(line=150_000), **how)
    assert left_in(tmp_path) == {"a.jsonl"}
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", limits=InputLimits(line=250_000), **how)


# Stopped and resumed


@pytest.fixture
def stopped(jsonl, tmp_path, monkeypatch) -> Path:
    """The folder of a preparation that met a full disk when all but the last of its parts were made."""
    monkeypatch.setattr(parts, "PART_CHARACTERS", 10_000)
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 1_000)
    with monkeypatch.context() as patch:
        patch.setattr(module.parts, "_write", full_after(2))
        with pytest.raises(OSError, match="No space left"):
            prepare([jsonl], tmp_path / "out", codec=BYTES, length=32)
    assert left_in(tmp_path) == {jsonl.name, ".out.parts"}
    assert left_in(tmp_path / ".out.parts") == {"about.json", "00000-00000.npz", "00000-00001.npz"}
    return tmp_path / "out"


def full_after(count: int):
    write, left = parts._write, itertools.count()

    def written(*given, **how) -> None:
        if next(left) == count:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given, **how)

    return written


@pytest.mark.parametrize(
    "change", [{}, {"length": 16, "layout": "padded"}, {"valid": 0.3}, {"codec": None, "vocab": 300}]
)
def test_the_same_text_and_tokenizer_resume_and_others_begin_again(change, stopped, jsonl, tmp_path, monkeypatch):
    how, given = {"codec": BYTES, "length": 32} | change, list[str]()
    encode = TextCodec.encode_batch
    monkeypatch.setattr(TextCodec, "encode_batch", lambda this, texts: given.extend(texts) or encode(this, texts))
    out = prepare([jsonl], stopped, **how)
    assert given == DOCUMENTS if "vocab" in change else given == DOCUMENTS[-len(given) :] != DOCUMENTS
    straight = prepare([jsonl], tmp_path / "straight", **how)
    for name in left_in(straight):
        assert (out / name).read_bytes() == (straight / name).read_bytes()
    assert left_in(tmp_path) == {jsonl.name, "out", "straight"}


def test_a_text_that_changed_meanwhile_is_not_mixed_with_the_old_one(stopped, jsonl):
    text = jsonl.read_text()
    jsonl.write_text(text.replace("document 1 ", "document ", 1).replace("document 2 ", "document   2 ", 1))
    with pytest.raises(ValueError, match=r"documents.jsonl, .* bytes: it has changed since a part of it was prepared"):
        prepare([jsonl], stopped, codec=BYTES, length=32)
    jsonl.write_text(json.dumps({"text": "new " * 9}) + "\n" + text)  # another size: all of it is made again
    prepare([jsonl], stopped, codec=BYTES, length=32)
    assert bytes(stream(stopped, "train")[:32]) == b"new " * 8


def test_a_part_that_is_lost_and_a_layout_that_does_not_fit_are_named_in_time(jsonl, tmp_path, monkeypatch):
    encode = parts.encode
    monkeypatch.setattr(parts, "encode", lambda *given: ())
    with pytest.raises(ValueError, match=r"\.out\.parts: a part of source 0 is missing; it must be one folder for all"):
        prepare([jsonl], tmp_path / "out", codec=BYTES, length=32)
    monkeypatch.setattr(parts, "encode", lambda *given: pytest.fail("encoded") or encode(*given))
    blank = BYTES.tokenizer.from_str(BYTES.tokenizer.to_str().replace("<|endoftext|>", "<|none|>"))
    with pytest.raises(ValueError, match="the padded layout needs a bos token, and this tokenizer has none"):
        prepare([jsonl], tmp_path / "out", codec=TextCodec(blank), length=32, layout="padded")
    assert left_in(tmp_path) == {jsonl.name}
