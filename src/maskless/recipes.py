"""Recipes: every row of the paper's tables of perplexity and FID, and our own runs, as recipes.toml has them.

A recipe names the figures it should reach and where they come from. One that we have not run says so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from maskless.paper import FID, NETWORKS, PERPLEXITY, SCORE, TABLES, Pictures, set_and_network


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


def _of_the_paper(data: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs of the paper on a set: their networks, and the figures that its tables give for them."""
    lines = [line for name in ("table-5", "table-8", "table-9") for line in TABLES[name].lines]
    for name in dict.fromkeys(line.work.recipe for line in lines):
        own, key = set_and_network(name)
        if own != data:
            continue
        model, network = NETWORKS[key]
        if model == "pgm" and data == "imagenet":
            network = network | {"rope": "1d"}  # the paper's positions, where data of one's own has rows and columns
        goals = [
            (line.measure, line.paper, f"{w.order}, {w.steps} steps, w = {line.at}" if isinstance(w, Pictures) else "")
            for line in lines
            if (w := line.work).recipe == name and line.measure in (PERPLEXITY, FID, SCORE)
        ]
        train = {"model": model} | ({"steps": 200_000} if name.endswith("-200k") else {})
        yield name, {"network": network, "train": train, "goals": goals}


def _all() -> Iterator[Recipe]:
    """The runs of each group of recipes.toml; where it names none, they are the paper's."""
    known = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))
    for group, shared in known.items():
        runs = shared.pop("runs", None) or dict(_of_the_paper(group))
        for name, run in runs.items():
            both = {field: shared.get(field, {}) | run.get(field, {}) for field in ("network", "train")}
            goals = tuple(Goal(*goal) for goal in run.get("goals", ()))
            yield Recipe(
                **{"source": "docs/results.md, one seed"} | shared | run | both | {"name": name, "goals": goals}
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
