"""Training states on disk: each appears whole, the last few are kept, the newest resumes the run.

A state is one file; of a sharded run a folder (sharded.py), with what is no tensor in its about.json.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maskless.files import write_aside
from maskless.train.interruption import StoppedError

ABOUT = "about.json"
NOT_FINITE = "it holds weights that are no finite numbers"
DIVERGED = "try a lower learning rate, in another --out"  # where a number is none any more
# What reading a file that is damaged, or of another run, may raise.
UNREADABLE = (RuntimeError, KeyError, EOFError, ValueError, OSError, pickle.UnpicklingError)


def save(folder: Path, state: dict[str, Any], keep: int) -> None:
    """Write a state under the name of its step, then forget all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_aside(named(folder, state["step"]).with_suffix(".pt"), lambda path: dump(state, path))
    forget(folder, keep)


def named(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def forget(folder: Path, keep: int) -> None:
    """Remove all states but the newest."""
    for old in saved(folder)[:-keep]:
        if old.is_dir():
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.part")))  # a kill leaves no half of a state
        else:
            old.unlink()


def load(folder: Path, restore: Callable[[dict[str, Any]], None]) -> tuple[int, float, float]:
    """Let `restore` put the newest state in place; its step, the seconds of training and those in all, or zeros.

    Of a sharded one it gets the folder, as `shards`.
    """
    states = saved(folder)
    if not states:
        return 0, 0.0, 0.0
    try:
        state = _read(states[-1])
        restore(state)
        return state["step"], state["seconds"], state.get("wall_seconds", state["seconds"])
    except UNREADABLE as error:
        raise unreadable(states, error) from None


def reached(folder: Path) -> tuple[int, float]:
    """The step of the newest state and the wall time until then, in seconds, without reading its tensors; or zeros."""
    try:
        state = _read(saved(folder)[-1], mmap=True)
        return state["step"], state.get("wall_seconds", state["seconds"])
    except (IndexError, *UNREADABLE):  # whoever restores it will say what is wrong
        return 0, 0.0


def _read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    if path.is_dir():
        return {**json.loads((path / ABOUT).read_text()), "shards": path}
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    return state


def saved(folder: Path) -> list[Path]:
    """The states in a folder, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def unreadable(states: list[Path], error: Exception) -> ValueError:
    """What to say of the newest of some states, from which a run cannot go on."""
    broken = isinstance(error, pickle.UnpicklingError)  # torch then advises to read the file unsafely
    reason = "torch cannot read it" if broken else (str(error).splitlines() or [repr(error)])[0]
    older = f"; without it the run goes on from {states[-2].name}" if len(states) > 1 else ""
    return ValueError(f"{states[-1]} does not fit this run or is damaged: {reason}{older}")


def finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all numbers of some tensors, or of this process's shards of them, are finite.  -> () bool"""
    local = (value.to_local() if hasattr(value, "to_local") else value for value in tensors)
    return torch.stack([value.detach().isfinite().all() for value in local]).all()


def check_numbers(tensors: Iterable[Tensor]) -> None:
    """Raise a ValueError if a state that was read holds what is no number."""
    if not finite(tensors):
        raise ValueError(NOT_FINITE)


def diverged(said: str, step: int, folder: Path) -> ValueError:
    """What to say of a run whose numbers are none any more; folder: its states, all of them from before."""
    states = saved(folder)
    if not states:
        return ValueError(f"{said} at step {step}: {DIVERGED}")
    way_back = f"--resume goes on from {states[-1].name}; if it ends here again, "
    return StoppedError(f"{said} at step {step}: {way_back}{DIVERGED}")


def check_end(folder: Path, steps: int) -> None:
    """Raise a ValueError about an end that the states of a run in this folder have passed."""
    reached = max((int(path.stem.removeprefix("step-")) for path in saved(folder / "states")), default=0)
    if steps < reached:
        raise ValueError(f"steps {steps}: {folder} is at step {reached:,} already")


def dump(state: dict[str, Any], path: Path) -> None:
    """torch.save, where a full disk is the system's OSError, and Ctrl-C itself, rather than a complaint about both."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise


def whole(value: Tensor) -> Tensor:
    """A tensor that may be sharded over processes, in one piece."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
