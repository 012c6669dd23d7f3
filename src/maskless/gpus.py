"""GPUs by name: the vendor's figures of what each can do at best; and this machine's processor, measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A kind of GPU, by NVIDIA's data sheets: dense bfloat16 products with float32 sums, no sparsity."""

    name: str
    peak: float  # FLOP/s
    bandwidth: float  # bytes/s of its memory
    memory: float  # bytes
    link: float  # bytes/s to each side, to the other GPUs of its machine


GPUS = {
    "h200": GPU(name="H200 SXM", peak=989.5e12, bandwidth=4.8e12, memory=141 * GB, link=450 * GB),
    "h100": GPU(name="H100 SXM", peak=989.5e12, bandwidth=3.35e12, memory=80 * GB, link=450 * GB),
    "a100": GPU(name="A100 SXM 80 GB", peak=312e12, bandwidth=2.039e12, memory=80 * GB, link=300 * GB),
    "l40s": GPU(name="L40S", peak=362e12, bandwidth=0.864e12, memory=48 * GB, link=32 * GB),
    "rtx4090": GPU(name="RTX 4090", peak=165.2e12, bandwidth=1.008e12, memory=24 * GB, link=32 * GB),
}


@dataclass(frozen=True, kw_only=True)
class CPU(GPU):
    """A processor with the threads that torch has; its peak is that of a product that was timed."""


def this_cpu() -> CPU:
    """The processor of this machine."""
    a, b, times = torch.randn(1024, 512), torch.randn(512, 1024), []
    for _ in range(20):
        begun = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begun)
    threads, memory = torch.get_num_threads(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = f"this CPU with {threads} thread{'s' * (threads > 1)}"
    return CPU(name=name, peak=2 * a.numel() * 1024 / min(times), bandwidth=1, memory=memory, link=1)


def gpu(name: str) -> GPU:
    """The GPU of this name, such as h100; or cpu."""
    if name.lower() == "cpu":
        return this_cpu()
    if name.lower() not in GPUS:
        raise ValueError(f"unknown GPU {name!r}: expected one of {', '.join(GPUS)}, cpu")
    return GPUS[name.lower()]


def recognised(device: str) -> GPU | None:
    """The GPU that a driver calls so, if it is one of these: "NVIDIA H100 80GB HBM3" -> H100 SXM"""
    words = device.lower().replace("rtx ", "rtx").replace("-", " ").split()
    if "pcie" in words or "nvl" in words or "40gb" in words:  # cards of the same name that can do less
        return None
    return next((found for name, found in GPUS.items() if name in words), None)
