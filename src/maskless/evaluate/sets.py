"""Sets of pictures to be measured: real ones out of files, and those that a model draws; each process has its share.

Shapes: n pictures of a batch, H x W pixels, C channels.
"""

from __future__ import annotations

import itertools
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from maskless.checkpoint import Model
from maskless.data.image_tokens import holds_images
from maskless.data.images import Broken, Images, read_images
from maskless.data.split import VALID
from maskless.draw import Guidance
from maskless.evaluate.images import CHUNKS, SeenImages, Statistics, look, short
from maskless.evaluate.inception import Features
from maskless.evaluate.sweep import Sample
from maskless.how import How
from maskless.images import class_ids, codec_of, draw, grid_of, pixels_of
from maskless.plans import check_steps
from maskless.terminal import plain

SIDES = ("train", "valid")


@dataclass(frozen=True)
class Real:
    """Pictures of files, all of them or one side; or only what was kept of them, their statistics.

    valid: the share that is the valid side, unless the data has its own.
    """

    name: str
    images: Images | None = None
    split: str | None = None
    statistics: Statistics | None = None
    valid: float = VALID

    @property
    def count(self) -> int:
        """How many pictures this process has to look at."""
        state = PartialState()
        total = 0 if self.images is None else self.images.count(self.split, self.valid)
        return len(range(state.process_index, total, state.num_processes))

    def batches(
        self, size: int, *, channels: int = 3, batch: int = 256, on_broken: Broken | None = None
    ) -> Iterator[Tensor]:
        """This process's share, every so many-th picture, as squares of bytes.  (n, size, size, C)"""
        assert self.images is not None
        state = PartialState()
        how: dict[str, Any] = {"split": self.split, "valid": self.valid, "channels": channels, "on_broken": on_broken}
        found = self.images.pictures(size, share=(state.process_index, state.num_processes), **how)
        squares = (square for square, _, _ in found)
        while some := list(itertools.islice(squares, batch)):
            yield torch.from_numpy(np.stack(some))

    def seen(
        self, network: Features, size: int, *, channels: int = 3, on_batch: Callable[[int], None] | None = None
    ) -> SeenImages:
        """What a network sees in them, the features kept for precision and recall; or the statistics of a file.

        Broken pictures are left out, and the main process says on stderr how many.
        """
        if self.statistics is None:
            broken: list[str] = []
            batches = self.batches(size, channels=channels, on_broken=broken.append)
            seen = look(batches, network, keep=True, on_batch=on_batch)
            every = gather_object(broken)  # of all processes
            if every and PartialState().is_main_process:
                print(plain(f"{self.name}: {len(every):,} broken pictures left out ({every[0]} ...)"), file=sys.stderr)
            return seen
        if self.statistics.network != network.sha256:
            own, other = short(self.statistics.network), short(network.sha256)
            raise ValueError(f"{self.name} holds statistics of another network ({own}) than {network.name} ({other})")
        return SeenImages(self.statistics)


def real(given: str, valid: float | None = None) -> Real:
    """Pictures by their place: PATH, PATH:train, PATH:valid, hf:NAME, or an .npz file that holds statistics.

    valid: the share that was held out when they were prepared (VALID), for a side of data that holds out none itself.
    """
    path, _, side = given.rpartition(":")
    place, split = (path, side) if path and side in SIDES and not given.startswith("hf:") else (given, None)
    if holds_images(place):
        raise ValueError(f"{place} holds tokens, not pictures: name the pictures that it was prepared from")
    if _holds_statistics(Path(place)):
        return Real(given, statistics=Statistics.load(Path(place)))
    images = read_images([place])
    found = Real(given, images=images, split=split, valid=VALID if valid is None else valid)
    count = images.count(split, found.valid)
    if count < CHUNKS:
        raise ValueError(f"{given} has {count} pictures: expected {CHUNKS} or more")
    return found


def check_share(valid: float | None, *found: Real) -> None:
    """Raise a ValueError about a share held out that concerns none of some sets."""
    parted = [one for one in found if one.images is not None and one.split and "valid" not in one.images.counts]
    if valid is not None and not parted:
        names = ", ".join(one.name for one in found)
        raise ValueError(
            f"--valid {valid} is for PATH:train or PATH:valid where the data has no split, not for {names}"
        )


def drawn(model: Model, samples: int, batch: int, **how: Any) -> Sample:
    """What draws this process's share of so many pictures, of classes in turn, with a guidance.

    how: keywords of `How`. Picture i is the same for any batch and any number of processes.
    """
    for name, value, least in (("samples", samples, CHUNKS), ("batch", batch, 1)):
        if value < least:
            raise ValueError(f"{name} {value} is out of range: expected {least} or more")
    ids, state = class_ids(model, None, samples), PartialState()
    numbers = torch.arange(samples)[state.process_index :: state.num_processes]

    def sample(guidance: float) -> Iterator[Tensor]:
        settings = How(**how, guidance=guidance)
        for some in numbers.split(batch) if len(numbers) else []:
            yield pixels_of(draw(model, ids[some], some, settings))

    return sample


def check_drawing(model: Model, guidances: list[float], **how: Any) -> None:
    """Raise a ValueError about what cannot be drawn, before anything is computed."""
    settings, (h, w) = How(**how), grid_of(model)
    codec_of(model)
    if settings.steps is not None:
        check_steps(settings.steps, h * w)
    for guidance in guidances:
        Guidance(weight=guidance, dropped=model.config.classes)


def _holds_statistics(path: Path) -> bool:
    if path.suffix != ".npz" or not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"n.npy", "mean.npy", "scatter.npy"} <= set(archive.namelist())
