"""How varied a sequence of tokens is: unigram entropy, distinct n-grams, and the longest stretch that comes twice.

A low perplexity under a judge is easily had by repeating oneself: no figure of that kind goes without these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


def entropy(tokens: Sequence[int]) -> float:
    """Of the distribution of tokens within the sequence, in nats: 0 for one token again and again.

    (The released code's "sample entropy"; that of n different tokens is log n.)
    """
    n = len(tokens)
    return -sum(count / n * math.log(count / n) for count in Counter(tokens).values()) + 0.0


def distinct(tokens: Sequence[int], n: int) -> float:
    """The share of different n-grams among all n-grams: 1 where none comes twice; 1 where there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_repeat(tokens: Sequence[int]) -> int:
    """How many tokens the longest stretch has that begins at two places (which may overlap): 0 where none does."""
    packed, least, most = np.asarray(tokens, dtype="<u4").tobytes(), 0, max(0, len(tokens) - 1)
    while least < most:  # a stretch that comes twice holds shorter ones that do
        length = (least + most + 1) // 2
        if _comes_twice(packed, len(tokens), length):
            least = length
        else:
            most = length - 1
    return least


def _comes_twice(packed: bytes, n: int, length: int) -> bool:
    seen: set[bytes] = set()
    for begin in range(n - length + 1):
        stretch = packed[4 * begin : 4 * (begin + length)]
        if stretch in seen:
            return True
        seen.add(stretch)
    return False
