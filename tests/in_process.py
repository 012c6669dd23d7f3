"""The command line, run in this process, and how it ended."""

import sys
import threading
from typing import NamedTuple

import pytest

from maskless.cli import main


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def exit_code_of(*words: object) -> int:
    """How `maskless` ends with these words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["maskless", *map(str, words)])
        patch.setattr(threading, "excepthook", threading.excepthook)
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def done(ended: Ended) -> Ended:
    """What ended well."""
    assert ended.code == 0, ended.err
    return ended


def one_line(ended: Ended) -> str:
    """What is wrong, said in one line and nothing else."""
    assert (ended.code, ended.out) == (2, ""), ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("\n")
    return ended.err.removeprefix("error: ").strip()
