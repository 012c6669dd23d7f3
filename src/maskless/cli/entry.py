"""The way into the program, and the way out of it when something is wrong: one line on stderr, exit code 2."""

from __future__ import annotations

import errno
import sys
import threading
from typing import NoReturn

import typer
from safetensors import SafetensorError

from maskless.cli.commands import app

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk
RESUMABLE = ("train", "train-codec", "distill")
# The base of typer's errors: of the click inside newer versions, or of the package beside older ones.
USAGE: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> None:
    """Run a command; a user's mistake is one line on stderr and exit code 2."""
    threading.excepthook = _thread_failed
    try:
        code = app(standalone_mode=False)
    except USAGE as error:
        if not sys.argv[1:]:  # no command: the help has been shown
            sys.exit(2)
        _fail(error.format_message())  # type: ignore[attr-defined]
    except SafetensorError as error:  # of reading, it is a ValueError by now
        _fail(f"{error}; what was saved before is still there")
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in FULL and error.filename is None:
            raise
        kept = "; what was saved before is still there" if error.errno in FULL else ""
        _fail(f"{error.strerror}: {error.filename or 'while writing'}{kept}")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:
        resumable = sys.argv[1:2] and sys.argv[1] in RESUMABLE
        print("interrupted" + ("; a training run goes on with --resume" if resumable else ""), file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """A thread that logs may meet the full disk first: the next file that is written says so in one line."""
    if not isinstance(failed.exc_value, OSError) or failed.exc_value.errno not in FULL:
        threading.__excepthook__(failed)
