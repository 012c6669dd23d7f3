"""Fill a form: a template with several named gaps, several times over.

python examples/fill_form.py stories
python examples/fill_form.py runs/my --form letter.txt --versions 5

A gap is {name:tokens}. Everything else in the form stays as it is, and every gap sees all of it, before and after.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import maskless
from maskless.codec.text import TextCodec

FORM = """There was a girl named {name:1}. She loved to {hobby:4}.
One day, she saw a {sight:4}."""
GAP = re.compile(r"\{(\w+):([1-9]\d*)\}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill a form with a text model.")
    parser.add_argument("model", help="a shipped model such as stories, or the folder of a run or model")
    parser.add_argument("--form", type=Path, help="a file with gaps such as {place:5}, five tokens long")
    parser.add_argument("--versions", type=int, default=3, help="how many times to fill it (3)")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the nucleus of this probability (0.9)")
    given = parser.parse_args()
    try:
        form = FORM if given.form is None else given.form.read_text()
        gaps = [(name, int(tokens)) for name, tokens in GAP.findall(form)]
        if not gaps:
            raise ValueError("the form has no gap: expected some such as {place:5}, five tokens long")
        template = GAP.sub(r"[\2]", re.sub(r"(\[\d+\])", r"\\\1", form))  # what looks like a gap of ours stays text
        model = maskless.load(given.model)
        if not isinstance(model.codec, TextCodec):
            raise ValueError(f"{given.model} has no tokenizer: expected a text model")
        for seed in range(given.versions):
            filled = maskless.fill(model, template, seed=seed, top_p=given.top_p)
            print(f"--- version {seed + 1}\n{filled}\n")
            for (name, _), value in zip(gaps, values(model.codec, filled, gaps), strict=True):
                print(f"{name:>12}: {value}")
    except (ValueError, OSError) as error:
        parser.error(f"{error.filename}: {error.strerror}" if isinstance(error, FileNotFoundError) else str(error))


def values(codec: TextCodec, filled: maskless.Text, gaps: list[tuple[str, int]]) -> list[str]:
    """What each gap was filled with: the sampled tokens from left to right, so many for each gap."""
    sampled = iter([token for token, step in zip(filled.tokens, filled.steps, strict=True) if step >= 0])
    return [codec.decode([next(sampled) for _ in range(tokens)]).strip() for _, tokens in gaps]


if __name__ == "__main__":
    main()
