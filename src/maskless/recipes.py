"""Recipes: every row of the paper's tables of perplexity and FID, and our own runs, as values that a command takes.

A recipe names the figures it should reach and where they come from. One that we have not run says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A figure that a run should reach: perplexity is the validation bound's, FID and score those of what is drawn."""

    figure: str
    value: float
    at: str = ""  # how it is measured: order, steps, weight of the guidance


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run: data, network, training, and the figures it should reach."""

    name: str
    command: str = "train"  # or train-codec
    prepare: str  # what makes the data, less its --out; of a codec: the images
    network: dict[str, Any]  # keywords of `network_config` or `image_network_config` (train.plan), or of `VQConfig`
    train: dict[str, Any]  # keywords of `TrainConfig` or `CodecConfig`
    length: int
    measure: str = ""  # of pictures: what they are compared with and how they are drawn
    goals: tuple[Goal, ...] = ()
    source: str  # where the goals stand
    hardware: str
    ran: str = "not run by us"

    @property
    def commands(self) -> tuple[str, ...]:
        data, run = f"data/{self.name.split('-')[0]}", f"runs/{self.name}"
        if self.command == "train-codec":
            return (f"maskless train-codec --recipe {self.name} --images {self.prepare} --out {run}",)
        made = (
            f"maskless prepare {self.prepare} --out {data}",
            f"maskless train --recipe {self.name} --data {data} --out {run}",
        )
        measured = (f"maskless evaluate {run} --reference {self.measure} --out {run}/quality.json",)
        return made + measured if self.measure else made


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
                            goals=(Goal("perplexity", perplexity),),
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
            train={"model": model, **({"objective": "partition"} if model == "pgm" else {}), **SHORT, **training},
            goals=(Goal("perplexity", perplexity),),
            source="docs/results.md, one seed",
            hardware="one H200, 2 to 3 minutes",
            ran="2026-11-15",
        )
        for name, model, network, training, perplexity in _REVIEWS_ROWS
    ]


# Models that are shipped: 13.7 MiB in half precision. A row is a whole story, then the end-of-text token up to its end,
# so that the model knows where stories end. What stands at a position depends on it, and the released GroupSwap cannot
# tell positions apart while only the first token is known: every text would begin with a blind draw. So: residual.
STORIES = "stories.jsonl --vocab 4096 --length 256 --layout padded --valid 0.01"
SHIPPED = {
    "batch": 512,
    "steps": 12_000,
    "learning_rate": 1.5e-3,
    "warmup": 500,
    "decay": "cosine",
    "ema": 0.999,
}
_STORIES_ROWS: list[tuple[str, str, dict[str, Any], dict[str, Any], float | None]] = [
    ("stories", "pgm", {"context": "ordered", "swap": "residual"}, {"weights": "exact"}, 2.672),
    ("stories-full", "pgm", {"swap": "residual"}, {"weights": "exact"}, None),
    ("stories-mdlm", "mdlm", {}, {}, 2.554),
    ("stories-ar", "ar", {}, {}, None),
]


def _stories() -> list[Recipe]:
    """Networks of 8 M parameters on stories that tools/stories.py sampled from stories15M."""
    return [
        Recipe(
            name=name,
            prepare=STORIES,
            length=256,
            network={"width": 256, "layers": 6, "dropout": 0.0, **network},
            train={"model": model, **SHIPPED, **training},
            goals=(Goal("perplexity", perplexity),) if perplexity else (),
            ran="2026-11-15" if perplexity else Recipe.ran,
            source="docs/results.md, one seed",
            hardware="one H200, 10 minutes at most",
        )
        for name, model, network, training, perplexity in _STORIES_ROWS
    ]


# model, order, steps, then FID and Inception Score with guidance 0, 1, ..., 6.  PGM, Tab. 8 and 9
_IMAGENET_ROWS = """
maskgit   confidence 32  14.30 82.41  7.80 151.62  6.78 208.92  7.37 255.69  7.46 289.93  9.61 250.86  21.68 149.61
maskgit   confidence 64  15.62 79.23  9.40 140.48  8.06 195.35  8.19 239.89  7.61 267.26  11.44 202.92  26.41 113.63
pgm-12-12 confidence 32  18.77 67.22  8.96 135.03  6.67 201.66  7.09 255.43  8.30 290.18  9.59 307.52  10.84 313.27
pgm-12-12 confidence 64  19.45 64.44  10.08 124.90  7.35 188.77  7.39 238.31  8.13 276.55  9.18 297.44  10.38 302.29
pgm-14-10 confidence 32  21.97 60.07  11.24 121.39  8.05 183.20  7.76 232.62  8.47 263.73  9.39 288.60  10.40 291.46
pgm-14-10 confidence 64  22.74 56.77  12.32 112.98  8.80 171.11  8.11 219.33  8.44 253.10  9.12 270.16  9.90 279.00
maskgit   halton     32  25.72 57.70  5.35 267.49  12.82 365.36  17.24 408.30  15.65 365.97  25.33 182.14  48.97 74.74
maskgit   halton     64  18.61 69.68  6.76 283.96  14.97 372.74  18.30 410.60  16.18 312.75  32.69 126.69  60.12 51.40
pgm-12-12 halton     32  22.59 66.32  10.21 134.22  6.04 203.28  5.54 263.53  6.38 311.53  7.58 345.18  8.83 372.07
pgm-12-12 halton     64  16.19 79.26  6.67 151.44  4.56 218.98  4.98 276.16  6.47 322.53  7.95 352.56  9.47 379.39
pgm-14-10 halton     32  25.42 62.11  11.57 128.22  6.60 196.56  5.55 253.76  6.00 301.66  7.04 334.29  8.16 365.56
pgm-14-10 halton     64  18.03 75.40  7.77 144.26  4.76 212.39  4.85 268.55  5.88 309.88  7.23 342.40  8.63 366.57
"""
IMAGENET = "imagenet --codec vq_ds8_c2i.pt --size 256"
# The paper's training, less its weight decay of 0.03, which ours has not.  PGM, Sec. 5.2
PAPER_PICTURES = {
    "steps": 500_000,
    "batch": 256,
    "learning_rate": 1e-4,
    "warmup": 2_500,
    "decay": "cosine",
    "initial": "released",
    "weights": "arccos",
}


def _imagenet() -> list[Recipe]:
    recipes = []
    for name, model, network in (
        ("maskgit", "maskgit", {"width": 1024, "layers": 24}),
        ("pgm-12-12", "pgm", _pgm(12, 12, width=1024)),
        ("pgm-14-10", "pgm", _pgm(14, 10, width=1024)),
    ):
        goals = []
        for row, order, steps, *figures in map(str.split, _IMAGENET_ROWS.strip().splitlines()):
            for i, value in enumerate(figures if row == name else []):
                figure = ("FID", "Inception Score")[i % 2]
                goals.append(Goal(figure, float(value), f"{order}, {steps} steps, w = {i // 2}"))
        recipes.append(
            Recipe(
                name=f"imagenet-{name}",
                prepare=IMAGENET,
                length=1025,
                network=network,
                train={"model": model, **PAPER_PICTURES},
                measure="imagenet:valid --steps 64 --guidance 0,1,2,3,4,5,6",
                goals=tuple(goals),
                source="PGM, Tab. 8 and 9 (the validation pictures)",
                hardware="several GPUs in the paper, 1.9 days",
            )
        )
    return recipes


# FID of 10,000 pictures in 32 steps, in confidence order unless it says otherwise.  docs/results.md
_CIFAR10_GOALS = {
    "codec": (Goal("PSNR", 29.8),),
    "pgm": (Goal("perplexity", 44.6), Goal("FID", 31.2, "w = 4")),
    "pgm-ordered": (Goal("perplexity", 47.3),),
    "maskgit": (Goal("perplexity", 46.8), Goal("FID", 29.3, "w = 4")),
    "small": (Goal("FID", 44.4, "Halton, w = 3"),),
}
_PICTURES64_GOALS = {
    "codec": (Goal("PSNR", 22.0),),
    "pgm": (Goal("perplexity", 179.5), Goal("FID", 54.2, "w = 8")),
    "maskgit": (Goal("perplexity", 199.2), Goal("FID", 57.4, "w = 8")),
}


def _cifar10() -> list[Recipe]:
    return _pictures(
        "cifar10",
        "cifar-10-batches-bin",
        size=32,
        codec={"factor": 2, "codes": 1024, "width": 64, "latent": 128},
        train_codec={"steps": 4_000, "batch": 256, "learning_rate": 5e-4},
        network={"width": 384, "layers": 12},
        rope={},
        train={"steps": 4_000, "learning_rate": 1e-3},
        goals=_CIFAR10_GOALS,
        ran="2026-11-15",
        hardware="one H200: codec 3 minutes, networks 10 minutes on a third of it",
    )


def _pictures64() -> list[Recipe]:
    """For any folder of classes; the goals are those of 40 classes of Tiny ImageNet."""
    return _pictures(
        "pictures64",
        "pictures64",
        size=64,
        codec={"factor": 4, "codes": 2048, "width": 64, "latent": 128},
        train_codec={"steps": 2_500, "batch": 128, "learning_rate": 3e-4},
        network={"width": 512, "layers": 12},
        rope={"rope": "2d"},
        train={"steps": 5_500, "learning_rate": 8e-4},
        goals=_PICTURES64_GOALS,
        ran="2026-11-16",
        hardware="one H200: codec 4 minutes, networks 13 minutes on half of it",
    )


def _pictures(
    data: str,
    images: str,
    *,
    size: int,
    codec: dict[str, Any],
    train_codec: dict[str, Any],
    network: dict[str, Any],
    rope: dict[str, Any],
    train: dict[str, Any],
    goals: dict[str, tuple[Goal, ...]],
    ran: str,
    hardware: str,
) -> list[Recipe]:
    """A codec with 256 tokens a picture, and networks of one size on them. rope: of the partition networks."""

    def row(name: str, **fields: Any) -> Recipe:
        known: dict[str, Any] = {"goals": goals[name], "ran": ran} if name in goals else {}
        source = "docs/results.md, one seed"
        return Recipe(name=f"{data}-{name}", length=257, source=source, hardware=hardware, **known, **fields)

    settings = {"weights": "arccos", "batch": 256, "warmup": 200, "decay": "cosine", **train}
    return [
        row("codec", command="train-codec", prepare=images, network=codec, train={"size": size, **train_codec}),
        *(
            row(
                name,
                prepare=f"{images} --codec runs/{data}-codec --size {size} --flips",
                network=network | more,
                train={"model": model, **settings},
                measure=f"{images}:train --steps 32 --order confidence --counts arccos-after-one --guidance 0,2,4,6,8",
            )
            for name, model, more in (
                ("pgm", "pgm", rope),
                ("pgm-ordered", "pgm", rope | {"context": "ordered"}),
                ("maskgit", "maskgit", {}),
                ("small", "pgm", rope | {"context": "ordered", "width": 256, "layers": 8}),  # to be shipped
            )
        ),
    ]


_ALL = [_paper(), _reviews(), _stories(), _imagenet(), _cifar10(), _pictures64()]
RECIPES = {recipe.name: recipe for recipes in _ALL for recipe in recipes}


def recipe(name: str, command: str = "train") -> Recipe:
    known = [recipe.name for recipe in RECIPES.values() if recipe.command == command]
    if name not in known:
        what = f"recipe {name!r} is for {RECIPES[name].command}" if name in RECIPES else f"unknown recipe {name!r}"
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{what}{hint}: expected one of {', '.join(known)}")
    return RECIPES[name]
