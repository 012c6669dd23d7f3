"""The command line, run in this process."""

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
