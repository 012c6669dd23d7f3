"""The training demonstration runs, and shows what it promises."""

import io

from rich.console import Console

from maskless import train_demo
from maskless.data import toy


def test_the_demonstration_trains_writes_fills_and_ends_with_a_table(monkeypatch):
    monkeypatch.setattr(train_demo, "SENTENCES", 600)
    monkeypatch.setattr(train_demo, "SAMPLES", 4)
    console = Console(file=io.StringIO(), width=160)
    train_demo.show(console, minutes=0.03, seed=0)
    shown = console.file.getvalue()
    for part in (
        "PGM writes",
        "MDLM writes",
        "PGM fills gaps",
        "after 11 steps",
        "right sentences",
        "sampling, tokens/s",
    ):
        assert part in shown


def test_the_gaps_of_the_demonstration_have_a_right_answer():
    words = train_demo.GAPS
    for gap, answer in (
        ("[1] has the red ball , anna", "anna has the red ball , anna"),
        ("anna [2] red ball to ben", "anna gives the red ball to ben"),
        (", [3] red [1] to [1] ,", ", ben gives the red ball to carl ,"),
        ("the [2] to dora", "the red ball to dora"),
        ("so [1] has", "so dora has"),
    ):
        assert gap in words
        words = words.replace(gap, answer)
    assert toy.check(words)
