"""Completions as OpenAI's clients read them: behind their prompt, and no token before it has landed."""

from types import SimpleNamespace

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace

from maskless.codec.text import TextCodec
from maskless.how import How
from maskless.serve.completions import Completion
from maskless.serve.host import Host, Limits
from maskless.serve.requests import CompletionRequest


def test_a_streamed_completion_shows_no_token_that_lands_while_it_is_read(models):
    """Two positions are noted as decided after the tokens were read."""
    host = Host("pgm", models["pgm"], Limits())
    completion = Completion(host, CompletionRequest(prompt="anna", max_tokens=4))
    drafts = completion.drafts(How())

    class Landing:
        """Tokens as they were before, and then their steps are noted."""

        def __getitem__(self, row: int) -> torch.Tensor:
            before = drafts.tokens[row].clone()
            drafts.came[row, completion.gaps[0][:2]] = 0
            return before

    assert completion.chunk(0, SimpleNamespace(came=drafts.came, tokens=Landing())) is None
    host.batcher.close()


def test_a_completion_reads_as_it_does_behind_its_prompt():
    """Pieces of words join what stands before them."""
    ids = {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "on": 4}
    words = Tokenizer(WordPiece(ids, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = Whitespace(), WordPieceDecoder()
    host = SimpleNamespace(text=TextCodec(words), name="words", length=9, lead=[])
    completion = Completion(host, CompletionRequest(prompt="the cat", max_tokens=3))
    assert completion.text(0, [1, 2, 3, 4, 2])[0] == "s on cat"
    assert completion.text(0, [1, 2, 4, 2, 3])[0] == " on cats"
