"""Recipes: every row of the paper's tables of perplexity and FID, and our own runs, which recipes.toml has.

A recipe names the figures it should reach and where they come from. One that we have not run says so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from maskless.paper import DATASETS, FID, NETWORKS, PERPLEXITY, SCORE, TABLES, Bound, Pictures, set_and_network


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
PAPER = {"batch": 512, "learning_rate": 3e-4, "decay": "constant", "weights": "bounded"}
RELEASED = {"warmup": 2_500, "initial": "released"}
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
            train={"model": model, "steps": 200_000 if name.endswith("-200k") else 1_000_000, **PAPER, **RELEASED},
            goals=(Goal(PERPLEXITY, line.paper),),
            source="PGM, Tab. 5 (paper's estimator)",
            hardware=f"{gpus} GPUs in the paper",
        )


# The paper's training, less its weight decay of 0.03, which ours has not.  PGM, Sec. 5.2
PICTURES = {"steps": 500_000, "learning_rate": 1e-4, "weights": "arccos", "batch": 256, "decay": "cosine"}
LINEAR = {"rope": "1d"}  # the paper's positions, where data of one's own has rows and columns


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
            train={"model": model, **PICTURES, **RELEASED},
            measure="imagenet:valid --steps 64 --guidance 0,1,2,3,4,5,6",
            goals=tuple(goals),
            source="PGM, Tab. 8 and 9 (the validation pictures)",
            hardware="several GPUs in the paper, 1.9 days",
        )


def _own(*groups: str) -> Iterator[Recipe]:
    """The runs of some groups of recipes.toml."""
    known = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))
    for group in (known[name] for name in groups):
        for name, run in group["runs"].items():
            own = {field: value for field, value in (group | run).items() if field != "runs"}
            own |= {field: group[field] | run.get(field, {}) for field in ("network", "train")}
            goals = tuple(Goal(*goal) for goal in run.get("goals", ()))
            yield Recipe(**own | {"name": name, "goals": goals, "source": "docs/results.md, one seed"})


def _all() -> Iterator[Recipe]:
    yield from _paper()
    yield from _own("reviews", "stories")
    yield from _imagenet()
    yield from _own("cifar10-codec", "cifar10", "pictures64-codec", "pictures64")


RECIPES = {recipe.name: recipe for recipe in _all()}


def recipe(name: str, command: str = "train") -> Recipe:
    known = [recipe.name for recipe in RECIPES.values() if recipe.command == command]
    if name not in known:
        what = f"recipe {name!r} is for {RECIPES[name].command}" if name in RECIPES else f"unknown recipe {name!r}"
        near = get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{what}{hint}: expected one of {', '.join(known)}")
    return RECIPES[name]
