"""What calls in several threads share: the mode of a network, and locks that a fork leaves open."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from torch import nn

from maskless.nn import Network, autocast, device_of

P = ParamSpec("P")


class ForkSafeLock:
    """A re-entrant lock that is open in a forked child, where whoever held it is not; one for a whole process."""

    def __init__(self) -> None:
        self._open()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()

    def outside(self, call: Callable[P, None]) -> Callable[P, None]:
        """The same call, while others may have the lock: it may wait for them."""

        def called(*args: P.args, **kwargs: P.kwargs) -> None:
            self.lock.release()
            try:
                call(*args, **kwargs)
            finally:
                self.lock.acquire()

        return called


_lock = ForkSafeLock()
_modes: dict[nn.Module, tuple[bool, list[int]]] = {}  # of networks in use: whether they were training; by which threads


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    """Without dropout, in the precision of the device. The last of several calls at a time puts the mode back."""
    with autocast(device_of(network)):
        if not isinstance(network, nn.Module):
            yield
            return
        with _lock:
            training, threads = _modes.setdefault(network, (network.training, []))
            threads.append(threading.get_ident())
            network.eval()
        try:
            yield
        finally:
            with _lock:
                threads.remove(threading.get_ident())
                if not threads:
                    network.train(training)
                    del _modes[network]


def _forget_others() -> None:
    """In a forked child only the thread that forked goes on."""
    for network, (training, threads) in list(_modes.items()):
        threads[:] = [thread for thread in threads if thread == threading.get_ident()]
        if not threads:
            network.train(training)
            del _modes[network]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_others)
