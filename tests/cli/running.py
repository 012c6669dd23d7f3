"""A command in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from in_process import Ended


def really(*arguments: Any, folder: Path | None = None) -> Ended:
    """What a real process makes of a command."""
    command = [sys.executable, "-m", "maskless", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)
