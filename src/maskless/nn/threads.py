"""How many of torch's threads a pass gets: on a busy machine small work would wait for them far longer than it takes.

torch cuts an operation into parts for all cores and waits for the last of them. Where other processes keep the cores
busy that is a turn of the scheduler, a hundred times in each step of a sample. So the number follows from the work, and
a number that the user has chosen stays. OpenMP and MKL keep theirs for each thread of a process, so that nobody else
notices; `torch.set_num_threads` would also change what threads begin with that start meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from maskless.nn import Network
from maskless.problems import Problems

GRAIN = 1 << 29  # multiply-adds that another thread is worth: 10 to 20 ms of a core
READING = 10  # multiply-adds that reading a weight takes as long as
DRAWING = 512  # the same of drawing from a logit
DEFAULT = torch.get_num_threads()
CHOSEN = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))  # by the user


def _library(name: str) -> Callable[[int], int] | None:
    """A function of the libraries that torch computes with, where it has them."""
    try:
        found: Callable[[int], int] = getattr(ctypes.PyDLL(torch._C.__file__), name)
    except (AttributeError, OSError):
        return None
    return found


_openmp = _library("omp_set_num_threads")
_mkl = _library("MKL_Set_Num_Threads_Local") or (lambda number: 0)  # gives what it was; 0: as many as OpenMP


class Size(NamedTuple):
    """What the work of a network follows from."""

    weights: int
    laid_out: int  # tokens of a row that are computed whether they are asked for or not: all of a masked network's

    @staticmethod
    def of(network: Network) -> Size:
        """A plain function has none."""
        if not isinstance(network, nn.Module):
            return Size(0, 0)
        config = getattr(network, "config", None)
        laid_out = int(config.length) if config is not None and hasattr(config, "mask") else 0
        return Size(sum(p.numel() for p in network.parameters()), laid_out)

    def work(self, rows: int, tokens: int) -> int:
        """Multiply-adds of a pass, about."""
        return self.weights * (max(tokens, rows * self.laid_out) + READING)


@contextmanager
def threads_for(work: int) -> Iterator[None]:
    """Compute with as many threads as so many multiply-adds are worth, 0: nobody knows how many there are.

    The number is that of the calling thread of the process alone.
    """
    now = torch.get_num_threads()
    number = min(now, 1 << max(0, (work // GRAIN).bit_length() - 1))  # few different ones: OpenMP starts threads anew
    if not work or number == now or now != DEFAULT or CHOSEN or _openmp is None:
        yield
        return
    if before := _mkl(number):  # torch.set_num_threads was called
        _mkl(before)
        yield
        return
    _openmp(number)
    try:
        yield
    finally:
        _openmp(now)
        _mkl(0)


def threads_for_pass(network: Network, problems: Problems) -> AbstractContextManager[None]:
    """For one call of a network on the CPU."""
    if problems.tokens.device.type != "cpu":
        return nullcontext()
    tokens = problems.offsets.total + problems.target_offsets.total
    return threads_for(Size.of(network).work(len(problems), tokens))


def threads_for_draws(logits: Tensor) -> AbstractContextManager[None]:
    return threads_for(DRAWING * logits.numel()) if logits.device.type == "cpu" else nullcontext()


def _compute_alone() -> None:
    """In a forked child OpenMP's threads are gone, but GNU's waits for them: the thread that forked uses none."""
    if _openmp is None:
        torch.set_num_threads(1)
    else:
        _openmp(1)
        _mkl(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compute_alone)
