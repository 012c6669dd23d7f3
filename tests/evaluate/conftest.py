"""A judge of text that is small enough for tests."""

from pathlib import Path

import pytest
import torch

from maskless.codec.text import byte_codec
from maskless.evaluate.judge import Judge
from maskless.evaluate.judge import judge as read_judge
from tiny_networks import shaken


@pytest.fixture(scope="session", name="judge")
def judge_folder(tmp_path_factory) -> Path:
    """A random GPT-2 over bytes with a context of 40 tokens."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'maskless[judge]'")
    torch.manual_seed(0)
    sizes = {"n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
    network = shaken(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=257, **sizes)), 0.2)
    network.save_pretrained(path := tmp_path_factory.mktemp("judge"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_codec().tokenizer, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def judged(judge) -> Judge:
    return read_judge(str(judge))
