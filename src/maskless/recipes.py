"""Recipes: every text row of the paper's tables, and our own runs, as values that a command can carry out.

A recipe names the number it should reach and where that number comes from. One that we have not run says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run: data, network, training, and the validation perplexity it should reach."""

    name: str
    prepare: str  # the command that makes the data, less its --out
    network: dict[str, Any]  # keywords of `train.plan.network_config`
    train: dict[str, Any]  # keywords of `TrainConfig`
    perplexity: float  # validation bound
    source: str  # where that number stands
    hardware: str
    ran: str = "not run by us"
    length: int = field(kw_only=True)

    @property
    def commands(self) -> tuple[str, str]:
        data = f"data/{self.name.split('-')[0]}"
        return (
            f"maskless prepare {self.prepare} --out {data}",
            f"maskless train --recipe {self.name} --data {data} --out runs/{self.name}",
        )


LM1B = "lm1b --tokenizer bert --length 128 --layout padded"
OWT = "openwebtext --tokenizer gpt2 --length 1024 --layout wrapped"
REVIEWS = "imdb.jsonl.xz --vocab 8192 --length 256"
# The paper's training, but for the weights: the released ones have no bound (official releases used them).
PAPER = {
    "batch": 512,
    "learning_rate": 3e-4,
    "warmup": 2_500,
    "decay": "constant",
    "initial": "released",
    "weights": "bounded",
}
SHORT = {"batch": 256, "steps": 1_500, "warmup": 100, "learning_rate": 1e-3, "decay": "constant"}
MDLM = {"width": 768, "layers": 12}


def _pgm(encoder: int, decoder: int, width: int = 768, **more: Any) -> dict[str, Any]:
    return {"width": width, "layers": encoder + decoder, "encoder": encoder, **more}


# name, model, network, perplexity after 200k steps and after 1M (None: the paper has no such row).  PGM, Tab. 1 and 5
_LM1B_ROWS: list[tuple[str, str, dict[str, Any], float | None, float | None]] = [
    ("mdlm", "mdlm", MDLM, 34.29, 27.67),
    ("mdlm-complementary", "mdlm-complementary", MDLM, 30.87, 25.72),
    ("pgm-8-4", "pgm", _pgm(8, 4), 32.83, None),
    ("pgm-10-2", "pgm", _pgm(10, 2), 33.55, None),
    ("pgm-4-8", "pgm", _pgm(4, 8), 32.84, None),
    ("pgm-6-6", "pgm", _pgm(6, 6), 32.69, 26.80),
    ("pgm-6-6-logsumexp", "pgm", _pgm(6, 6, queries="logsumexp"), 32.70, None),
    ("pgm-6-6-mean", "pgm", _pgm(6, 6, queries="mean"), 33.89, None),
]
_OWT_ROWS: list[tuple[str, str, dict[str, Any], float | None, float | None]] = [
    ("mdlm", "mdlm", MDLM, 25.35, 23.07),
    ("mdlm-complementary", "mdlm-complementary", MDLM, 25.32, 22.98),
    ("pgm-6-6", "pgm", _pgm(6, 6), 26.96, None),
    ("pgm-8-8", "pgm", _pgm(8, 8), 25.10, 22.61),
    ("pgm-10-6", "pgm", _pgm(10, 6), 25.19, None),
    ("pgm-6-6-1024", "pgm", _pgm(6, 6, width=1024), 23.75, 21.43),
]


def _paper() -> list[Recipe]:
    recipes = []
    for data, rows, prepare, length, gpus in (
        ("lm1b", _LM1B_ROWS, LM1B, 128, "8 GPUs in the paper"),
        ("owt", _OWT_ROWS, OWT, 1024, "16 GPUs in the paper"),
    ):
        for name, model, network, early, late in rows:
            for suffix, steps, perplexity in (("-200k", 200_000, early), ("", 1_000_000, late)):
                if perplexity is not None:
                    recipes.append(
                        Recipe(
                            name=f"{data}-{name}{suffix}",
                            prepare=prepare,
                            length=length,
                            network=network,
                            train={"model": model, "steps": steps, **PAPER},
                            perplexity=perplexity,
                            source="PGM, Tab. 5 (paper's estimator)",
                            hardware=gpus,
                        )
                    )
    return recipes


# name, model, more of the network and of the training, perplexity.  docs/results.md
_REVIEWS_ROWS: list[tuple[str, str, dict[str, Any], dict[str, Any], float]] = [
    ("mdlm", "mdlm", {}, {}, 124.4),
    ("mdlm-complementary", "mdlm-complementary", {}, {}, 91.4),
    ("pgm", "pgm", {}, {}, 84.7),
    ("pgm-unbounded", "pgm", {}, {"weights": "released"}, 86.9),
    ("pgm-exact", "pgm", {}, {"weights": "exact"}, 83.7),
    ("pgm-ordered", "pgm", {"context": "ordered"}, {}, 88.2),
]


def _reviews() -> list[Recipe]:
    return [
        Recipe(
            name=f"reviews-{name}",
            prepare=REVIEWS,
            length=256,
            network={"width": 512, "layers": 12, **network},
            train={"model": model, **SHORT, **training},
            perplexity=perplexity,
            source="docs/results.md, one seed",
            hardware="one H200, 2 to 3 minutes",
            ran="2026-11-15",
        )
        for name, model, network, training, perplexity in _REVIEWS_ROWS
    ]


RECIPES = {recipe.name: recipe for recipe in _paper() + _reviews()}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}")
    return RECIPES[name]
