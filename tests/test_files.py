"""Files written aside are as open to others as any file and appear whole or not at all; JSON knows numbers only."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from maskless.files import json_text, write_aside


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


def test_a_writer_that_fails_leaves_the_old_file_alone(tmp_path):
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space")

    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError, match="no space"):
        write_aside(tmp_path / "file", fail)
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_not_a_finite_number_is_null_in_json():
    value = {"error": math.nan, "all": [1.5, math.inf, (-math.inf, 2)], "n": 3, "none": None, "is": True, "text": "NaN"}
    assert json.loads(json_text(value, indent=1)) == {
        "error": None,
        "all": [1.5, None, [None, 2]],
        "n": 3,
        "none": None,
        "is": True,
        "text": "NaN",
    }
