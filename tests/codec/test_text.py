"""Codecs: what is encoded comes back, special tokens stay out, and templates keep their spaces."""

import pickle
import tracemalloc

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from maskless.codec.text import TextCodec, byte_codec, codec, parse_gaps, starts_with_space, train_bpe

TEXTS = ["the cat sat on the mat .", "the dog sat on the cat , and the cat ran .", "naïve café — ünïcode 漢字"] * 20
BERT_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##ting", "on", "[", "]", "mask", "."]

# Any text; hypothesis's own st.text() reads the whole Unicode database first, for seconds.
CHARACTERS = st.integers(0, 0x10FFFF).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr)
ANY = st.lists(CHARACTERS, max_size=40).map("".join)
BYTES = byte_codec()
BPE = train_bpe(TEXTS, 300)


@pytest.fixture
def bert(tmp_path) -> TextCodec:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(BERT_WORDS) + "\n")
    return TextCodec.load(path)


@pytest.mark.parametrize("codec", [BYTES, BPE], ids=["bytes", "bpe"])
@settings(max_examples=150, deadline=None)
@given(text=ANY | st.lists(st.sampled_from(" \n\ta<|endoftext|>é漢🙂")).map("".join))
def test_byte_level_codecs_give_back_any_text(codec, text):
    assert codec.decode(codec.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=ANY)
def test_a_byte_token_is_the_byte(text):
    assert BYTES.encode(text) == list(text.encode())


@pytest.mark.parametrize("text", [["a", "b"], ["a", "b", "c"], ("a",), b"a", None, 3])
def test_what_is_not_one_text_is_refused(text):
    """Two texts in a list were joined: the library takes them for a pair."""
    for call in (BYTES.encode, lambda text: parse_gaps(BYTES, text)):
        with pytest.raises(ValueError, match=f"expected one string, not a {type(text).__name__}") as caught:
            call(text)
        assert repr(text) in str(caught.value)


def test_what_is_no_unicode_is_refused():
    """A byte of a command line that is not UTF-8, which Python keeps as half of a surrogate pair."""
    for call in (BYTES.encode, lambda text: parse_gaps(BYTES, f"{text} [3]")):
        with pytest.raises(ValueError, match=r"character 4 of a text is '\\udcff': expected UTF-8"):
            call("café\udcff")


def test_special_tokens_are_neither_added_nor_read_out_of_text_nor_decoded():
    assert BYTES.vocab == 257
    assert BYTES.bos == BYTES.eos == 256
    assert BYTES.pad is None
    assert BYTES.mask is None
    assert BYTES.eos not in BYTES.encode("a<|endoftext|>b")
    assert BPE.eos not in BPE.encode("a<|endoftext|>b")
    assert BPE.eos == BPE.bos
    assert BPE.decode([BPE.eos, *BPE.encode("the cat"), BPE.eos]) == "the cat"


def test_encode_batch_is_encode_of_each():
    assert BPE.encode_batch(TEXTS) == [BPE.encode(text) for text in TEXTS]
    assert BPE.encode_batch([]) == []
    assert BPE.encode("") == []


def test_a_trained_vocabulary_has_the_size_asked_for_and_is_always_the_same(capfd):
    assert BPE.vocab == 300
    for _ in range(5):
        assert train_bpe(iter(TEXTS), 300).tokenizer.to_str() == BPE.tokenizer.to_str()
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab is 256: expected at least 257"):
        train_bpe(TEXTS, 256)


def test_token_text_shows_spaces_and_incomplete_characters():
    assert "".join(BPE.token_text(i) for i in BPE.encode("the cat sat")) == "the cat sat"
    assert [BYTES.token_text(i) for i in "é".encode()] == ["\\xc3", "\\xa9"]
    assert BYTES.token_text(256) == "<|endoftext|>"
    with pytest.raises(ValueError, match="token 257 is not in the vocabulary: expected 0 to 256"):
        BYTES.token_text(257)


def test_a_saved_codec_is_the_same_codec(bert, tmp_path):
    for name, one in (("bpe", BPE), ("bert", bert)):
        path = one.save(tmp_path / name)
        assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
        for again in (TextCodec.load(path), TextCodec.load(path.parent), codec(path), pickle.loads(pickle.dumps(one))):
            assert again.tokenizer.to_str() == one.tokenizer.to_str()
            assert again.encode("a<|endoftext|> The CAT satting.") == one.encode("a<|endoftext|> The CAT satting.")
            assert again.pad == one.pad


def test_wordpiece_lower_cases_and_knows_its_special_tokens(bert):
    assert (bert.vocab, bert.bos, bert.eos, bert.pad, bert.mask) == (len(BERT_WORDS), 2, 3, 0, 4)
    assert bert.encode("The CAT satting.") == [5, 6, 7, 8, 13]
    assert bert.encode("[MASK]") == [10, 12, 11]
    assert bert.decode([2, 5, 6, 7, 8, 13, 3, 0, 0]) == "the cat satting."
    assert bert.token_text(8) == "##ting"


def test_padding_and_truncation_of_a_foreign_file_are_switched_off(tmp_path):
    tokenizer = Tokenizer.from_str(BPE.tokenizer.to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec.load(tmp_path).encode(TEXTS[1]) == BPE.encode(TEXTS[1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "not a tokenizer.json"),
        ("tokenizer.json", b"\x00", "not a tokenizer.json"),
        ("vocab.txt", b"the\ncat\n", r"no line \[UNK\]"),
        ("vocab.txt", b"\xff", "not a vocab.txt"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        TextCodec.load(tmp_path)


def test_missing_files_and_unknown_names_say_what_was_expected(tmp_path):
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor vocab\.txt"):
        codec(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        TextCodec.load(tmp_path / "tokenizer.json")
    for name in ("gpt3", "models/tokenizer.json", "/no/where", "../up"):
        with pytest.raises(ValueError, match=r"unknown codec .*expected gpt2, bert, bytes"):
            codec(name)


def test_names_become_codecs(monkeypatch, tmp_path):
    asked = []

    def download(repo, name, local_files_only=False):
        asked.append((repo, local_files_only))
        if local_files_only or repo == "some/model":
            raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nsecond line")
        return str(BPE.save(tmp_path))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert codec("bytes").vocab == 257
    assert codec("gpt2").vocab == BPE.vocab
    assert asked[-1] == ("openai-community/gpt2", False)
    assert codec("bert").vocab == BPE.vocab
    assert asked[-1] == ("google-bert/bert-base-uncased", False)
    with pytest.raises(ValueError, match=r"'some/model'.*pass a local tokenizer.json.*\(no connection\)$"):
        codec("some/model")


def filled(codec: TextCodec, template: str, words: list[str]) -> str:
    """The text that comes out when each gap is filled with the tokens of a word, a space before it where asked for."""
    parsed = parse_gaps(codec, template)
    tokens, words = list(parsed.tokens), list(words)
    for i, known in enumerate(parsed.known):
        if not known:
            (tokens[i],) = codec.encode((" " if i in parsed.spaced else "") + words.pop(0))
    return codec.decode(tokens)


@pytest.mark.parametrize(
    ("template", "words", "text"),
    [
        ("The [1] sat", ["cat"], "The cat sat"),
        ("[1] sat on [1]", ["the", "the"], "the sat on the"),
        ("a [1] [1].", ["cat", "sat"], "a cat sat."),
        ("a  [1]", ["cat"], "a  cat"),
        (" [1]", ["the"], " the"),
        ("a\n[1]", ["the"], "a\nthe"),
        (r"\[8] is [1]", ["the"], "[8] is the"),
        ("x[1]", ["the"], "xthe"),
    ],
)
def test_a_filled_template_has_the_spaces_it_was_written_with(template, words, text):
    assert filled(BPE, template, words) == text


def test_gaps_are_where_they_were_written():
    parsed = parse_gaps(BPE, "the [8] sat on [12].")
    the, sat_on, stop = (BPE.encode(t) for t in ("the", " sat on", "."))
    assert parsed.tokens == the + [0] * 8 + sat_on + [0] * 12 + stop
    assert parsed.known == [True] * len(the) + [False] * 8 + [True] * len(sat_on) + [False] * 12 + [True]
    assert parsed.spaced == [len(the), len(the) + 8 + len(sat_on)]


def test_bytes_and_wordpiece_keep_their_spaces(bert):
    parsed = parse_gaps(BYTES, "a [2]b")
    assert parsed.tokens == [ord("a"), ord(" "), 0, 0, ord("b")]
    assert parsed.spaced == []
    assert parse_gaps(bert, "the [2] sat").tokens == [5, 0, 0, 7]
    assert parse_gaps(bert, "the [2] sat").spaced == []


@pytest.mark.parametrize("template", ["no gap", "", r"only \[8]", "[0]", "[00]", "[2000000]", "[99999999999999999999]"])
def test_templates_without_a_sensible_gap_are_refused(template):
    with pytest.raises(ValueError, match="gap"):
        parse_gaps(BPE, template)


@pytest.mark.parametrize("template", ["[000000009]", "[4] and [5]", "[1]" * 9, "[0000000001000000]" * 100])
def test_gaps_beyond_the_longest_text_are_refused_before_they_are_made(template):
    """However they are written: leading zeros once passed a check that counted digits."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"the gaps are [\d,]+ tokens long: expected at most 8 with the text"):
            parse_gaps(BPE, template, 8)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert parse_gaps(BPE, "[0004][4]", 8).known == [False] * 8


@pytest.mark.parametrize("template", ["x" * 1000, f"[{'9' * 1000}]"])
def test_what_is_said_about_a_long_template_is_short(template):
    with pytest.raises(ValueError, match=r"gap .*\.\.\..*: ") as raised:
        parse_gaps(BPE, template)
    assert len(str(raised.value)) < 200


def test_starts_with_space_agrees_with_decoding_and_is_a_question_for_byte_level_vocabularies(bert):
    assert starts_with_space(BPE) == [BPE.token_text(i).startswith(" ") for i in range(BPE.vocab)]
    with pytest.raises(ValueError, match="byte-level"):
        starts_with_space(bert)
    assert not TextCodec(Tokenizer(models.BPE())).byte_level
