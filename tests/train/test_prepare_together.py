"""Text that several processes prepare, or one after another that was killed, is the text that one prepares."""

import gzip
import json
import signal
from pathlib import Path

import pytest
import slow_prepare

from in_process import exit_code_of
from maskless.data.prepare import parts_folder

SLOW = Path(slow_prepare.__file__)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Seven files of different kinds and sizes."""
    folder = tmp_path_factory.mktemp("shards")
    for n in range(7):
        texts = (f"text {i} of file {n}, " + "with some words " * (i * n % 9) for i in range(50 + 20 * n))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (folder / f"{n}.jsonl{'.gz' * (n % 2)}").write_bytes(gzip.compress(lines) if n % 2 else lines)
    (folder / "8.txt").write_text("a line of plain text, one of many\n" * 400)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def made_by(process) -> list[str]:
    return [line.split()[1] for line in process.stderr.splitlines() if line.startswith("made ")]


def test_several_processes_and_killed_ones_prepare_what_one_does(start_several, shards, tmp_path):
    """Two are killed, then three go on, and make nothing again."""
    words = ["prepare", shards, "--length", 32, "--vocab", 300, "--layout", "padded", "--out"]
    assert exit_code_of(*words, tmp_path / "one") == 0
    out = tmp_path / "several"
    made = parts_folder(out)
    two = start_several(2, SLOW, *words, out)
    two[0].until(lambda: len([*made.glob("*.npz")]) > 4)
    for process in two:
        process.kill(signal.SIGKILL)
    assert [process.wait() for process in two] == [-signal.SIGKILL] * 2
    before = {path.name for path in made.glob("*.npz")}
    assert not out.exists()
    three = start_several(3, SLOW, *words, out)
    assert [process.wait() for process in three] == [0, 0, 0], three[0].stderr
    after = [name for process in three for name in made_by(process)]
    assert len(after) == len({*after}) > 4
    assert not before & {*after}
    assert contents(out) == contents(tmp_path / "one")
    assert three[0].stdout.startswith(f"{out}: ")
    assert three[1].stdout == three[2].stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"one", "several"}


def test_two_machines_prepare_what_one_does(on_two_machines, shards, tmp_path):
    words = ["prepare", shards, "--length", "32", "--vocab", "300", "--out"]
    assert exit_code_of(*words, tmp_path / "one") == 0
    said = on_two_machines(*words, tmp_path / "two")
    assert [bool(out) for out, _ in said].count(True) == 1
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_pictures_are_prepared_by_one_process(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_code_of("prepare", images, "--out", tmp_path / "data", "--codec", "pixels:4", "--size", 4) == 2
    assert capsys.readouterr().err == "error: pictures are prepared by one process: start it without a launcher\n"
