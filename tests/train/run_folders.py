"""A run that goes to its end, and what is in its folder afterwards."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console

from maskless.train import state
from maskless.train.run import RunConfig, run


def complete(folder: Path, config: RunConfig) -> Path:
    run(folder, config, Console(file=io.StringIO()))
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def newest(folder: Path) -> dict:
    return torch.load(state.saved(folder / "states")[-1], weights_only=True)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".")]
