"""Files and folders that appear whole or not at all, folders for one process alone, and JSON for every program."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import platform
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # only POSIX has it; elsewhere nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"


def write_aside(path: Path, write: Callable[[Path], object], *, durable: bool = True) -> None:
    """Let `write` make a file beside `path`, then rename it into place: a kill or a full disk leaves the old file.

    durable: so does a power cut, since the disk has all of the file before it gets its name. That takes milliseconds,
    which is long where there are many small files.
    """
    with _beside(path, "part") as folder:
        aside = folder / path.name
        aside.touch()
        mode = stat.S_IMODE(aside.stat().st_mode)  # what the umask says; safetensors gives 0600
        write(aside)
        if stat.S_IMODE(aside.stat().st_mode) != mode:
            aside.chmod(mode)
        if durable:
            sync(aside)
        os.replace(aside, path)
        if durable:
            sync(path.parent)
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or what a folder says of the names in it, is on the disk."""
    if os.name != "posix" and path.is_dir():  # elsewhere a folder cannot be opened
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do it with a folder
            raise
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written in a folder, and in those that are in it."""
    for part in (*folder.glob(".*.part"), *folder.glob("*/.*.part")):
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def put_folder(aside: Path, target: Path) -> None:
    """Rename a finished folder into its place, where an empty or an older one may stand; all in it is on disk first."""
    for path in (*aside.rglob("*"), aside):
        sync(path)
    old = aside.with_suffix(".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a process that was killed below
        os.rename(target, old)
    os.rename(aside, target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to fill: in the end it takes the place of `target`, after an error it is gone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _beside(target, "partial") as aside:
        yield aside
        put_folder(aside, target)


@contextmanager
def _beside(target: Path, suffix: str) -> Iterator[Path]:
    """An empty folder beside `target`, gone after an error; those that killed processes left there are removed first.

    Each is locked by the process that it belongs to. The lock is the system's, so it ends with the process.
    """
    own, handle = None, None
    for number in itertools.count():
        aside = target.with_name(f".{target.name}.{number}.{suffix}")
        if aside.exists():
            _remove_if_left(aside, target)
        elif own is None:
            own, handle = _made(aside)
        else:
            break
    assert own is not None
    try:
        yield own
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _made(folder: Path) -> tuple[Path | None, int | None]:
    """A new folder and what holds its lock; None if another process was faster."""
    try:
        folder.mkdir()
    except FileExistsError:
        return None, None
    if fcntl is None:
        return folder, None
    with suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)  # waits for a process that takes it for left behind and removes it
        if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
            return folder, handle
        os.close(handle)
    return None, None


def _remove_if_left(folder: Path, target: Path) -> None:
    """Remove an unfinished folder whose process is no more; an older one that was to make room for it is put back."""
    if fcntl is None:
        return
    with suppress(FileNotFoundError):  # its process has just finished
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # its process is at work, or there are no locks to tell
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old = folder.with_suffix(".old")
            if old.exists() and not target.exists():
                os.rename(old, target)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder, made if need be, that no other process works in meanwhile; where one does, a ValueError says which.

    The lock is the system's, on a file in the folder, so it ends with its process, however that ends. The file is gone
    afterwards, and so is a folder that was made here and is still empty.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    handle = None if fcntl is None else _lock(folder)
    try:
        yield
    finally:
        if handle is not None:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(handle)
        with suppress(OSError):  # not empty
            for each in made:
                each.rmdir()


def _lock(folder: Path) -> int:
    """The open file that holds the lock of a folder."""
    path = folder / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(handle, 200).decode(errors="replace") or "?"
            os.close(handle)
            raise ValueError(
                f"{folder} is in use by process {owner}: wait for its end, or name another --out"
            ) from None
        except OSError as error:  # of some network file systems
            why = f"{folder} cannot be locked ({error.strerror}): see to it that no other process works in it"
            warnings.warn(why, stacklevel=4)
            return handle
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            with suppress(OSError):  # a full disk: who has the lock is for people only
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()} on {platform.node()}".encode())
            return handle
        os.close(handle)  # its owner has just removed it: what is locked is no longer the file of that name


def write_json(path: Path, value: Any) -> None:
    """A value as JSON in a file, which appears whole or not at all."""
    text = json_text(value, indent=1) + "\n"
    write_aside(path, lambda aside: aside.write_text(text))


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON. What is not a finite number, such as the standard error of a single value, is null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
