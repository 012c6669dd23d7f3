"""A judge of text that is small enough for tests, and the command line as tests call it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from maskless.cli import main
from maskless.codec.text import byte_codec
from maskless.evaluate.judge import Judge
from maskless.evaluate.judge import judge as read_judge


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., Ended]:
    """command(*words): how `maskless` ends."""

    def call(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["maskless", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture(scope="session", name="judge")
def judge_folder(tmp_path_factory) -> Path:
    """A random GPT-2 over bytes with a context of 40 tokens."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'maskless[judge]'")
    torch.manual_seed(0)
    sizes = {"n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=257, **sizes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    path = tmp_path_factory.mktemp("judge")
    network.save_pretrained(path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_codec().tokenizer, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def judged(judge) -> Judge:
    return read_judge(str(judge))
