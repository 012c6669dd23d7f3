"""A command in this process or in one of its own, and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from maskless import cli


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def in_process(*arguments: Any) -> int:
    """The exit code of a command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["maskless", *map(str, arguments)])
        patch.setattr(threading, "excepthook", threading.excepthook)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def done(ended: Ended) -> Ended:
    """What ended well."""
    assert ended.code == 0, ended.err
    return ended


def one_line(ended: Ended) -> str:
    """What is wrong, said in one line and nothing else."""
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("\n")
    return ended.err.removeprefix("error: ").strip()


def really(*arguments: Any, folder: Path | None = None) -> Ended:
    """What a real process makes of a command."""
    command = [sys.executable, "-m", "maskless", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)
