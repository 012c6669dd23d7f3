"""The processes that train together, and the accelerator that each of them has."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, ParallelismConfig, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, parse_flag_from_env
from torch.distributed.fsdp import MixedPrecisionPolicy

from maskless.train.config import MODELS, TrainConfig
from maskless.train.interruption import StoppedError

PATIENCE = timedelta(minutes=10)  # with a process that does not come to a step; torch's own with GPUs is as long
LONGER = timedelta(seconds=30)  # so much, with the first process: it has to say who did not come
# Sharded weights are gathered in the type of products, gradients are reduced in float32. Inputs stay as they are:
# bfloat16 would not do for rotary tables.
GATHERED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def processes() -> PartialState:
    """The processes that a launcher started to train together; without an accelerator they are joined over gloo."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())


def accelerator_of(settings: TrainConfig, folder: Path) -> Accelerator:
    """Precision stays with `nn.autocast`, so Accelerate runs without mixed precision of its own."""
    sharding, mesh = None, None
    if settings.fsdp:
        named = {"partition": ["SelfBlock", "CrossBlock"], "maskgit": ["Block"]}
        blocks = named.get(MODELS[settings.model][0], ["SelfBlock"])
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=blocks,
            mixed_precision_policy=GATHERED if torch.accelerator.is_available() else None,
        )
        shard = settings.shard_size or processes().num_processes
        if 1 < shard < processes().num_processes:
            mesh = ParallelismConfig(dp_replicate_size=processes().num_processes // shard, dp_shard_size=shard)
    project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder))
    tracker = None if settings.tracker == "none" else settings.tracker
    if tracker and tracker not in map(str, get_available_trackers()):
        raise ValueError(f"tracker {tracker} is not installed: pip install {tracker}, or take another")
    return Accelerator(
        mixed_precision="no",
        log_with=tracker,
        project_config=project,
        fsdp_plugin=sharding,
        parallelism_config=mesh,
    )


def check_processes(settings: TrainConfig, state: PartialState) -> None:
    """Whether these processes can share out the work as the settings say."""
    world, pieces = state.num_processes, settings.accumulate
    if settings.batch % (world * pieces):
        raise ValueError(f"batch {settings.batch} does not split over {world} process(es) x {pieces} piece(s)")
    if world % (settings.shard_size or 1):
        raise ValueError(f"shard_size {settings.shard_size} of {world} processes: expected a number that divides them")
    if settings.fsdp and state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise ValueError("fsdp shards over GPUs, with a process for each: start with torchrun or accelerate launch")


class Meeting:
    """Where all processes meet before each step: one that hangs, or has ended, is named in a line."""

    def __init__(self, processes: int):
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE + LONGER) if processes > 1 else None

    def __call__(self, step: int) -> None:
        if self.group is None:
            return
        begun = time.monotonic()
        try:
            dist.monitored_barrier(self.group, PATIENCE, wait_all_ranks=True)
        except RuntimeError as error:
            waited, named = time.monotonic() - begun, re.search(r"Ranks ([\d, ]+) failed", str(error))
            if named is None and waited < PATIENCE.total_seconds() + 1:
                raise StoppedError(f"a process did not come to step {step + 1:,}: process 0 says which") from None
            who = "0" if named is None else named[1]
            raise StoppedError(
                f"process {who} did not come to step {step + 1:,} in {waited:,.0f} seconds: it hangs or has ended"
            ) from None
