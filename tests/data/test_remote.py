"""Text that lies elsewhere: files at addresses and streamed data sets are prepared as files on disk are."""

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from in_process import one_line
from maskless.codec.text import byte_codec
from maskless.data import prepare as module
from maskless.data import sources
from maskless.data.prepare import prepare
from maskless.data.split import in_valid
from maskless.data.tokens import open_tokens

DOCUMENTS = [[f"document {i} of file {n} " + "é漢 word " * (i % 7) for i in range(60)] for n in range(3)]


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def held_out(valid: Fraction = Fraction(1, 20)) -> list[str]:
    """Files that are afar are split one by one."""
    numbered = (
        (n * sources.REMOTE_UNITS + i, text) for n, texts in enumerate(DOCUMENTS) for i, text in enumerate(texts)
    )
    return [text for unit, text in numbered if in_valid(unit, valid)]


def texts_of(folder: Path, split: str) -> list[str]:
    """The documents of packed bytes, but for the last, of which a part is dropped."""
    rows = open_tokens(folder).split(split)
    tokens = rows.rows(range(len(rows))).flatten().tolist()
    return bytes(token if token < 256 else 0 for token in tokens).decode(errors="replace").split("\0")[:-1]


@pytest.fixture
def site(tmp_path) -> Iterator[tuple[str, list[str]]]:
    """The address of a server with the documents in a folder, and the ranges that it was asked for."""
    folder, asked = tmp_path / "site" / "docs", []
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(jsonl(DOCUMENTS[0]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS[1])))
    (folder / "c.jsonl").write_bytes(jsonl(DOCUMENTS[2]))

    class Ranges(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given, **how):
            super().__init__(*given, directory=str(tmp_path / "site"), **how)

        def log_message(self, *_):
            pass

        def do_GET(self):
            if "Range" not in self.headers:
                return super().do_GET()
            asked.append(self.path)
            begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            found = Path(self.translate_path(self.path)).read_bytes()[begin : end + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            return self.wfile.write(found)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ranges) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_files_of_a_server_are_prepared_as_those_on_disk(site, tmp_path):
    pytest.importorskip("upath")
    address, asked = site
    names = ["a.jsonl", "b.jsonl.gz", "c.jsonl?download=true"]
    out = prepare([f"{address}/docs/{name}" for name in names], tmp_path / "out", codec=byte_codec(), length=16)
    assert open_tokens(out).sources == ("a.jsonl", "b.jsonl.gz", "c.jsonl")
    expected = held_out()
    assert texts_of(out, "valid") == expected[: len(texts_of(out, "valid"))]
    assert len(texts_of(out, "valid")) >= len(expected) - 1
    train = [text for texts in DOCUMENTS for text in texts if text not in expected]
    assert texts_of(out, "train") == train[: len(texts_of(out, "train"))]
    assert sorted(asked) == [f"/docs/{name}" for name in names]  # once each
    whole = prepare([f"{address}/docs/"], tmp_path / "whole", codec=byte_codec(), length=16)
    assert (whole / "train.bin").read_bytes() == (out / "train.bin").read_bytes()


def test_a_vocabulary_is_learnt_from_the_beginning_of_files_that_are_afar(site, tmp_path, monkeypatch):
    pytest.importorskip("upath")
    monkeypatch.setattr(module, "BPE_CHARACTERS", 3_000)
    monkeypatch.setattr(module.parts, "BATCH_CHUNKS", 4)
    corpus, read, document = module.read([f"{site[0]}/docs/"]), list[str](), sources._document
    monkeypatch.setattr(sources, "_document", lambda *given: read.append(document(*given)) or read[-1])
    taken = list(module._training_text(corpus, Fraction(1, 20), lambda _: None))
    assert not {*taken} & {*held_out()}
    for texts in DOCUMENTS:
        ours = [text for text in taken if text in texts]
        assert ours == [text for text in texts if text not in held_out()][: len(ours)]
        assert 0 < len(ours) < 50
    assert 2_500 < sum(map(len, taken)) < 4_000
    assert len(read) < len(taken) + 20  # what is held out, and the rest of three batches


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nope://somewhere/a.txt", "nope://somewhere/a.txt: Unsupported filesystem: 'nope'"),
        ("http://127.0.0.1:1/a.txt", "http://127.0.0.1:1/a.txt: Cannot connect to host 127.0.0.1:1"),
        ("memory://nothing/a.txt", "memory://nothing/a.txt: no such file or folder"),
    ],
)
def test_an_address_that_leads_nowhere_is_named(given, said, command, tmp_path):
    pytest.importorskip("upath")
    words = ["prepare", given, "--out", tmp_path / "out", "--tokenizer", "bytes"]
    assert one_line(command(*words)).startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_goes_away_is_one_line_and_the_same_command_continues(site, tmp_path, monkeypatch, command):
    pytest.importorskip("upath")
    words = ["prepare", f"{site[0]}/docs/", "--out", tmp_path / "out", "--tokenizer", "bytes", "--length", "16"]
    read = sources.remote.Afar.read

    def gone(this, size):
        if "c.jsonl" in str(this.path):
            sources.remote.asked(this.path, {}.pop, "the server")
        return read(this, size)

    with monkeypatch.context() as patch:
        patch.setattr(sources.remote.Afar, "read", gone)
        said = one_line(command(*words))
    assert said.startswith("'the server'")
    assert said.endswith(f"continue with: maskless {' '.join(map(str, words))}")
    site[1].clear()
    assert command(*words).code == 0
    assert site[1] == ["/docs/c.jsonl"]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "site"}
    straight = prepare([f"{site[0]}/docs/"], tmp_path / "straight", codec=byte_codec(), length=16)
    assert (tmp_path / "out" / "train.bin").read_bytes() == (straight / "train.bin").read_bytes()


@pytest.fixture
def tables(tmp_path) -> Path:
    """A data set in three files, the documents of `DOCUMENTS`."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    (tmp_path / "tables").mkdir()
    for n, texts in enumerate(DOCUMENTS):
        table = datasets.Dataset.from_dict({"text": texts})
        table.to_parquet(str(tmp_path / "tables" / f"train-{n:05}-of-00003.parquet"))
    return tmp_path / "tables"


def test_a_data_set_is_streamed_file_by_file_and_nothing_of_it_is_kept(tables, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    corpus = sources.read([f"hf:{tables}"])
    assert [[chunk.text for chunk in source.chunks()] for source in corpus.sources] == DOCUMENTS
    out = prepare([f"hf:{tables}"], tmp_path / "out", codec=byte_codec(), length=16)
    assert texts_of(out, "valid") == held_out()[: len(texts_of(out, "valid"))]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
