"""Samples that several processes write are the files that one writes, also after a kill."""

import hashlib
import json
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image

from in_process import exit_code_of
from maskless import shards
from maskless.api import generate
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.codec.vq import PixelCodec
from maskless.images import generate_images
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from tiny_networks import shaken

SIZES = {"width": 16, "heads": 2, "condition": 8, "encoder": 1, "decoder": 1}


@pytest.fixture(scope="module")
def writer(tmp_path_factory) -> Path:
    """A model of texts."""
    torch.manual_seed(0)
    network = PartitionTransformer(PartitionConfig(vocab=byte_codec().vocab, length=8, context="ordered", **SIZES))
    folder = tmp_path_factory.mktemp("writer")
    Model(shaken(network, 0.2), byte_codec()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def painter(tmp_path_factory) -> Path:
    """A model of pictures: 4 x 4 cells of 4 levels, dark or light."""
    torch.manual_seed(0)
    network = PartitionTransformer(PartitionConfig(vocab=6, length=17, grid=(4, 4), classes=2, **SIZES))
    folder = tmp_path_factory.mktemp("painter")
    Model(shaken(network, 0.2), PixelCodec(4), "image", ["dark", "light"]).save_pretrained(folder)
    return folder


@pytest.fixture
def few(monkeypatch) -> None:
    """Small shards."""
    monkeypatch.setattr(shards, "TEXTS", 4)
    monkeypatch.setattr(shards, "PICTURES", 4)


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def test_a_thousand_texts_by_one_two_and_three_processes_are_the_same_files(start_several, writer, tmp_path):
    command = ["generate", writer, "--n", 1000, "--steps", 2, "--seed", 3]
    assert exit_code_of(*command, "--out", tmp_path / "1") == 0
    for world in (2, 3):
        started = start_several(world, "maskless", *command, "--out", tmp_path / str(world))
        assert [one.wait() for one in started] == [0] * world, started[0].stderr
        said = f"{tmp_path / str(world)}: 1000 texts in 8 files\n"
        assert [one.stdout for one in started] == [said] + [""] * (world - 1)
    one, two, three = (hashes(tmp_path / name) for name in "123")
    assert one == two == three
    assert list(one) == [f"texts-{i:05}.jsonl" for i in range(8)]
    assert [line["number"] for line in lines(tmp_path / "1")] == list(range(1000))


def test_pictures_of_two_processes_are_those_of_one(start_several, painter, tmp_path):
    command = ["generate", painter, "--n", 150, "--steps", 2]
    assert exit_code_of(*command, "--out", tmp_path / "1") == 0
    started = start_several(2, "maskless", *command, "--out", tmp_path / "2")
    assert [one.wait() for one in started] == [0, 0], started[0].stderr
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")
    assert [*hashes(tmp_path / "1")][:2] == ["00000-dark.png", "00001-light.png"]
    assert len(hashes(tmp_path / "1")) == 150


def test_a_killed_process_resumes_as_two_and_nothing_is_made_twice(start_several, start, writer, tmp_path):
    command = ["maskless", "generate", writer, "--n", 1000, "--out", tmp_path / "new"]
    assert exit_code_of(*command[1:-1], tmp_path / "whole") == 0
    first = start(*command)
    first.until(lambda: (tmp_path / "new" / "texts-00001.jsonl").exists())
    first.kill(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "new").glob("texts-*.jsonl")}
    assert [one.wait() for one in start_several(2, *command, "--resume")] == [0, 0]
    assert hashes(tmp_path / "new") == hashes(tmp_path / "whole")
    assert {name: (tmp_path / "new" / name).stat().st_mtime_ns for name in made} == made


def test_two_machines_share_the_work(on_two_machines, writer, tmp_path):
    said = on_two_machines("generate", writer, "--n", "300", "--steps", "2", "--out", tmp_path / "new")
    assert sorted(out for out, _ in said) == ["", f"{tmp_path / 'new'}: 300 texts in 3 files\n"]
    texts = generate(Model.from_pretrained(writer), 300, steps=2)
    assert [(line["text"], line["tokens"]) for line in lines(tmp_path / "new")] == [(str(t), t.tokens) for t in texts]


# One process


def test_pictures_from_a_number_on_are_those_of_a_longer_list(painter):
    model = Model.from_pretrained(painter)
    whole, part = generate_images(model, None, 7, steps=2), generate_images(model, None, 3, first=4, steps=2)
    assert [one.label for one in part] == [one.label for one in whole[4:]]
    assert all(one.tokens.equal(other.tokens) for one, other in zip(part, whole[4:], strict=True))
    (named,) = generate(model, labels=["dark"], first=4, steps=2)
    assert named.tokens.equal(whole[4].tokens)


@pytest.mark.usefixtures("few")
def test_only_what_is_missing_is_made_again(writer, painter, tmp_path):
    for model, name in ((writer, "texts-00001.jsonl"), (painter, "00005-light.png")):
        to = tmp_path / model.name
        command = ["generate", model, "--n", 10, "--steps", 2, "--out", to]
        assert exit_code_of(*command) == 0
        whole, kept = hashes(to), [path for path in to.iterdir() if path.name != name]
        (to / name).unlink()
        before = {path: path.stat().st_mtime_ns for path in kept if path.suffix == ".jsonl"}
        assert exit_code_of(*command, "--resume") == 0
        assert hashes(to) == whole
        assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.usefixtures("few")
def test_a_folder_of_other_samples_is_left_alone(writer, painter, tmp_path, capsys):
    for model in (writer, painter):
        to = tmp_path / model.name
        command = ["generate", model, "--n", 6, "--steps", 2, "--out", to]
        assert exit_code_of(*command) == 0
        whole = hashes(to)
        capsys.readouterr()
        for change, said in (
            (["--seed", 1], "seed is None in {to}, not 1: samples go on as they began"),
            (["--n", 7], "n is 6 in {to}, not 7: samples go on as they began"),
        ):
            assert exit_code_of(*command, *change, "--resume") == 2
            assert capsys.readouterr().err == f"error: {said.format(to=to)}\n"
        assert hashes(to) == whole


@pytest.mark.usefixtures("few")
def test_without_resume_texts_are_safe_and_pictures_are_drawn_again(writer, painter, tmp_path, capsys):
    texts, drawn = tmp_path / "texts", tmp_path / "drawn"
    assert exit_code_of("generate", writer, "--n", 6, "--steps", 2, "--out", texts) == 0
    capsys.readouterr()
    assert exit_code_of("generate", writer, "--n", 6, "--steps", 2, "--seed", 1, "--out", texts) == 2
    assert capsys.readouterr().err == (
        f"error: {texts} holds texts already: continue with --resume, or name another --out\n"
    )
    for seed in (0, 1):
        assert exit_code_of("generate", painter, "--n", 6, "--steps", 2, "--seed", seed, "--out", drawn) == 0
    expected = generate_images(Model.from_pretrained(painter), None, 6, steps=2, seed=1)[3].image
    assert Image.open(drawn / "00003-light.png").tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        ("writer", ["--resume"], "--resume, and several processes, go with --out FOLDER"),
        ("writer", ["--out", "{file}"], "{file} is a file: expected a folder for texts"),
        ("writer", ["--out", "{file}/a/b"], "{file}/a/b: {file}/a is not a folder"),
        ("writer", ["--n", "0", "--out", "{file}.new"], "n 0 is out of range: expected 1 or more"),
        (
            "painter",
            ["--out", "{file}.png", "--resume"],
            "--resume, and several processes, go with a folder as --out, without --gif and --heat",
        ),
    ],
)
def test_a_mistake_is_one_line(model, words, said, request, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    given = [word.format(file=file) for word in words]
    assert exit_code_of("generate", request.getfixturevalue(model), *given) == 2
    assert capsys.readouterr().err == f"error: {said.format(file=file)}\n"
    assert not Path(f"{file}.new").exists()


def test_several_processes_do_not_all_write_to_stdout(writer, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_code_of("generate", writer) == 2
    assert capsys.readouterr() == ("", "error: --resume, and several processes, go with --out FOLDER\n")
