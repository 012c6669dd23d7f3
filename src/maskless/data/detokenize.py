"""The text of One Billion Words as people write it: spaces that its tokenisation put around punctuation go."""

from __future__ import annotations

import re

# In order: links before slashes and colons, paired marks before the spaces around single ones.
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\b(https?|ftp) : / / "), r"\1://"),
    (re.compile(r" @([-,./:])@ "), r"\1"),  # "well @-@ known", the mark of a split inside a word
    (re.compile(r" n ?['\u2019]t\b"), r"n't"),  # "do n't"
    (re.compile(r"(?<=\w) (['\u2019](?:s|t|m|d|re|ve|ll)\b)", re.IGNORECASE), r"\1"),  # "it 's", "don 't"
    (re.compile(r'(?<!\S)" ([^"]*?) "(?!\S)'), r'"\1"'),
    (re.compile(r"(?<!\S)' ([^']*?) '(?!\S)"), r"'\1'"),
    (re.compile(r"(?<!\S)([\u201c\u2018]) "), r"\1"),
    (re.compile(r" (\u201d)(?!\S)"), r"\1"),
    (re.compile(r"\( ([^()]*?) \)"), r"(\1)"),
    (re.compile(r"\[ ([^][]*?) \]"), r"[\1]"),
    (re.compile(r"(?<=\w) / (?=\w)"), "/"),
    (re.compile(r"([$£€]) (?=\d)"), r"\1"),
    (re.compile(r"(?<=\d) %"), "%"),
    (re.compile(r" ([,.;:?!]+)(?!\S)"), r"\1"),
    (re.compile(r" ([,.;:?!]+)(?=[\"')\]\u201d])"), r"\1"),
]


def detokenize(text: str) -> str:
    """One sentence without the spaces that tokenisation put in: 'it \\'s " late " .' -> 'it\\'s "late".'"""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip()
