"""What two processes find out together, written to a file by the first of them. Started twice by test_processes.py.

together.py agree OUT RUN...   shares the clock and the evaluation of runs
together.py shard OUT RUN...   trains, saves, evaluates and samples with sharded weights
together.py half OUT RUN...    the same with products and gathered weights in bfloat16, as on a GPU
together.py train RUN          resumes a run as the command does, also one with sharded weights
together.py hang RUN PROCESS   the same, but that a process gets no data for its third step
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.distributed.tensor import DTensor

from maskless.cli import main
from maskless.data.tokens import open_tokens
from maskless.evaluate.likelihood import likelihood
from maskless.nn import calls
from maskless.nn.blocks import SelfBlock
from maskless.nn.causal import CausalConfig, CausalTransformer
from maskless.train import loop
from maskless.train import processes as own
from maskless.train.processes import processes
from maskless.train.run import Run, RunConfig
from maskless.train.sharded import Writer


def same_everywhere(this: Run, values: Tensor) -> bool:
    mine, first = (this.accelerator.gather(values[None])[i] for i in (processes().process_index, 0))
    return mine.equal(values) and first.equal(values)


def agree(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Train against clocks that differ."""
    minutes = 10  # so long that what the steps really take is next to nothing
    timed = dataclasses.replace(config.train, minutes=minutes, steps=10_000, decay="cosine")
    this = Run(folder, dataclasses.replace(config, train=timed))
    this.clock.made -= (
        60 * minutes * (0.2 + 0.4 * processes().process_index)
    )  # one process thinks that much more is over
    seen = []
    for step in this:
        this.clock.made -= 60 * minutes / 10
        seen.append([step.step, step.rate, step.share])
    weights = torch.cat([p.detach().flatten() for p in this.network.parameters()])
    return {
        "processes": processes().num_processes,
        "steps": seen,
        "agreed": same_everywhere(this, torch.tensor(seen, dtype=torch.float64)) and same_everywhere(this, weights),
        "bounds": bounds(config),
    }


def bounds(config: RunConfig) -> dict[str, dict[str, float]]:
    """Of a causal network, whose bound is exact, on numbers of sequences that do not split evenly."""
    torch.manual_seed(0)
    network = CausalTransformer(CausalConfig(vocab=300, length=16, width=16, heads=2, layers=1)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    rows = open_tokens(config.data).split("valid")
    return {str(n): dataclasses.asdict(likelihood(network, rows, sequences=n, batch=2)) for n in (1, 3, 5, 8)}


def slowly(write: Callable[..., None]) -> Callable[..., None]:
    """As on a slow disk: others are at the next run before the first process has written the state of this one."""

    def wrote(*given: Any, **named: Any) -> None:
        time.sleep(0.5)
        write(*given, **named)

    return wrote


def allow_sharding() -> None:
    """Accelerate shards over accelerators alone; told that these processes have one, it shards on the CPU as well."""
    processes()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    AcceleratorState._reset_state()


def halve() -> None:
    """Compute as on a GPU: products in bfloat16, for which sharded weights are gathered so too."""
    for module in (loop, calls, sys.modules[likelihood.__module__]):
        module.autocast = lambda device: torch.autocast(device.type, dtype=torch.bfloat16)
    plugin, gathered = own.FullyShardedDataParallelPlugin, {"mixed_precision_policy": own.GATHERED}
    own.FullyShardedDataParallelPlugin = lambda **given: plugin(**given | gathered)
    # Under autocast on CUDA a layer norm takes weights of any type.
    torch.nn.LayerNorm.forward = lambda this, x: F.layer_norm(
        x, this.normalized_shape, this.weight.to(x.dtype), this.bias.to(x.dtype), this.eps
    )


def hang(process: int) -> None:
    """Let a process wait for its third step, and the others for it, but not for long."""
    own.PATIENCE = own.LONGER = timedelta(seconds=5)
    tasks_of = loop.tasks_of

    def stuck(rows: Any, config: Any, build: Any, step: int, **how: Any) -> Any:
        time.sleep(300 if step == 2 and processes().process_index == process else 0)
        return tasks_of(rows, config, build, step, **how)

    loop.tasks_of = stuck


def shard(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Train with sharded weights, stopped and resumed half-way; four processes are two groups."""
    groups = {"shard_size": 2} if processes().num_processes == 4 else {}
    half, result = config.train.steps // 2, {"sharded": True}
    Writer.finish = slowly(Writer.finish)
    for last in (half, config.train.steps):
        allow_sharding()
        this = Run(folder, dataclasses.replace(config, train=dataclasses.replace(config.train, fsdp=True, **groups)))
        result["sharded"] &= all(isinstance(p, DTensor) for p in this.network.parameters())
        layer = next(m for m in this.network.modules() if isinstance(m, SelfBlock))
        layer.register_forward_pre_hook(lambda m, _: result.update(gathered=str(next(m.parameters()).dtype)))
        result["mesh"] = [*next(this.network.parameters()).device_mesh.shape]
        for step in this:
            this.log(step)
            this.evaluate(step.step, 4)
            if step.step == last:
                break
        this.save(last)
        this.settle()
    result["samples"] = [text.tokens for text in this.samples(2)]
    return result


if __name__ == "__main__":
    what, out, *runs = sys.argv[1:]
    if what in ("train", "hang"):
        if what == "train":
            allow_sharding()
        else:
            hang(int(runs[0]))
        sys.argv = ["maskless", "train", "--out", out, "--resume"]
        main()
    found = {}
    if what == "half":
        halve()
    for name in map(Path, runs):
        config = RunConfig.read(name)
        found[name.name] = {"agree": agree, "shard": shard, "half": shard}[what](config, name / what)
        AcceleratorState._reset_state()
    if processes().is_main_process:
        Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()  # its threads would sometimes abort the process at its end
