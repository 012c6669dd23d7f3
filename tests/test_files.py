"""Files written aside are as open to others as any file and appear whole or not at all; JSON knows numbers only."""

import errno
import json
import math
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from maskless import files
from maskless.files import LOCK, json_text, locked, whole_folder, write_aside


@pytest.fixture(params=[0o022, 0o027, 0o002], ids=oct)
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def closed(path: Path) -> None:
    path.write_text("text")
    path.chmod(0o600)


def renamed(path: Path) -> None:
    """A new file takes the place of the one that was asked for, as some libraries do it."""
    closed(path.with_name("new"))
    path.with_name("new").replace(path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda path: save_file({"a": torch.zeros(3)}, path),
    "closed": closed,
    "renamed": renamed,
    "plain": lambda path: path.write_text("text"),
}


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_has_the_mode_that_the_umask_says(tmp_path, umask, writer):
    path = tmp_path / "file"
    for _ in range(2):  # anew, and over an older one
        write_aside(path, WRITERS[writer])
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_the_old_file_alone(tmp_path, error):
    def fail(path: Path) -> None:
        assert path.parent.parent == tmp_path  # a rename is only atomic within a file system
        path.write_text("half")
        raise error

    (tmp_path / "file").write_text("old")
    with pytest.raises(error):
        write_aside(tmp_path / "file", fail)
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


# What killed processes leave behind

LIVES = """
import os, signal, sys
from pathlib import Path
from maskless.files import whole_folder, write_aside

def linger(path):
    (path / "half" if path.is_dir() else path).write_text("half")
    print("at work", flush=True)
    sys.stdin.readline()

if sys.argv[1] == "file":
    write_aside(Path("it"), linger)
else:
    with whole_folder(Path("it")) as folder:
        linger(folder)
"""


def begun(kind: str, folder: Path) -> subprocess.Popen[str]:
    """A process that has begun to write a file or a folder named `it` and waits for a line to go on."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", LIVES, kind], cwd=folder, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "at work\n"
    return process


def write_it(kind: str, folder: Path, text: str) -> None:
    if kind == "file":
        write_aside(folder / "it", lambda path: path.write_text(text))
    else:
        with whole_folder(folder / "it") as made:
            (made / "whole").write_text(text)


def read_it(folder: Path) -> dict[str, str]:
    files = [folder / "it"] if (folder / "it").is_file() else (folder / "it").iterdir()
    return {path.name: path.read_text() for path in files}


@pytest.mark.skipif(os.name != "posix", reason="locks are those of POSIX")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path, kind):
    for text in ("new", "newer"):
        live, killed = (begun(kind, tmp_path) for _ in range(2))
        killed.kill()
        killed.wait()
        if text == "new":
            write_it(kind, tmp_path, text)
            assert len(os.listdir(tmp_path)) == 2  # of the one that lives, and ours
            assert set(read_it(tmp_path).values()) == {text}
        live.communicate("go on\n")
        assert live.returncode == 0
        assert set(read_it(tmp_path).values()) == {"half"}  # for that one it is the whole
    assert len(os.listdir(tmp_path)) == 2  # what was killed last, and the file or folder
    write_it(kind, tmp_path, text)
    assert os.listdir(tmp_path) == ["it"]
    assert set(read_it(tmp_path).values()) == {text}


@pytest.mark.skipif(os.name != "posix", reason="locks are those of POSIX")
@pytest.mark.parametrize("left", [["it", ".it.0.old"], [".it.0.old", ".it.0.partial"]], ids=str)
def test_a_process_that_was_killed_while_folders_change_places_leaves_nothing_for_ever(tmp_path, left):
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "it"):
        raise KeyboardInterrupt
    assert read_it(tmp_path) == {"file": left[0]}  # what stood there, or was to make room, stands there again
    write_it("folder", tmp_path, "new")
    assert os.listdir(tmp_path) == ["it"]
    assert read_it(tmp_path) == {"whole": "new"}


def test_what_is_not_a_finite_number_is_null_in_json():
    same = {"n": 3, "none": None, "is": True, "text": "NaN"}
    value = {"error": math.nan, "all": [1.5, math.inf, (-math.inf, 2)], **same}
    assert json.loads(json_text(value, indent=1)) == {"error": None, "all": [1.5, None, [None, 2]], **same}


# On the disk before it has its name


@pytest.fixture
def events(monkeypatch) -> list[tuple[str, str, str]]:
    """What is written to the disk and renamed, in that order: (what happens, to which name, and what is in it)"""
    found: list[tuple[str, str, str]] = []
    fsync = os.fsync

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        found.append(("fsync", path.name, "" if path.is_dir() else path.read_text()))
        fsync(handle)

    def moved(move: Callable[[Path, Path], None], source: Path, target: Path) -> None:
        found.append(("rename", Path(source).name, Path(target).name))
        move(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, partial(moved, getattr(os, name)))
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc, to see which file is written to the disk")
def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_after_it(tmp_path, events):
    write_aside(tmp_path / "file", lambda aside: aside.write_text("all of it"))
    assert events == [("fsync", "file", "all of it"), ("rename", "file", "file"), ("fsync", tmp_path.name, "")]
    events.clear()
    write_aside(tmp_path / "file", lambda aside: aside.write_text("quickly"), durable=False)
    assert events == [("rename", "file", "file")]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc, to see which file is written to the disk")
def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, events):
    with whole_folder(tmp_path / "folder") as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("all of it")
    *inside, last = events[:-2]
    assert sorted(inside) == [("fsync", "file", "all of it"), ("fsync", "inner", "")]
    assert last == ("fsync", aside.name, "")
    assert events[-2:] == [("rename", aside.name, "folder"), ("fsync", tmp_path.name, "")]


def test_a_file_system_that_cannot_sync_a_folder_is_no_obstacle_but_a_broken_disk_is(tmp_path, monkeypatch):
    def fails(number: int) -> None:
        monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(number, "no")))

    fails(errno.EINVAL)
    write_aside(tmp_path / "file", lambda aside: aside.write_text("one"))
    fails(errno.EIO)
    with pytest.raises(OSError, match="no"):
        write_aside(tmp_path / "file", lambda aside: aside.write_text("two"))
    assert (tmp_path / "file").read_text() == "one"
    assert os.listdir(tmp_path) == ["file"]


# Folders for one process alone


def test_a_locked_folder_is_refused_until_it_is_let_go(tmp_path):
    folder = tmp_path / "new" / "folder"
    with locked(folder):
        says = f"{folder} is in use by process {os.getpid()} on .*: wait for its end"
        with pytest.raises(ValueError, match=says), locked(folder):
            pass
        assert os.listdir(folder) == [LOCK]
    assert os.listdir(tmp_path) == []  # it was made for this, and nothing came into it
    (tmp_path / LOCK).write_text("77 on another machine")  # what a killed process left
    (tmp_path / "mine").write_text("")
    with locked(tmp_path):
        (tmp_path / "more").write_text("")
    assert sorted(os.listdir(tmp_path)) == ["mine", "more"]
    with pytest.raises(ValueError, match="mine is not a folder"), locked(tmp_path / "mine"):
        pass


def test_a_lock_on_a_file_that_is_gone_is_none(tmp_path, monkeypatch):
    """The owner of the lock may remove its file between the moments when it is opened and when it is locked."""
    lock, removed = files.fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        lock(handle, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with locked(tmp_path):
        assert removed
        with pytest.raises(ValueError, match="is in use"), locked(tmp_path):
            pass


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch):
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\): see to it"), locked(tmp_path):
        pass
