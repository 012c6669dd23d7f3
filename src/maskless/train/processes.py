"""The processes that train together, and the accelerator that each of them has."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration, parse_flag_from_env

from maskless.train.config import MODELS, TrainConfig


def processes() -> PartialState:
    """The processes that a launcher started to train together; without an accelerator they are joined over gloo."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())


def accelerator_of(settings: TrainConfig, folder: Path) -> Accelerator:
    """Precision stays with `nn.autocast`, so Accelerate runs without mixed precision of its own."""
    sharding = None
    if settings.fsdp:
        named = {"partition": ["SelfBlock", "CrossBlock"], "maskgit": ["Block"]}
        blocks = named.get(MODELS[settings.model][0], ["SelfBlock"])
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=blocks
        )
    project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder))
    tracker = None if settings.tracker == "none" else settings.tracker
    if tracker and tracker not in map(str, get_available_trackers()):
        raise ValueError(f"tracker {tracker} is not installed: pip install {tracker}, or take another")
    return Accelerator(mixed_precision="no", log_with=tracker, project_config=project, fsdp_plugin=sharding)


def check_processes(settings: TrainConfig, state: PartialState) -> None:
    """Whether these processes can share out the work as the settings say."""
    world, pieces = state.num_processes, settings.accumulate
    if settings.batch % (world * pieces):
        raise ValueError(f"batch {settings.batch} does not split over {world} process(es) x {pieces} piece(s)")
    if settings.fsdp and state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise ValueError("fsdp shards over GPUs, with a process for each: start with torchrun or accelerate launch")
