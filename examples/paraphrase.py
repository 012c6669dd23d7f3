"""Paraphrase by resampling: keep every n-th word, resample the rest around them, and repeat with other words.

python examples/paraphrase.py stories "One day, a little dog saw a big red ball in the park." --keep 2 --rounds 4

A left-to-right model cannot do this: there are fixed words on both sides of those that are resampled. With --keep 2 the
text changes slowly; with larger numbers it soon drifts.
"""

from __future__ import annotations

import argparse
import re

import maskless
from maskless.codec.text import TextCodec


def main() -> None:
    parser = argparse.ArgumentParser(description="Paraphrase a text with a text model.")
    parser.add_argument("model", help="a shipped model such as stories, or the folder of a run or model")
    parser.add_argument("text", help="the text to start from")
    parser.add_argument("--keep", type=int, default=3, help="every n-th word stays, others in each round (3)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds (4)")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the nucleus of this probability (0.9)")
    given = parser.parse_args()
    try:
        if given.keep < 2:
            raise ValueError(f"keep {given.keep} is out of range: expected 2 or more, so that something is resampled")
        model = maskless.load(given.model)
        if not isinstance(model.codec, TextCodec):
            raise ValueError(f"{given.model} has no tokenizer: expected a text model")
        text = given.text
        print(text)
        for number in range(given.rounds):
            gaps = template(model.codec, text, given.keep, first=number % given.keep)
            text = maskless.fill(model, gaps, seed=number, top_p=given.top_p).strip()
            print(f"{gaps}\n{text}")
    except ValueError as error:
        parser.error(str(error))


def template(codec: TextCodec, text: str, keep: int, first: int) -> str:
    """The text with gaps in place of all words but every n-th, each as long as what it replaces."""
    parts, gap = [], 0  # gap: tokens that are waiting to become one
    for number, word in enumerate(text.split()):
        if number % keep != first:
            gap += len(codec.encode(f" {word}"))
            continue
        literal = re.sub(r"\[(\d+)\]", r"\\[\1]", word)  # what looks like a gap stays literal
        parts += [f"[{gap}]", literal] if gap else [literal]
        gap = 0
    return " ".join([*parts, f"[{gap}]"] if gap else parts)


if __name__ == "__main__":
    main()
