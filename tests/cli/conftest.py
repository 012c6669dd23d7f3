"""A run, a text and other data for commands to work on."""

import json
from pathlib import Path

import pytest
from running import really

from in_process import Ended
from maskless.data.prepare import prepare
from toy_text import write


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="session")
def text(folder) -> Path:
    return write(folder / "toy.txt", 300, seed=0)


@pytest.fixture(scope="session")
def trained(folder, text) -> Ended:
    """A text and a place are enough; the minutes only keep it short."""
    return really("train", "--text", text.name, "--out", "run", "--minutes", 0.03, folder=folder)


@pytest.fixture(scope="session")
def model(folder, trained) -> Path:
    assert trained.code == 0, trained.err
    return folder / "run"


@pytest.fixture(scope="session")
def other(folder) -> Path:
    """Data of a vocabulary as large as the model's, with other tokens in it."""
    path = folder / "other.jsonl"
    path.write_text("".join(json.dumps({"text": f"Zwölf Boxkämpfer {n} " * 30}) + "\n" for n in range(40)))
    return prepare([path], folder / "other", vocab=257, length=16)
