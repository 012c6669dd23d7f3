"""Cuts between words: the tokens of the pieces are those of the whole text."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers

from maskless.codec.text import TextCodec, byte_codec, train_bpe
from maskless.data.cuts import between_words

SEPARATORS = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", ", ", "...", "'s ", "’s ", " - ", "…"]
SEPARATORS += ["。", "、", "(", ") ", ' "']
WORDS = st.text(alphabet="abcXYZé漢字かß019e\u0301_'", min_size=1, max_size=6).map(lambda word: f"{word}a")
TEXTS = st.lists(st.tuples(WORDS, st.sampled_from(SEPARATORS)), min_size=20, max_size=60).map(
    lambda pairs: "".join(itertools.chain(*pairs))
)
SENTENCES = ["the cat's mat, and the dog's", "a\n\nb  c   d", "XYZ 019 漢字かa。漢a、a", "abc abca ca… \n\n aa ba"] * 5


def wordpiece(folder) -> TextCodec:
    letters = "abcxyze漢字かß019_'’.,-()\"…。、"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *letters, *(f"##{letter}" for letter in letters), "ab", "##ca"]
    (folder / "vocab.txt").write_text("\n".join(words))
    return TextCodec.load(folder / "vocab.txt")


CODECS = {
    "bytes": lambda _: byte_codec(),
    "bpe": lambda _: train_bpe(SENTENCES, 400),  # it cuts words as GPT-2's does
    "wordpiece": wordpiece,
}


def cut(text: str, piece: int) -> list[str]:
    return [text[start:end] for start, end in between_words(text, piece)]


@pytest.fixture(scope="module", params=CODECS)
def codec(request, tmp_path_factory) -> TextCodec:
    return CODECS[request.param](tmp_path_factory.mktemp("codec"))


@settings(max_examples=75, deadline=None)
@given(text=TEXTS)
def test_pieces_have_the_tokens_of_the_whole_text(codec, text):
    pieces = cut(text, 16)
    assert "".join(pieces) == text
    assert len(pieces) > 1 or len(text) <= 64
    assert max(map(len, pieces)) <= 64
    assert [i for ids in codec.encode_batch(pieces) for i in ids] == codec.encode(text)


def test_between_two_words_comes_first():
    """Vocabularies that read a space before each text, as some do, are cut there without harm."""
    tokenizer = Tokenizer.from_str(train_bpe(SENTENCES, 300).tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    codec = TextCodec(tokenizer)
    text = "abc,abc " * 40 + "abc"
    pieces = cut(text, 16)
    assert all(piece.startswith(" ") for piece in pieces[1:])
    assert [i for ids in codec.encode_batch(pieces) for i in ids] == codec.encode(text)


def test_a_run_without_a_place_is_cut_all_the_same_and_a_short_text_is_not():
    assert list(map(len, cut("x" * 200, 16))) == [64, 64, 64, 8]
    assert cut("a b " * 16, 16) == ["a b " * 16]
    assert cut("", 16) == [""]
