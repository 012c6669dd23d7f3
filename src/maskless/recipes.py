"""Recipes: every row of the paper's tables of perplexity and FID, and our own runs, as values that a command takes.

A recipe names the figures it should reach and where they come from. One that we have not run says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from maskless.paper.line import DATASETS, FID, NETWORKS, PERPLEXITY, SCORE, Bound, Pictures, set_and_network
from maskless.paper.tables import TABLES


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


# The paper's training, but for the weights: the released ones have no bound (official releases used them).
_RELEASED = {"warmup": 2_500, "initial": "released"}
PAPER = {"batch": 512, "learning_rate": 3e-4, "decay": "constant", "weights": "bounded", **_RELEASED}
PREPARED = {  # and on how many GPUs the paper trains
    "lm1b": ("lm1b --tokenizer bert --length 128 --layout padded", 8),
    "owt": ("openwebtext --tokenizer gpt2 --length 1024 --layout wrapped", 16),
}


def _paper() -> Iterator[Recipe]:
    for line in TABLES["table-5"].lines:
        assert isinstance(line.work, Bound)
        assert line.paper is not None
        name = line.work.recipe
        data, key = set_and_network(name)
        (model, network), (prepare, gpus) = NETWORKS[key], PREPARED[data]
        yield Recipe(
            name=name,
            prepare=prepare,
            length=DATASETS[data].length,
            network=network,
            train={"model": model, "steps": 200_000 if name.endswith("-200k") else 1_000_000, **PAPER},
            goals=(Goal(PERPLEXITY, line.paper),),
            source="PGM, Tab. 5 (paper's estimator)",
            hardware=f"{gpus} GPUs in the paper",
        )


# The paper's training, less its weight decay of 0.03, which ours has not.  PGM, Sec. 5.2
_PICTURES = {"weights": "arccos", "batch": 256, "decay": "cosine"}
LINEAR = {"rope": "1d"}  # the paper's positions, where data of one's own has rows and columns
PAPER_PICTURES = {"steps": 500_000, "learning_rate": 1e-4, **_PICTURES, **_RELEASED}


def _imagenet() -> Iterator[Recipe]:
    lines = [line for name in ("table-8", "table-9") for line in TABLES[name].lines if line.measure in (FID, SCORE)]
    for name in ("imagenet-maskgit", "imagenet-pgm-12-12", "imagenet-pgm-14-10"):
        model, network = NETWORKS[set_and_network(name)[1]]
        network = network | (LINEAR if model == "pgm" else {})
        goals = [
            Goal(line.measure, line.paper, f"{line.work.order}, {line.work.steps} steps, w = {line.at}")
            for line in lines
            if isinstance(line.work, Pictures) and line.work.recipe == name and line.paper is not None
        ]
        yield Recipe(
            name=name,
            prepare="imagenet --codec vq_ds8_c2i.pt --size 256",
            length=1 + DATASETS["imagenet"].length,
            network=network,
            train={"model": model, **PAPER_PICTURES},
            measure="imagenet:valid --steps 64 --guidance 0,1,2,3,4,5,6",
            goals=tuple(goals),
            source="PGM, Tab. 8 and 9 (the validation pictures)",
            hardware="several GPUs in the paper, 1.9 days",
        )


OWN = "docs/results.md, one seed"
# name, model, more of the network and of the training, perplexity (None: not run).  docs/results.md
Rows = list[tuple[str, str, dict[str, Any], dict[str, Any], float | None]]
REVIEWS = "imdb.jsonl.xz --vocab 8192 --length 256"
SHORT = {"batch": 256, "steps": 1_500, "warmup": 100, "learning_rate": 1e-3, "decay": "constant"}
_SPLIT = {"objective": "partition"}
_REVIEWS_ROWS: Rows = [
    ("reviews-mdlm", "mdlm", {}, {}, 124.4),
    ("reviews-mdlm-complementary", "mdlm-complementary", {}, {}, 91.4),
    ("reviews-pgm", "pgm", {}, _SPLIT, 84.7),
    ("reviews-pgm-unbounded", "pgm", {}, _SPLIT | {"weights": "released"}, 86.9),
    ("reviews-pgm-exact", "pgm", {}, _SPLIT | {"weights": "exact"}, 83.7),
    ("reviews-pgm-ordered", "pgm", {"context": "ordered"}, _SPLIT, 88.2),
]
# Models that are shipped: 13.7 MiB in half precision. A row is a whole story, then the end-of-text token up to its end,
# so that the model knows where stories end. What stands at a position depends on it, and the released GroupSwap cannot
# tell positions apart while only the first token is known: every text would begin with a blind draw. So: gated.
# The stories are those that tools/stories.py sampled from stories15M.
STORIES = "stories.jsonl --vocab 4096 --length 256 --layout padded --valid 0.01"
SHIPPED = {"batch": 256, "steps": 36_000, "learning_rate": 1.5e-3, "warmup": 500, "decay": "cosine", "ema": 0.999}
_CHAIN = {"objective": "chain", "orders": "left=20,strands=45,gaps=25,random=10"}
_STORIES_ROWS: Rows = [
    ("stories", "pgm", {"context": "ordered", "swap": "gated"}, _CHAIN, 3.016),
    ("stories-mdlm", "mdlm", {}, {}, 2.460),
    ("stories-ar", "ar", {}, {}, 1.781),
]


def _texts(rows: Rows, prepare: str, network: dict[str, Any], train: dict[str, Any], hardware: str) -> Iterator[Recipe]:
    for name, model, sizes, training, perplexity in rows:
        yield Recipe(
            name=name,
            prepare=prepare,
            length=256,
            network=network | sizes,
            train={"model": model, **train, **training},
            goals=(Goal(PERPLEXITY, perplexity),) if perplexity else (),
            ran="2026-11-15" if perplexity else Recipe.ran,
            source=OWN,
            hardware=hardware,
        )


def _pictures(
    data: str,
    images: str,
    *,
    codec: dict[str, Any],
    train_codec: dict[str, Any],
    network: dict[str, Any],
    rope: dict[str, Any],
    train: dict[str, Any],
    goals: dict[str, tuple[Goal, ...]],
    **about: str,
) -> Iterator[Recipe]:
    """A codec with 256 tokens a picture, and networks of one size on them. rope: of the partition networks."""

    def row(name: str, **fields: Any) -> Recipe:
        known: dict[str, Any] = {"goals": goals[name], **about} if name in goals else about | {"ran": Recipe.ran}
        return Recipe(name=f"{data}-{name}", length=257, source=OWN, **known, **fields)

    yield row("codec", command="train-codec", prepare=images, network=codec, train=train_codec)
    small = {"context": "ordered", "width": 256, "layers": 8}  # to be shipped
    for name, model, more in (
        ("pgm", "pgm", rope),
        ("pgm-ordered", "pgm", rope | {"context": "ordered"}),
        ("maskgit", "maskgit", {}),
        ("small", "pgm", rope | small),
    ):
        yield row(
            name,
            prepare=f"{images} --codec runs/{data}-codec --size {train_codec['size']} --flips",
            network=network | more,
            train={"model": model, "warmup": 200, **_PICTURES, **train},
            measure=f"{images}:train --steps 32 --order confidence --counts arccos-after-one --guidance 0,2,4,6,8",
        )


def _all() -> Iterator[Recipe]:
    """Goals of pictures are FIDs of 10,000 in 32 steps, in confidence order unless they say otherwise."""
    yield from _paper()
    reviews = {"width": 512, "layers": 12}
    yield from _texts(_REVIEWS_ROWS, REVIEWS, reviews, SHORT, "one H200, 2 to 3 minutes")
    stories = {"width": 256, "layers": 6, "dropout": 0.0}
    yield from _texts(_STORIES_ROWS, STORIES, stories, SHIPPED, "one H200, 22 minutes on a third of it")
    yield from _imagenet()
    yield from _pictures(
        "cifar10",
        "cifar-10-batches-bin",
        codec={"factor": 2, "codes": 1024, "width": 64, "latent": 128},
        train_codec={"size": 32, "steps": 4_000, "batch": 256, "learning_rate": 5e-4},
        network={"width": 384, "layers": 12},
        rope=LINEAR,
        train={"steps": 4_000, "learning_rate": 1e-3},
        goals={
            "codec": (Goal("PSNR", 29.8),),
            "pgm": (Goal(PERPLEXITY, 44.6), Goal(FID, 31.2, "w = 4")),
            "pgm-ordered": (Goal(PERPLEXITY, 47.3),),
            "maskgit": (Goal(PERPLEXITY, 46.8), Goal(FID, 29.3, "w = 4")),
            "small": (Goal(FID, 44.4, "Halton, w = 3"),),
        },
        ran="2026-11-15",
        hardware="one H200: codec 3 minutes, networks 10 minutes on a third of it",
    )
    yield from _pictures(  # for any folder of classes; the goals are those of 40 classes of Tiny ImageNet
        "pictures64",
        "pictures64",
        codec={"factor": 4, "codes": 2048, "width": 64, "latent": 128},
        train_codec={"size": 64, "steps": 2_500, "batch": 128, "learning_rate": 3e-4},
        network={"width": 512, "layers": 12},
        rope={"rope": "2d"},
        train={"steps": 5_500, "learning_rate": 8e-4},
        goals={
            "codec": (Goal("PSNR", 22.0),),
            "pgm": (Goal(PERPLEXITY, 179.5), Goal(FID, 54.2, "w = 8")),
            "maskgit": (Goal(PERPLEXITY, 199.2), Goal(FID, 57.4, "w = 8")),
        },
        ran="2026-11-16",
        hardware="one H200: codec 4 minutes, networks 13 minutes on half of it",
    )


RECIPES = {recipe.name: recipe for recipe in _all()}


def recipe(name: str, command: str = "train") -> Recipe:
    known = [recipe.name for recipe in RECIPES.values() if recipe.command == command]
    if name not in known:
        what = f"recipe {name!r} is for {RECIPES[name].command}" if name in RECIPES else f"unknown recipe {name!r}"
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{what}{hint}: expected one of {', '.join(known)}")
    return RECIPES[name]
