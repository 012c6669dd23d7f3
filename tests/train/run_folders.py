"""Kinds of runs, runs that go to their end, and what is in their folders afterwards."""

import io
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from codec_runs import lines
from rich.console import Console

from maskless.train import state
from maskless.train.codec import CodecRun, read_pictures, train_codec
from maskless.train.codec_loop import CodecConfig
from maskless.train.folder import RunFolder
from maskless.train.run import Run, RunConfig, run


@dataclass(frozen=True)
class Kind:
    """How runs of a kind are configured, begun and ended, and where in their folders the model is."""

    configure: Callable[..., Any]  # of changed settings
    begin: Callable[[Path, Any], RunFolder]
    end: Callable[[Path, Any, Console], Any]
    model: str

    def complete(self, folder: Path, config: Any) -> Path:
        self.end(folder, config, Console(file=io.StringIO()))
        return folder

    def stop_after(self, folder: Path, config: Any, last: int) -> None:
        """Take steps up to `last`, saving as a run does, and drop everything that is only in memory."""
        this = self.begin(folder, config)
        for step in this:
            this.log(step)
            if step.step % this.settings.save_every == 0:
                this.save(step.step)
            if step.step == last:
                break

    def weights(self, folder: Path) -> bytes:
        return weights(folder, self.model)


def network_runs(configure: Callable[..., RunConfig]) -> Kind:
    return Kind(configure, Run, run, "model")


def codec_runs(configure: Callable[..., CodecConfig]) -> Kind:
    def begin(folder: Path, config: CodecConfig) -> CodecRun:
        return CodecRun(folder, config, *read_pictures(config, Console(quiet=True)))

    return Kind(configure, begin, train_codec, "codec")


@contextmanager
def spoiled_gradients(*steps: int, by: float = math.nan) -> Iterator[None]:
    """After so many backward passes of a run the gradients are no numbers, or larger; the loss of that step is one."""
    opened = RunFolder.open

    def spoil(this: RunFolder, config: Any) -> None:
        opened(this, config)
        passes = itertools.count(1 + this.start)
        next(this.network.parameters()).register_hook(lambda g: g * by if next(passes) in steps else g)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "open", spoil)
        yield


def complete(folder: Path, config: RunConfig) -> Path:
    run(folder, config, Console(file=io.StringIO()))
    return folder


def weights(folder: Path, model: str = "model") -> bytes:
    return (folder / model / "model.safetensors").read_bytes()


def trained(folder: Path) -> list[dict]:
    """The lines of losses."""
    return [line for line in lines(folder) if "loss" in line]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def kept(folder: Path) -> list[str]:
    return [path.name for path in state.saved(folder / "states")]


def newest(folder: Path) -> dict:
    return torch.load(state.saved(folder / "states")[-1], weights_only=True)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".")]
