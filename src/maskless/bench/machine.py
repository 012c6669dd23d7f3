"""What the machine can do, measured in the same run, and what came out of a measurement on it.

Its two ceilings are the fastest large matrix product and the fastest copy.
"""

from __future__ import annotations

import dataclasses
import gc
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maskless.bench.case import PRECISIONS, Case
from maskless.how import check_name
from maskless.paper import IMAGES, MEMORY, SECONDS, SEQUENCES, START_UP, TOKENS

DEVICES = ("cpu", "cuda")
SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices
COPIED = {"cpu": 2**28, "cuda": 2**31}  # bytes, far more than a cache holds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device and its two ceilings."""

    device: str
    name: str
    torch: str
    threads: int
    precision: str
    product: float  # FLOP/s of a large matrix product in this precision
    copy: float  # bytes/s, read and written


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The timed runs of one case, with the arithmetic and the traffic that were counted for one run."""

    case: Case
    part: str  # sample; or forward, forward + backward, optimiser step
    times: tuple[float, ...]  # seconds
    start_up: float | None  # seconds from a network to the end of its first run: folding, compiling, capturing
    memory: int  # peak, bytes
    flops: float
    traffic: float  # bytes; 0: not counted
    machine: Machine
    flops_everywhere: float | None = None  # MDLM: with the head at every position, as the released code has it

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def tokens_per_second(self) -> float:
        return self.case.batch * self.case.length / self.seconds

    @property
    def sequences_per_second(self) -> float:
        return self.case.batch / self.seconds

    def read(self, measure: str) -> float:
        """One of the measures that the paper and we give figures in."""
        value = {
            TOKENS: self.tokens_per_second,
            SEQUENCES: self.sequences_per_second,
            IMAGES: self.sequences_per_second,
            SECONDS: self.seconds,
            START_UP: self.start_up,
            MEMORY: self.memory / 2**30,
        }[measure]
        assert value is not None, f"{self.part} has no {measure}"
        return value

    @property
    def limit(self) -> float:
        """The fewest seconds: no less than the arithmetic takes at the ceiling, nor than the traffic."""
        return max(self.flops / self.machine.product, self.traffic / self.machine.copy)

    @property
    def bound(self) -> str:
        """What the limit comes from."""
        return "arithmetic" if self.flops / self.machine.product >= self.traffic / self.machine.copy else "memory"

    @property
    def of_limit(self) -> float:
        """The share of the limit that was reached, 0 to 1."""
        return self.limit / self.seconds

    @property
    def achieved(self) -> float:
        """Counted FLOP/s."""
        return self.flops / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in seconds, bytes and FLOP."""
        return {
            "model": self.case.name,
            "part": self.part,
            "case": dataclasses.asdict(self.case),
            "seconds": {"median": self.seconds, "min": min(self.times), "max": max(self.times), "all": self.times},
            "tokens_per_second": self.tokens_per_second,
            "sequences_per_second": self.sequences_per_second,
            "start_up_seconds": self.start_up,
            "peak_memory_bytes": self.memory,
            "flops": self.flops,
            "flops_per_second": self.achieved,
            "share_of_ceiling": self.achieved / self.machine.product,
            "traffic_bytes": self.traffic,
            "limit_seconds": self.limit,
            "limit_tokens_per_second": self.tokens_per_second * self.seconds / self.limit,
            "limit_bound_by": self.bound,
            "share_of_limit": self.of_limit,
            "flops_head_everywhere": self.flops_everywhere,
        }


def find_device(name: str | None) -> torch.device:
    """The kind of device that is named, such as cuda:1; by default the GPU where there is one."""
    name = (name or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    check_name("device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch sees no GPU here, expected cpu")
    return torch.device(name)


def measure(device: torch.device, precision: str, *, repeat: int = 10) -> Machine:
    """The best of several large matrix products, and of several copies."""
    side = SIDE[device.type]
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, side, side, device=device).to(PRECISIONS[precision])
    product = min(_times(lambda: a @ b, device, repeat))
    copy = min(_times(lambda: target.copy_(source), device, repeat))
    return Machine(
        device=device.type,
        name=name_of(device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        precision=precision,
        product=2 * side**3 / product,
        copy=2 * len(source) / copy,
    )


def name_of(device: torch.device) -> str:
    """The model of the GPU or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def now(device: torch.device) -> float:
    """Seconds, when everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """The most bytes held since `forget_peak`: of the GPU, or by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak(device: torch.device) -> None:
    """Give back what nobody holds any more, and measure the peak from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # only Linux can; elsewhere the peak is that of all that was done so far
            Path("/proc/self/clear_refs").write_text("5")


def processor() -> str:
    """The processor's name, where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _times(work: Callable[[], object], device: torch.device, repeat: int) -> list[float]:
    times = []
    for _ in range(repeat + 1):
        begin = now(device)
        work()
        times.append(now(device) - begin)
    return times[1:]
