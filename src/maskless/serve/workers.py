"""Several devices behind one port: a process for each of them, all of which accept from one socket.

The process that the user starts binds the socket, starts the same command once for each device, and starts a worker
again when it has ended; it answers no request itself. Workers share the socket, and a folder where each of them leaves
its figures, so that any of them can answer /metrics for all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from maskless.api import check_device
from maskless.files import write_aside
from maskless.serve.metrics import merged
from maskless.serve.run import Address, bind, page_of

VARIABLE = "MASKLESS_WORKER"  # tells a process that it is one, and which
LOOK = 0.1  # seconds between two looks at the workers
PATIENCE = 20.0  # seconds in which a worker has to end when it is told to; requests under way have 7 of them
PAUSE = 5.0  # seconds until the next try with a worker that did not start


def devices_of(names: str) -> list[str]:
    """Devices from 0,1 or cuda:0,cuda:1 or cpu,cpu; one that is not here raises a ValueError."""
    if sys.platform == "win32":
        raise ValueError("--devices needs a system where processes can share a socket: use --device here")
    devices = [f"cuda:{name}" if name.isdecimal() else name for name in map(str.strip, names.split(","))]
    for device in devices:
        check_device(device)
    return devices


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a worker knows of itself."""

    number: int
    descriptor: int  # of the socket
    figures: str  # the folder where all workers leave theirs

    @staticmethod
    def here() -> Worker | None:
        """This process, if it is one; it ends when the process that started it does."""
        if (said := os.environ.get(VARIABLE)) is None:
            return None
        threading.Thread(target=_end_with_parent, daemon=True).start()
        return Worker(**json.loads(said))

    def listener(self) -> socket.socket:
        return socket.socket(proto=socket.IPPROTO_TCP, fileno=self.descriptor)

    def share(self, text: str) -> str:
        """The figures of all workers, of which `text` has this one's."""
        folder = Path(self.figures)
        write_aside(folder / str(self.number), lambda file: file.write_text(text), durable=False)
        found = {}
        for file in folder.iterdir():
            with suppress(OSError):  # its worker has just ended
                if file.name.isdecimal():
                    found[int(file.name)] = file.read_text()
        return merged(found)


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written there, and the end comes with the end of the process that could
    while True:  # the first may come before anybody heeds it
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)


class Place:
    """A device, and the process that serves on it now."""

    def __init__(self, worker: Worker, device: str, environment: dict[str, str]):
        self.name, self.figures = f"worker {worker.number} ({device})", Path(worker.figures, str(worker.number))
        self.descriptor = worker.descriptor
        self.environment = environment | {VARIABLE: json.dumps(asdict(worker)), "MASKLESS_DEVICE": device}
        self.process: subprocess.Popen[bytes] | None = None
        self.due, self.deadline = 0.0, float("inf")  # when to start a process, and when to kill it

    @property
    def ready(self) -> bool:
        """Whether it answers requests, and was not told to end."""
        return self.process is not None and self.deadline == float("inf") and self.figures.exists()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "maskless", *sys.argv[1:]],
            env=self.environment,
            stdin=subprocess.PIPE,
            pass_fds=[self.descriptor],
            start_new_session=True,  # Ctrl-C is for the first process, which passes it on
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.deadline = min(self.deadline, time.monotonic() + PATIENCE)

    def ended(self) -> tuple[int, bool] | None:
        """The exit code of a process that has ended since the last look, and whether it was told to."""
        if self.process is None:
            return None
        if (code := self.process.poll()) is None:
            if time.monotonic() > self.deadline:
                self.process.kill()
            return None
        assert self.process.stdin is not None
        self.process.stdin.close()
        told, self.deadline = self.deadline < float("inf"), float("inf")
        self.due = time.monotonic() + (0 if self.figures.exists() else PAUSE)
        self.figures.unlink(missing_ok=True)
        self.process = None
        return code, told


def supervise(devices: list[str], address: Address, ready: Callable[[str], None], note: Callable[[str], None]) -> int:
    """Serve on several devices until SIGINT or SIGTERM; returns the exit code.

    A worker that ends is started again, and `note` is told so. SIGUSR1 restarts one after the other.
    """
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    environment = dict(os.environ)
    if (cpus := devices.count("cpu")) > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // cpus)))
    try:
        with bind(address) as listener, tempfile.TemporaryDirectory(prefix="maskless-serve-") as figures:
            workers = [Worker(number=i, descriptor=listener.fileno(), figures=figures) for i in range(len(devices))]
            places = [Place(worker, device, environment) for worker, device in zip(workers, devices, strict=True)]
            code = _keep(places, heard, lambda: ready(page_of(address, listener)), note)
            listener.close()  # whoever comes now is refused and not left waiting
            _stop(places, heard)
            return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep(places: list[Place], heard: list[int], ready: Callable[[], None], note: Callable[[str], None]) -> int:
    """Keep a worker at each place until a signal comes, or until one does not start at first: it has said why."""
    opened, restarts = False, list[Place]()
    while not {signal.SIGINT, signal.SIGTERM} & {*heard}:
        for place in places:
            if (end := place.ended()) is None:
                continue
            code, told = end
            if not opened:
                return code if code > 0 else 1
            if not told:
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                note(f"{place.name} has ended ({how}) and is started again; the others continue")
        first = places[0]  # starts alone, so that what is wrong is said once
        for place in places if opened or first.ready else [first]:
            if place.process is None and time.monotonic() >= place.due:
                place.start()
        if all(place.ready for place in places):
            if not opened:
                opened = True
                ready()
            if signal.SIGUSR1 in heard:
                heard.remove(signal.SIGUSR1)
                restarts = [*places]
            if restarts:
                restarts.pop(0).stop()
        time.sleep(LOOK)
    return 0


def _stop(places: list[Place], heard: list[int]) -> None:
    """Stop all workers, which end what is nearly done; another signal cuts that short."""
    passed = 0
    while any(place.process is not None for place in places):
        if passed <= len(heard):
            passed = len(heard) + 1
            for place in places:
                place.stop()
        for place in places:
            place.ended()
        time.sleep(LOOK)
