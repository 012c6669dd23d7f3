"""A run goes on with the data that it began with, wherever they are, and refuses others in one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from codec_runs import blobs, quick_config
from codec_runs import complete as complete_codec
from run_folders import contents

from command_inputs import photos
from in_process import Ended, exit_code_of
from maskless.codec.text import byte_codec
from maskless.codec.vq import PixelCodec
from maskless.data.image_prepare import prepare_images
from maskless.data.prepare import prepare
from maskless.data.tokens import open_tokens
from maskless.train.data import fingerprint
from toy_text import write

LINE = "changed since {} began (another text, tokenizer, codec or labels): it goes on with the same data only"


def forget(path: Path, name: str) -> None:
    """Make a configuration as earlier versions wrote it."""
    fields = json.loads(path.read_text())
    assert fields.pop(name) is not None
    path.write_text(json.dumps(fields))


def refused(command: Callable[..., Ended], folder: Path, says: str, *words: object) -> None:
    before, ended = contents(folder), command(*words, "--out", folder, "--resume")
    assert ended.code == 2
    [line] = [line for line in ended.err.splitlines() if "reading" not in line]  # but for a bar
    assert line.endswith(says)
    assert contents(folder) == before, "something changed on disk"


SHORT = ("--width", 32, "--layers", 2, "--batch", 4, "--tracker", "none", "--evaluate-every", 0, "--sample-every", 0)


@pytest.fixture(scope="module")
def first(text, tmp_path_factory) -> Path:
    """A run of two steps, with its data inside."""
    folder = tmp_path_factory.mktemp("first") / "run"
    given = ("--text", text, "--vocab", 300, "--length", 16, "--steps", 2, *SHORT)
    assert exit_code_of("train", *given, "--out", folder) == 0
    return folder


@pytest.fixture
def began(first, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(first, tmp_path / "run", copy_function=shutil.copyfile)


# Training


def test_tokens_that_shrink_under_a_run_end_it_in_one_line(start, began, losses):
    process = start("maskless", "train", "--out", began, "--resume", "--steps", 100_000, "--log-every", 1)
    process.until(lambda: max(losses(began)) > 2)
    size = (began / "data" / "train.bin").stat().st_size
    os.truncate(began / "data" / "train.bin", 0)
    assert process.wait() == 2
    assert f"error: {began / 'data' / 'train.bin'}: 0 bytes, but it had {size:,} when" in process.stderr
    assert "Traceback" not in process.stderr


def test_an_id_that_the_network_does_not_have_is_named(began, command):
    forget(began / "run.json", "fingerprint")
    np.memmap(began / "data" / "train.bin", dtype="<u2", mode="r+")[:] = 60_000
    says = "train.bin holds the id 60000, its vocabulary has 300; prepare the data again"
    refused(command, began, says, "train", "--steps", 3)


def test_data_prepared_anew_from_another_text_are_refused(began, tmp_path, command):
    prepare([write(tmp_path / "toy.txt", 800, seed=1)], began / "data", vocab=300, length=16, overwrite=True)
    for given in ((), ("--data", began / "data")):
        refused(command, began, LINE.format(began), "train", "--steps", 3, *given)


def test_a_copy_of_a_run_and_of_its_data_goes_on(text, began, tmp_path):
    """Also with data prepared anew from the same text under another name."""
    assert exit_code_of("train", "--out", began, "--resume", "--steps", 3) == 0
    known = json.loads((began / "run.json").read_text())["fingerprint"]
    assert known == fingerprint(open_tokens(began / "data"))
    shutil.copyfile(text, renamed := tmp_path / "renamed.txt")
    assert fingerprint(open_tokens(prepare([renamed], tmp_path / "data", vocab=300, length=16))) == known


def test_a_run_of_an_earlier_version_goes_on_and_knows_its_data_from_then_on(began, tmp_path, command):
    forget(began / "run.json", "fingerprint")
    assert exit_code_of("train", "--out", began, "--resume", "--steps", 3) == 0
    prepare([write(tmp_path / "toy.txt", 800, seed=1)], began / "data", vocab=300, length=16, overwrite=True)
    refused(command, began, LINE.format(began), "train", "--steps", 4)


# What tells data apart


def test_texts_of_one_length_in_bytes_differ_though_their_index_is_the_same(tmp_path):
    found = []
    for name, word in (("one", "cat"), ("other", "dog")):
        (source := tmp_path / name / "text.txt").parent.mkdir()
        source.write_text(f"the {word} sat on the mat. " * 200)
        folder = prepare([source], tmp_path / name / "data", codec=byte_codec(), length=16)
        found.append(((folder / "index.json").read_bytes(), fingerprint(open_tokens(folder))))
    (index, one), (same, other) = found
    assert index == same
    assert one != other


def test_pictures_differ_by_their_codec_their_classes_and_their_labels(tmp_path):
    squares = photos(tmp_path / "squares", count=4, shape=(3, 3))
    shutil.copytree(squares, named := tmp_path / "named" / "squares")
    (named / "cat").rename(named / "ant")
    made = [
        fingerprint(prepare_images([source], tmp_path / str(number), codec, size=3))
        for number, (source, codec) in enumerate([(squares, PixelCodec(4)), (squares, PixelCodec(5))])
    ]
    made.append(fingerprint(prepare_images([named], tmp_path / "2", PixelCodec(4), size=3)))
    swapped = prepare_images([squares], tmp_path / "3", PixelCodec(4), size=3)
    labels = tmp_path / "3" / "train.labels.bin"
    labels.write_bytes((1 - np.fromfile(labels, "<i4")).tobytes())
    assert len({*made, fingerprint(swapped)}) == 4
    labels.write_bytes((1 - np.fromfile(labels, "<i4")).tobytes())
    assert fingerprint(swapped) == made[0]


# Distillation


def test_a_distillation_goes_on_with_its_data_only(began, tmp_path, command):
    to, mine = tmp_path / "out", began / "data"
    how = ("--rounds", 1, "--teacher-steps", 8, "--steps-per-round", 1, "--batch", 4, "--tracker", "none")
    assert exit_code_of("distill", began, "--data", mine, "--out", to, *how) == 0
    known = fingerprint(open_tokens(mine))
    for name in ("distill.json", "round-1/run.json"):
        assert json.loads((to / name).read_text())["fingerprint"] == known
    forget(to / "distill.json", "fingerprint")
    assert exit_code_of("distill", "--out", to, "--resume", "--rounds", 2) == 0
    codec = open_tokens(mine).codec()
    prepare([write(tmp_path / "toy.txt", 800, seed=1)], mine, codec=codec, length=16, overwrite=True)
    refused(command, to, LINE.format(to), "distill", "--rounds", 3)
    shutil.rmtree(mine)
    assert exit_code_of("distill", "--out", to, "--resume", "--rounds", 2) == 0  # all is done: nothing is read


# A codec's pictures


def test_a_codecs_run_goes_on_with_as_many_pictures_of_the_same_size(tmp_path, command):
    source, folder = tmp_path / "blobs.npy", tmp_path / "run"
    np.save(source, blobs(12))
    complete_codec(folder, quick_config(str(source), steps=2))
    for count, side in ((11, 8), (12, 12)):
        np.save(source, blobs(count, side, side))
        says = f"from 12 of 8 x 8 to {count} of {side} x {side} pixels: a run goes on as it began"
        refused(command, folder, says, "train-codec", "--steps", 3)
    np.save(source, blobs(12))
    assert exit_code_of("train-codec", "--out", folder, "--resume", "--steps", 3) == 0
    np.save(source, blobs(11))
    forget(folder / "run.json", "pictures")
    assert exit_code_of("train-codec", "--out", folder, "--resume", "--steps", 4) == 0
