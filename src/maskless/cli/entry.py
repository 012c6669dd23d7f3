"""The way into the program, and the way out of it when something is wrong: one line on stderr, exit code 2."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from maskless.train.interruption import Interruption, StoppedError

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk
RESUMABLE = {"train": "run.json", "train-codec": "run.json", "distill": "distill.json"}  # in --out, once it has begun
NO_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory", re.IGNORECASE)  # of torch
KEPT = "what was saved before is still there"
LOOP = "Symlink loop"  # of Path.resolve, before Python 3.13
LESS = {  # what takes less memory
    "train": "try --accumulate, --activation-checkpointing or a smaller --batch; ",
    "distill": "try --accumulate, --activation-checkpointing or a smaller --batch; ",
    "train-codec": "try a smaller --batch; ",
    "evaluate": "try a smaller --batch; ",
    "generate": "try a smaller --n; ",
}


begun: float | None = None  # when the command did


def main() -> None:
    """Run a command; a user's mistake is one line on stderr and exit code 2."""
    global begun
    begun = time.monotonic()
    # Threads of torch wait for each other a hundred times per step. They spin meanwhile, by default 300 times as
    # long, and on a busy machine keep the core from the one they wait for. torch, not loaded yet, reads this.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    threading.excepthook = _thread_failed
    if isinstance(sys.stdout, io.TextIOWrapper):  # the name of a file need not be UTF-8
        sys.stdout.reconfigure(errors="backslashreplace" if sys.stdout.isatty() else "surrogateescape")
    try:
        code = _run()
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        exec("")  # forgets a KeyboardInterrupt that an `eval` met: Python would end by the signal, not with this code
        print(f"interrupted{_continued(sys.argv[1:])}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _run() -> Any:
    with Interruption():  # Ctrl-C waits until the modules are loaded
        import typer
        from safetensors import SafetensorError

        from maskless.cli.commands import app

    # The base of typer's errors: of the click inside newer versions, or of the package beside older ones.
    usage: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        return app(standalone_mode=False)
    except usage as error:
        if not sys.argv[1:]:  # no command: the help has been shown
            sys.exit(2)
        _fail(error.format_message())  # type: ignore[attr-defined]
    except SafetensorError as error:  # of reading, it is a ValueError by now
        _fail(f"{error}; {KEPT}{_continued(sys.argv[1:])}")
    except StoppedError as error:
        _fail(f"{error}{_continued(sys.argv[1:])}")
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in FULL and error.filename is None:
            raise
        again = _continued(sys.argv[1:])
        kept = f"; {KEPT}{again}" if error.errno in FULL else again if sys.argv[1:2] == ["prepare"] else ""
        _fail(f"{error.strerror}: {error.filename or 'while writing'}{kept}")
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith(LOOP):
            _fail(str(error))
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        said = (str(error) or "no more could be had").splitlines()[0]
        _fail(f"out of memory: {LESS.get(sys.argv[1], '')}{said}{_continued(sys.argv[1:])}")
    except typer.Abort:
        return 130


def _continued(words: list[str]) -> str:
    """The command that continues what was stopped: a run that has begun, figures in --out, or a table of the paper."""
    command = words[:1]
    values = [word.removeprefix("--out=") for word in words if word.startswith("--out=")]
    values += [value for word, value in itertools.pairwise(words) if word == "--out"]
    keeps = command == ["evaluate"] and bool(values) and Path(values[-1]).is_file()
    if command == ["prepare"] and values:
        keeps = next(Path(values[-1]).parent.glob(f".{Path(values[-1]).name}.parts/*.npz"), None) is not None
    if keeps or command == ["reproduce"]:  # which do nothing twice
        return f"; continue with: {shlex.join(['maskless', *words])}"
    if values and command[0] in RESUMABLE and (Path(values[-1]) / RESUMABLE[command[0]]).exists():
        return f"; continue with: {shlex.join(['maskless', *command, '--out', values[-1], '--resume'])}"
    return ""


def _fail(message: str) -> NoReturn:
    from maskless.terminal import plain

    print(f"error: {plain(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """A thread that logs may meet the full disk first: the next file that is written says so in one line."""
    if not isinstance(failed.exc_value, OSError) or failed.exc_value.errno not in FULL:
        threading.__excepthook__(failed)
