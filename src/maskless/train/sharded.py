"""States of sharded runs: every process writes its own shards while steps go on, and any number of them reads it.

torch.distributed.checkpoint does both, in files of safetensors. A state is written beside its place and renamed when
all processes are done with it, so a kill or a full disk leaves the states before it as they are.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from maskless.ema import EMA
from maskless.files import put_folder
from maskless.train import state

FILES = "*.safetensors"


class Writer(HuggingFaceStorageWriter):
    """Writes a state beside its place, and puts it there in the end."""

    def __init__(self, target: Path, about: dict[str, Any], keep: int):
        super().__init__(str(target.with_name(f".{target.name}.part")), save_distributed=True)
        self.target, self.about, self.keep = target, about, keep

    def finish(self, metadata: object, results: object) -> None:
        """In the first process, when the shards of all are on the disk."""
        aside = Path(self.path)
        about = self.about | {"files": len([*aside.glob(FILES)])}
        (aside / state.ABOUT).write_text(json.dumps(about))
        put_folder(aside, self.target)
        state.forget(self.target.parent, self.keep)


class Sharded:
    """A sharded network with its optimiser and its averages, and the state of them that is being written."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA):
        self.network, self.optimizer, self.ema = network, optimizer, ema
        self.group = dist.new_group(backend="gloo")  # its own: steps use the other one at the same time
        self.writing: tuple[Writer, Future[Any]] | None = None

    def tensors(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a state holds, as this process has it: weights, moments, averages by name. And all of the optimiser."""
        weights, optimizer = get_state_dict(self.network, self.optimizer)
        names = [name for name, _ in self.network.named_parameters()]
        averages = dict(zip(names, self.ema.averages, strict=True))
        return {"weights": weights, "moments": optimizer["state"], "averages": averages}, optimizer

    def save(self, folder: Path, about: dict[str, Any], keep: int) -> None:
        """Copy all tensors and begin to write them; about: what stands beside them, the step for one."""
        self.wait()
        writer = Writer(state.named(folder, about["step"]), about, keep)
        saved = async_save(self.tensors()[0], storage_writer=writer, process_group=self.group)
        assert isinstance(saved, Future)  # since the writer copies what it is given
        self.writing = writer, saved

    def wait(self) -> None:
        """Until the state that was begun is on the disk; what went wrong in one process is raised in all."""
        if self.writing is not None:
            (writer, saved), self.writing = self.writing, None
            try:
                saved.result()
            except CheckpointException as error:
                shutil.rmtree(writer.path, ignore_errors=True)
                raise _first(error) from None

    def load(self, folder: Path, files: int) -> None:
        """Put a state of so many files in place, whatever the number of processes now."""
        found = [*folder.glob(FILES)]
        if len(found) != files:  # torch would leave out what is not there
            raise ValueError(f"it has {len(found)} of {files} files")
        try:
            for file in found:
                with safe_open(file, "pt"):  # checks its length
                    pass
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        held, optimizer = self.tensors()
        try:
            load(held, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=self.group)
        except CheckpointException as error:
            raise ValueError(str(_first(error))) from None
        weights = held["weights"]
        set_state_dict(self.network, self.optimizer, model_state_dict=weights, optim_state_dict=optimizer)
        finite = state.finite([*weights.values(), *self.ema.averages]).int().cpu()
        dist.all_reduce(finite, dist.ReduceOp.MIN, self.group)
        if not finite:
            raise ValueError(state.NOT_FINITE)


def _first(error: CheckpointException) -> BaseException:
    """What went wrong in the first of the processes where something did."""
    return error.failures[min(error.failures)][0]
