"""How a command ended, and a command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from in_process import Ended


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
