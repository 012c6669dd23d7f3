"""A judge of text that is small enough for tests."""

from __future__ import annotations

import pytest
import torch

from maskless.codec.text import byte_codec
from maskless.evaluate.judge import Judge, judge


@pytest.fixture(scope="session")
def judged(tmp_path_factory) -> Judge:
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
    return judge(str(path))
