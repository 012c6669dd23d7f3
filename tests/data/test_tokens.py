"""Token files: rows as they were written, folders checked, and every row once an epoch."""

import json
import os
import pickle

import numpy as np
import pytest
import torch

from maskless.codec.text import byte_codec
from maskless.data.prepare import prepare
from maskless.data.tokens import TokenRows, global_batch, open_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokens")
    (place / "a.txt").write_text("some words on a line\n" * 1000)
    return prepare([place / "a.txt"], place / "out", codec=byte_codec(), length=64)


def test_rows_are_those_of_the_file(folder):
    rows = open_tokens(folder).split("train")
    raw = np.fromfile(folder / "train.bin", dtype="<u2").reshape(-1, 64)
    assert len(rows) == len(raw)
    assert rows.length == 64
    for indices in ([3, 0, 3], np.array([1]), torch.tensor([5, 2]), []):
        taken = rows.rows(indices)
        assert taken.dtype == torch.int64
        assert taken.shape == (len(indices), 64)
        assert np.array_equal(taken.numpy(), raw[np.asarray(indices, dtype=int)])


def test_rows_travel_to_another_process_as_a_path(folder):
    rows = open_tokens(folder).split("train")
    packed = pickle.dumps(rows)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed).rows([0, 7]), rows.rows([0, 7]))


def test_the_index_tells_what_is_in_the_folder(folder):
    prepared = open_tokens(folder)
    assert (prepared.length, prepared.dtype, prepared.layout, prepared.vocab) == (64, "uint16", "packed", 257)
    assert (prepared.bos, prepared.eos, prepared.pad, prepared.sources) == (256, 256, None, ("a.txt",))
    assert prepared.codec().encode("é") == [0xC3, 0xA9]
    with pytest.raises(ValueError, match=r"no split 'test' in .*: expected train or valid"):
        prepared.split("test")


def test_folders_that_are_not_prepared_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="not a prepared folder"):
        open_tokens(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    for change in ({"format": 99}, {"dtype": "float16"}, {"splits": {}}, {"surprise": 1}):
        (tmp_path / "index.json").write_text(json.dumps(index | change))
        with pytest.raises(ValueError, match=r"index\.json: not an index of prepared tokens"):
            open_tokens(tmp_path)
    for text in ("", "[]", "{}", "{", "[" * 99_999):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json: not an index of prepared tokens"):
            open_tokens(tmp_path)


def test_a_token_file_of_the_wrong_size_is_noticed(folder, tmp_path):
    for name in ("index.json", "train.bin", "valid.bin"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    open_tokens(tmp_path)
    (tmp_path / "valid.bin").write_bytes((folder / "valid.bin").read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"valid\.bin: [\d,]+ bytes, but index.json says"):
        open_tokens(tmp_path)
    (tmp_path / "valid.bin").unlink()
    with pytest.raises(ValueError, match=r"valid\.bin: 0 bytes"):
        open_tokens(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_named(folder, tmp_path):
    """To read beyond its end would end the process without a word."""
    path = tmp_path / "train.bin"
    path.write_bytes((folder / "train.bin").read_bytes())
    rows = TokenRows(path, "uint16", 100, 64)
    rows.rows([99])
    os.truncate(path, 2 * 100 * 64 - 2)
    with pytest.raises(ValueError, match=r"train\.bin: 12,798 bytes, but it had 12,800 when it was opened"):
        rows.rows([0])


def test_an_id_beyond_the_vocabulary_is_named(folder, tmp_path):
    for name in ("index.json", "train.bin", "valid.bin"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    raw = np.memmap(tmp_path / "train.bin", dtype="<u2", mode="r+", shape=(2, 64))
    raw[1, 5] = 300
    rows = open_tokens(tmp_path).split("train")
    assert rows.rows([0, 2]).max() < 257
    with pytest.raises(ValueError, match=r"train\.bin holds the id 300, its vocabulary has 257"):
        pickle.loads(pickle.dumps(rows)).rows([0, 1, 2])


@pytest.mark.parametrize(("batch", "rows"), [(1, 7), (3, 7), (7, 7), (8, 7), (20, 7), (5, 1), (64, 1000)])
def test_every_row_comes_once_an_epoch_in_an_order_of_its_own(batch, rows):
    epochs = 4
    steps = -(-epochs * rows // batch)
    stream = np.concatenate([global_batch(step, batch, rows, seed=0) for step in range(steps)])
    assert stream.dtype == np.int64
    assert len(stream) == steps * batch
    orders = stream[: epochs * rows].reshape(epochs, rows)
    assert all(sorted(order) == list(range(rows)) for order in orders)
    assert rows < 7 or len({tuple(order) for order in orders}) == epochs


def test_a_batch_depends_on_its_step_and_seed_alone():
    later = global_batch(100, 16, 50, seed=1)
    for step in (3, 250, 0):
        global_batch(step, 16, 50, seed=1)
    assert np.array_equal(global_batch(100, 16, 50, seed=1), later)
    assert not np.array_equal(global_batch(100, 16, 50, seed=2), later)


def test_batches_of_any_size_cut_the_same_stream():
    whole = global_batch(2, 24, 10, seed=0)
    assert np.array_equal(np.concatenate([global_batch(4, 12, 10, seed=0), global_batch(5, 12, 10, seed=0)]), whole)


def test_a_batch_of_nothing_is_refused():
    for step, batch, rows in ((-1, 1, 1), (0, 0, 1), (0, 1, 0)):
        with pytest.raises(ValueError, match="expected step >= 0, batch >= 1, rows >= 1"):
            global_batch(step, batch, rows, seed=0)
