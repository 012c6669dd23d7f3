"""Models that come with the package: a folder of each in models/, found by its name and read offline."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

FOLDER = Path(__file__).parent / "models"
CARD = "CARD.md"
KINDS = {"partition": "pgm", "masked": "mdlm", "causal": "ar"}  # of networks, as `--model` names them


@dataclass(frozen=True)
class Shipped:
    """What is known of a model without loading it."""

    name: str
    kind: str  # pgm, mdlm, ar, maskgit
    parameters: int  # a codec's included
    bytes: int  # on disk
    about: str  # the first sentence of its card


def names() -> list[str]:
    """The models there are."""
    return sorted(path.parent.name for path in FOLDER.glob("[!.]*/config.json"))


def find(name: str) -> Path | None:
    """The folder of a model, or None where no such model is shipped."""
    return FOLDER / name if name in names() else None


def nearest(name: str) -> str:
    """A hint for a name that is almost one of a shipped model, or nothing."""
    close = difflib.get_close_matches(name, names(), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def card(name: str) -> str:
    """What is said about a model: data, licence, training, limits and figures."""
    folder = find(name)
    if folder is None:
        known = ", ".join(names()) or "none is shipped with this version"
        raise ValueError(f"unknown model {name!r}: expected one of those shipped ({known})")
    path = folder / CARD
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def describe(name: str) -> Shipped:
    """A line of the list of models."""
    text = card(name)
    folder = FOLDER / name
    config = json.loads((folder / "config.json").read_text())
    lines = (line.strip() for line in text.splitlines())
    about = next((line for line in lines if line and not line.startswith(("#", "<!--"))), "")
    parameters = sum(_parameters(path) for path in folder.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Shipped(name, _kind(config), parameters, size, about)


def _kind(config: dict[str, Any]) -> str:
    """The model as `--model` names it, and what sets it apart."""
    kind = KINDS.get(config["kind"], config["kind"])
    if "orders" in config:
        return f"{kind}, chain"
    return f"{kind}, ordered" if config["network"].get("context") == "ordered" else str(kind)


def _parameters(path: Path) -> int:
    with safe_open(path, framework="numpy") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
