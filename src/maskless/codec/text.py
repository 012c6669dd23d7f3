"""Text to token ids and back, for byte-level BPE, WordPiece and plain bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from maskless.files import write_aside
from maskless.terminal import first_line

END = "<|endoftext|>"
HUB = {"gpt2": "openai-community/gpt2", "bert": "google-bert/bert-base-uncased"}

# What the known vocabularies write for each role; the first that is present wins.
_BOS = (END, "[CLS]", "<s>")
_EOS = (END, "[SEP]", "</s>")
_PAD = ("[PAD]", "<pad>")
_MASK = ("[MASK]", "<mask>")

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_GAP = re.compile(r"\\(\[[0-9]+\])|\[([0-9]+)\]")
LONGEST = 1_000_000  # tokens of all gaps of a template: a slip of the keyboard must not eat the memory
_DIGITS = 9  # of a gap, without leading zeros: more are out of range whatever the limit is


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    symbols = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}
    return [symbols[b] for b in range(256)]


_SYMBOLS = _byte_symbols()
_BYTES = {symbol: byte for byte, symbol in enumerate(_SYMBOLS)}
_SPACE = _SYMBOLS[ord(" ")]


class TextCodec:
    """A `tokenizers.Tokenizer` that never adds special tokens and never reads them out of a text.

    vocab: how many ids there are.  bos, eos, pad, mask: ids of the special tokens, None where the vocabulary has none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text like any other
        self.tokenizer = tokenizer
        self.vocab: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos = self._first(_BOS)
        self.eos = self._first(_EOS)
        self.pad = self._first(_PAD)
        self.mask = self._first(_MASK)

    @property
    def marks(self) -> frozenset[int]:
        """The ids that are no text: begin, end, padding and mask."""
        return frozenset(i for i in (self.bos, self.eos, self.pad, self.mask) if i is not None)

    def _first(self, contents: Sequence[str]) -> int | None:
        ids = (self.tokenizer.token_to_id(content) for content in contents)
        return next((i for i in ids if i is not None), None)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled Tokenizer forgets `encode_special_tokens`.
        return _from_text, (self.tokenizer.to_str(),)

    @property
    def byte_level(self) -> bool:
        return isinstance(self.tokenizer.decoder, decoders.ByteLevel)

    @cached_property
    def widest(self) -> float:
        """The most characters of a text that one token stands for, as far as that is known."""
        if not self.byte_level or self.tokenizer.normalizer is not None:
            return inf  # spaces, or what a normalizer drops, cost no token
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        _check_text(text)
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; the texts are shared out over the processor's cores."""
        return [e.ids for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens leave no trace."""
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """How one token looks, for displays: an incomplete UTF-8 sequence shows as \\x escapes."""
        content = self.tokenizer.id_to_token(int(token)) if token >= 0 else None
        if content is None:
            raise ValueError(f"token {token} is not in the vocabulary: expected 0 to {self.vocab - 1}")
        if self.byte_level and all(symbol in _BYTES for symbol in content):
            return bytes(_BYTES[symbol] for symbol in content).decode("utf-8", errors="backslashreplace")
        return str(content)

    def save(self, folder: str | Path) -> Path:
        """Writes tokenizer.json into a folder, aside and then renamed."""
        path = Path(folder) / "tokenizer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, lambda aside: aside.write_text(self.tokenizer.to_str(), encoding="utf-8"))
        return path

    @classmethod
    def load(cls, path: str | Path) -> TextCodec:
        """The codec of a tokenizer.json, of a BERT vocab.txt, or of a folder that holds either."""
        path = Path(path)
        if path.is_dir():
            found = [path / name for name in ("tokenizer.json", "vocab.txt") if (path / name).is_file()]
            if not found:
                raise ValueError(f"{path}: the folder holds neither tokenizer.json nor vocab.txt")
            path = found[0]
        if not path.is_file():
            raise ValueError(f"{path}: no such file; expected a tokenizer.json, a vocab.txt or a folder with one")
        if path.suffix == ".txt":
            return cls(_wordpiece(path))
        try:
            return _from_text(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path}: not a tokenizer.json ({first_line(error)})") from error


def _check_text(text: object) -> None:
    if not isinstance(text, str):  # two texts in a list would be read as a pair, and joined
        raise ValueError(f"a text is {' '.join(repr(text).split())}: expected one string, not a {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a byte of the command line that is not UTF-8, or half of a pair
        raise ValueError(f"character {error.start} of a text is {text[error.start]!r}: expected UTF-8") from None


def _from_text(text: str) -> TextCodec:
    return TextCodec(Tokenizer.from_str(text))


def _wordpiece(path: Path) -> Tokenizer:
    """A lower-casing WordPiece tokenizer over the lines of a vocabulary file, as bert-base-uncased."""
    try:
        words = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a vocab.txt ({first_line(error)})") from error
    if "[UNK]" not in words:
        raise ValueError(f"{path}: not a BERT vocab.txt, it has no line [UNK]")
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokenizer.add_special_tokens([word for word in specials if word in vocab])
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_codec() -> TextCodec:
    """One token per UTF-8 byte, whose id is the byte, and <|endoftext|> = 256."""
    tokenizer = _byte_level(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_SYMBOLS)}, merges=[]))
    tokenizer.add_special_tokens([END])
    return TextCodec(tokenizer)


def train_bpe(texts: Iterable[str], vocab: int) -> TextCodec:
    """A byte-level BPE of at most `vocab` tokens, <|endoftext|> among them, learnt from some texts."""
    if vocab < 257:
        raise ValueError(f"vocab is {vocab}: expected at least 257, one for each byte and one for {END}")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=list(_SYMBOLS), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextCodec(tokenizer)


def codec(name: str | Path) -> TextCodec:
    """The codec of a name: gpt2, bert, bytes, a local file or folder, or a hub id such as owner/model."""
    name = str(name)
    if name == "bytes":
        return byte_codec()
    if name in HUB:
        return _from_hub(HUB[name])
    if Path(name).exists():
        return TextCodec.load(name)
    if _HUB_ID.fullmatch(name) and not name.endswith((".json", ".txt")):
        return _from_hub(name)
    known = ", ".join([*HUB, "bytes"])
    raise ValueError(f"unknown codec {name!r}: expected {known}, a tokenizer file or folder, or a hub id owner/model")


def _from_hub(repo: str) -> TextCodec:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(repo, "tokenizer.json", local_files_only=True)
    except OSError:  # not downloaded yet
        try:
            path = hf_hub_download(repo, "tokenizer.json")
        except OSError as error:
            raise ValueError(
                f"cannot fetch tokenizer.json of {repo!r} from the Hugging Face hub; "
                f"pass a local tokenizer.json or vocab.txt instead ({first_line(error)})"
            ) from error
    return TextCodec.load(path)


def starts_with_space(codec: TextCodec) -> list[bool]:
    """For each id, whether its text begins with a space; a question for byte-level vocabularies only.  (vocab,)"""
    if not codec.byte_level:
        raise ValueError("only a byte-level vocabulary keeps spaces inside its tokens")
    contents = (codec.tokenizer.id_to_token(i) for i in range(codec.vocab))
    return [content is not None and content.startswith(_SPACE) for content in contents]


@dataclass(frozen=True)
class Template:
    """A text with gaps, as tokens.

    tokens: 0 at gaps.  known: False at gaps.  spaced: the first positions of those gaps whose first token has to
    begin with a space, because the text before them ended in one that was left out.
    """

    tokens: list[int]
    known: list[bool]
    spaced: list[int]

    def behind(self, before: list[int]) -> Template:
        """The same behind other tokens."""
        n = len(before)
        return Template([*before, *self.tokens], [True] * n + self.known, [n + i for i in self.spaced])


def _pieces(template: str, longest: int) -> Iterator[str | int]:
    """Stretches of given text and lengths of gaps, by turns: text, gap, text, ..., text."""
    text, start = "", 0
    for match in _GAP.finditer(template):
        text += template[start : match.start()]
        start = match.end()
        literal, length = match.groups()
        if literal is not None:
            text += literal
            continue
        digits = length.lstrip("0")
        if not 1 <= len(digits) <= _DIGITS:
            raise ValueError(f"gap [{_short(length)}] in the template: expected a length from 1 to {longest:,}")
        yield text
        yield int(digits)
        text = ""
    yield text + template[start:]


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def parse_gaps(codec: TextCodec, template: str, longest: int = LONGEST) -> Template:
    """The tokens of a template such as "The [8] sat on [12].", where [n] is a gap of n tokens and \\[n] is literal.

    longest: the most tokens that it may have, such as a model's context. Gaps beyond it are refused unmade.
    """
    _check_text(template)
    pieces = list(_pieces(template, longest))
    if len(pieces) == 1:
        raise ValueError(f"no gap in the template {_short(template)!r}: write [8] for a gap of eight tokens")
    return lay_out(codec, pieces, longest)


def lay_out(codec: TextCodec, pieces: Sequence[str | int], longest: int = LONGEST) -> Template:
    """The tokens of given texts and of gaps by their lengths, in turn: text, gap, text, ..., text."""
    gaps = sum(piece for piece in pieces if isinstance(piece, int))
    if gaps > longest:  # before a token of them is made: a short template may ask for billions
        raise ValueError(f"the gaps are {gaps:,} tokens long: expected at most {longest:,} with the text")
    given = sum(len(piece) for piece in pieces if isinstance(piece, str))
    if given > longest * codec.widest:  # to encode it would take a hundred times its memory
        raise ValueError(f"the text is {given:,} characters long: expected at most {longest:,} tokens")
    # A space belongs to the token of the word behind it where the vocabulary is byte-level, and with merges.
    joins = codec.byte_level and any(len(c) > 1 and c.startswith(_SPACE) for c in codec.tokenizer.get_vocab())
    tokens: list[int] = []
    known: list[bool] = []
    spaced: list[int] = []
    for n, piece in enumerate(pieces):
        if isinstance(piece, int):
            tokens += [0] * piece
            known += [False] * piece
            continue
        before_gap = n < len(pieces) - 1
        drop = joins and before_gap and piece.endswith(" ") and not (n == 0 and piece == " ")
        ids = codec.encode(piece[:-1] if drop else piece)
        tokens += ids
        known += [True] * len(ids)
        if drop:
            spaced.append(len(tokens))
    return Template(tokens, known, spaced)
