"""Sources: every kind of file gives its documents back, and every kind of bad file is named in one line."""

import gzip
import json
import lzma
import sys
from pathlib import Path

import packed_made
import pytest

from maskless.data import sources, unpack
from maskless.data.sources import Corpus, read

DOCUMENTS = ["one\ntwo", "naïve 漢字 🙂", "x" * 200_000, "last"]


def jsonl(documents, field="text") -> bytes:
    return b"".join(json.dumps({"id": i, field: d}).encode() + b"\n" for i, d in enumerate(documents))


PACKERS = {"": bytes} | packed_made.PACKERS


def documents(corpus: Corpus) -> list[str]:
    """Chunks joined into documents, the promises of the stream checked on the way."""
    found, text, consumed, unit = [], "", 0, -1
    for chunk in corpus:
        assert chunk.unit == unit + 1 or chunk.unit % sources.REMOTE_UNITS == 0  # of the next file that is afar
        assert chunk.ends
        unit = chunk.unit
        assert consumed <= chunk.consumed <= corpus.total
        consumed = chunk.consumed
        text += chunk.text
        if chunk.last:
            found.append(text)
            text = ""
    assert text == ""
    assert consumed == corpus.total
    return found


@pytest.mark.parametrize("suffix", PACKERS)
def test_json_lines_give_a_document_a_line(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](jsonl(DOCUMENTS)))
    corpus = read([path])
    assert corpus.total == path.stat().st_size
    assert corpus.names == (path.name,)
    assert documents(corpus) == DOCUMENTS
    assert documents(corpus) == DOCUMENTS  # and again


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_text_file_is_one_document_in_pieces_cut_at_line_ends(tmp_path, suffix):
    text = "".join(f"line {i} é漢\n" * (i % 4) + "\n" for i in range(20_000)) + "no line end"
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](text.encode()))
    chunks = list(read([path]))
    assert documents(read([path])) == [text]
    assert len(chunks) > 4
    assert all(chunk.text.endswith("\n") for chunk in chunks[:-1])
    assert all(chunk.text for chunk in chunks)
    assert max(len(chunk.text) for chunk in chunks) <= sources.PIECE


def test_a_small_text_file_still_has_pieces_to_split(tmp_path):
    (tmp_path / "a.txt").write_text("a line of some words\n" * 1000)
    assert 10 <= len(list(read([tmp_path / "a.txt"]))) <= 100


TINY = {
    "lines": "First Citizen:\nBefore we proceed any further, hear me speak.\n\n" * 99,
    "a title": "Title\n" + "a very long paragraph of words " * 99,
    "one line": "words without a line end " * 99,
    "no spaces": "漢字仮名交じり文" * 99,
}


@pytest.mark.parametrize("size", [96, 100, 301, 999, 1300])
@pytest.mark.parametrize("kind", TINY)
def test_a_tiny_text_file_alone_has_no_short_pieces(tmp_path, kind, size):
    text = TINY[kind][:size]
    (tmp_path / "a.txt").write_text(text)
    for inputs in ([tmp_path / "a.txt"], [tmp_path]):
        chunks = list(read(inputs))
        assert documents(read(inputs)) == [text]
        assert len(chunks) >= 2
        assert min(len(chunk.text) for chunk in chunks) >= 32
    (tmp_path / "b.txt").write_text(text)
    assert documents(read([tmp_path])) == [text, text]
    assert len(list(read([tmp_path]))) <= 4  # a document can be held out: they stay whole


def test_a_text_file_without_line_ends_is_cut_before_spaces_or_anywhere(tmp_path):
    for text in ("word " * 40_000, "x" * 300_000):
        (tmp_path / "a.txt").write_text(text)
        chunks = list(read([tmp_path / "a.txt"]))
        assert len(chunks) > 4
        assert "".join(chunk.text for chunk in chunks) == text
        assert " " not in text or all(chunk.text.startswith(" ") for chunk in chunks[1:])


def test_archives_end_to_end_and_padding_are_read_through(tmp_path):
    for suffix in filter(None, PACKERS):
        parts = [PACKERS[suffix](f"{word}\n".encode()) for word in ("one", "two")]
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(parts[0] + bytes(4 if suffix == ".xz" else 0) + parts[1])
        assert documents(read([path])) == ["one\ntwo\n"]


def test_odd_but_legal_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(
        b'\xef\xbb\xbf{"body": "one"}\r\n\n  \n{"body": ""}\n{"body": "half \\ud83d pair"}\n{"body": "\\ud83d\\ude42"}'
        b'\n{"body": "raw \xed\xa0\x80 half"}'
    )
    assert documents(read([path], field="body")) == ["one", "half \ufffd pair", "🙂", "raw \ufffd half"]


@pytest.mark.parametrize("suffix", PACKERS)
def test_line_ends_are_the_same_whatever_they_are_on_disk(tmp_path, monkeypatch, suffix):
    text = "".join(f"line {i} é漢\n" + "\n" * (i % 3) for i in range(500)) + "end\n"
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](text.replace("\n", "\r\n").encode()))
    monkeypatch.setattr(unpack, "BLOCK", 7)  # a line end may be cut in two
    corpus = read([path])
    assert documents(corpus) == [text]
    assert corpus.total == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", "\ufeffhello".encode(), ["hello"]),  # a byte order mark is no text
        ("a.txt", b"one\r\ntwo\r", ["one\ntwo\n"]),  # a return alone at the very end
        ("a.jsonl", jsonl(["one\r\ntwo\r", "three\n\r\n"]).replace(b"\n", b"\r\n"), ["one\ntwo\n", "three\n\n"]),
    ],
)
def test_marks_and_line_ends_of_other_systems(tmp_path, name, data, expected):
    (tmp_path / name).write_bytes(data)
    assert documents(read([tmp_path / name])) == expected


def test_folders_are_read_in_order_without_hidden_empty_and_foreign_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/2.txt", "a.md", ".hidden.txt", ".git/x.txt", "image.png", "z.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(jsonl(["in json"])) if name.startswith("z") else name.encode())
    (tmp_path / "empty.txt").touch()
    assert documents(read([tmp_path])) == ["a.md", "b/2.txt", "in json"]
    assert read([tmp_path, tmp_path / "a.md"]).names == (tmp_path.name, "a.md")


BAD = {
    "empty.txt": (b"", "the file is empty"),
    "empty.jsonl.gz": (gzip.compress(b""), "the file is empty"),
    "nul.txt": (b"text\0text", "not text, it holds NUL bytes"),
    "utf16.txt": ("text".encode("utf-16"), "not text, it holds NUL bytes"),
    "latin.txt": ("café".encode("latin-1") + b"s", "not UTF-8 text"),
    "cut.txt": ("café".encode()[:-1], "not UTF-8 text"),
    "cut.jsonl.gz": (gzip.compress(jsonl(["text" * 999]))[:-9], "broken .gz archive (it ends too early)"),
    "cut.jsonl.xz": (lzma.compress(jsonl(["text" * 999]))[:-9], "broken .xz archive (it ends too early)"),
    "false.jsonl.gz": (jsonl(["text"]), "broken .gz archive"),
    "false.jsonl.xz": (jsonl(["text"]), "broken .xz archive"),
    "noise.jsonl.gz": (gzip.compress(jsonl(["text"])) + b"noise", "broken .gz archive"),
    "half.jsonl": (jsonl(["text"]) + b'{"text": "te', "line 2: not JSON, expected one object per line"),
    "array.json": (b'[{"text": "a"}]', "line 1: a list, expected one JSON object per line"),
    "latin.jsonl": (b'{"text": "caf\xe9"}', "line 1: not JSON"),
    "field.jsonl": (jsonl(["a"], "body"), "line 1: no field 'text', it has 'id', 'body'"),
    "number.jsonl": (jsonl(["a", 3]), "line 2: field 'text' is a int, expected a string"),
    "table.csv": (b"id,text\n1,one\n", "a table; expected text, JSON lines with a document in a field"),
    "table.TSV": (b"id\ttext\n1\tone\n", "a table; expected text"),
    "table.csv.gz": (gzip.compress(b"id,text\n1,one\n"), "a table; expected text"),
    "table.parquet": (b"PAR1", "a table; expected text"),
    "deep.jsonl": (b'{"text": "a", "b": ' + b"[" * 100_000, "line 1: not JSON, expected one object per line"),
    "blank.jsonl": (b'\n{"text": ""}\n', "no documents in this file"),
}
if ".zst" in PACKERS:
    BAD["cut.jsonl.zst"] = (PACKERS[".zst"](jsonl(["text" * 999]))[:-3], "broken .zst archive (it ends too early)")
    BAD["false.jsonl.zst"] = (jsonl(["text"]), "broken .zst archive")


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_in_one_line(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        list(read([tmp_path / name]))
    text = str(caught.value)
    assert text.startswith(str(tmp_path / name))
    assert message in text
    assert "\n" not in text


def test_missing_inputs_say_what_was_expected(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder, nor a data set"):
        read([tmp_path / "missing.txt"])
    with pytest.raises(ValueError, match="no text in this folder"):
        read([tmp_path])
    with pytest.raises(ValueError, match="no input"):
        read([])
    with pytest.raises(ValueError, match="expected a list"):
        read("a.txt")


def test_missing_extras_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.txt.zst").write_bytes(b"never looked at")
    with pytest.raises(ValueError, match=r'needs zstandard: pip install "maskless\[data\]"'):
        list(read([tmp_path / "a.txt.zst"]))
    with pytest.raises(ValueError, match=r'needs datasets: pip install "maskless\[data\]"'):
        read(["lm1b"])


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        datasets.disable_progress_bars()
        yield datasets


def parquet(datasets, folder, **splits):
    folder.mkdir()
    for name, texts in splits.items():
        datasets.Dataset.from_dict({"text": texts}).to_parquet(str(folder / f"{name}.parquet"))
    return folder


def sides(corpus):
    assert documents(corpus) == [chunk.text for chunk in corpus]
    return [(chunk.split, chunk.text) for chunk in corpus]


def test_lm1b_holds_out_its_test_split_and_is_detokenised(datasets, tmp_path):
    folder = parquet(datasets, tmp_path / "lm1b", train=["it 's one .", "two , too"], test=["( three )"])
    corpus = read([f"lm1b:{folder}"])
    assert corpus.names == ("lm1b",)
    assert sides(corpus) == [("train", "it's one."), ("train", "two, too"), ("valid", "(three)")]


def test_a_folder_with_the_name_of_a_data_set_is_reached_as_a_path(tmp_path, monkeypatch):
    (tmp_path / "lm1b").mkdir()
    (tmp_path / "lm1b" / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    for given in ("./lm1b", Path("lm1b")):
        assert documents(read([given])) == ["text"]


def test_openwebtext_holds_out_its_last_documents(datasets, tmp_path, monkeypatch):
    assert sources.OPENWEBTEXT_VALID == 100_000
    folder = parquet(datasets, tmp_path / "owt", train=["a", "b", "c", "d"])
    with pytest.raises(ValueError, match="has 4 documents: expected more than 100,000"):
        read([f"openwebtext:{folder}"])
    monkeypatch.setattr(sources, "OPENWEBTEXT_VALID", 2)
    assert sides(read([f"openwebtext:{folder}"])) == [("train", "a"), ("train", "b"), ("valid", "c"), ("valid", "d")]


def test_other_data_sets_use_the_splits_they_have(datasets, tmp_path):
    both = parquet(datasets, tmp_path / "both", train=["a", ""], validation=["b"])
    only = tmp_path / "only"
    only.mkdir()
    (only / "train.jsonl").write_bytes(jsonl(["a", "b"], "body"))
    assert sides(read([f"hf:{both}"])) == [("train", "a"), ("valid", "b")]
    assert sides(read([f"hf:{both}:validation"])) == [(None, "b")]
    assert sides(read([f"hf:{only}"], field="body")) == [(None, "a"), (None, "b")]
    with pytest.raises(ValueError, match="has no field 'text', it has id, body"):
        read([f"hf:{only}"])
    for place in (f"{both}:nonesuch", ":train"):
        with pytest.raises(ValueError, match="cannot load the data set"):
            read([f"hf:{place}"])
    with pytest.raises(ValueError, match="cannot load the data set"):
        read([f"hf:{tmp_path / 'missing'}"])
