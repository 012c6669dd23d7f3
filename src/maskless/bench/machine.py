"""What the machine can do: the fastest large matrix product and the fastest copy, measured in the same run."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from maskless.bench.case import PRECISIONS, one_of

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


def find_device(name: str | None) -> torch.device:
    """The named device; by default the GPU where there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    one_of("device", name, DEVICES)
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
