"""What tests of the engine share: an engine that captures without a GPU, and steps as plain numbers."""

from typing import Any

import pytest
from torch import nn

from maskless.drafts import Step
from maskless.engine import Engine
from maskless.engine import run as run_module


class EveryStep:
    """In place of captured graphs: each step is computed, on the buffers that graphs would use."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []

    def play(self, shape, launch):
        self.shapes.append(shape)
        launch(shape)


def capturing(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that takes its steps by the shapes that it would capture."""
    monkeypatch.setattr(run_module, "Graphs", EveryStep)
    engine = Engine(network)
    engine.graphs = True
    return engine


def pairs(steps: list[Step]) -> list[tuple]:
    return [(s.number, s.rows.tolist(), s.positions.tolist(), s.tokens.tolist()) for s in steps]
