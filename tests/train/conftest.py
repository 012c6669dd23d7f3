"""A toy corpus as tokens, pictures for a codec, settings of tiny runs, and a warm process that forks real ones."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_runs import blobs, quick_config
from torch.distributed import TCPStore

from maskless.data.prepare import prepare
from maskless.data.tokens import Prepared, open_tokens
from maskless.train.codec_loop import CodecConfig
from maskless.train.config import TrainConfig
from maskless.train.plan import network_config
from maskless.train.report import read_metrics
from maskless.train.run import RunConfig
from toy_text import write

QUICK = {"steps": 8, "batch": 8, "learning_rate": 1e-3, "warmup": 3, "log_every": 1, "save_every": 3, "seed": 5}
QUICK |= {"evaluate_every": 0}  # by default it would be after every step

# Importing torch takes seconds. A process forked from one that has it starts at once, and dies of SIGKILL like any.
SERVER = """
import faulthandler, json, os, runpy, signal, sys
import torch.utils.tensorboard
import maskless.cli, maskless.train.codec, maskless.train.setup, maskless.train.run

maskless.train.run.plot_losses = lambda *_: None
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in its background
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        os.environ |= request["environment"]
        for stream in ("stdout", "stderr"):
            os.dup2(os.open(request[stream], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), getattr(sys, stream).fileno())
        faulthandler.dump_traceback_later(290)
        sys.argv = request["arguments"]
        if sys.argv[0] == "maskless":
            maskless.cli.main()
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(pid, flush=True)
"""


@pytest.fixture(autouse=True, scope="module")
def _short_stations() -> Iterator[None]:
    """A picture of the losses takes longer than a tiny run: test_report.py draws some, and a run of tests/cli."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskless.train.run.plot_losses", lambda *_: None)
        patch.setattr("maskless.train.run.LOOK", 16)  # sequences
        yield


class Process:
    """A forked process: `maskless ...` or a script. One that hangs says where, and is killed after five minutes."""

    def __init__(self, ask: Callable[..., int], arguments: tuple[Any, ...], folder: Path, environment: dict[str, str]):
        self._ask, self._code = ask, None
        folder.mkdir()
        self._files = {name: folder / name for name in ("stdout", "stderr")}
        files = {name: str(path) for name, path in self._files.items()}
        self.pid = ask(arguments=[str(a) for a in arguments], environment=environment, **files)
        self._limit = threading.Timer(300, self.kill, [signal.SIGKILL])
        self._limit.daemon = True
        self._limit.start()

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def until(self, happened: Callable[[], object]) -> None:
        """Wait for something that it does."""
        end = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < end, self.stderr
            time.sleep(0.001)

    def stand(self) -> None:
        """Stop it where it is, until SIGCONT; returns when it has stopped, which needs /proc."""
        self.kill(signal.SIGSTOP)
        self.until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def wait(self) -> int:
        """Its exit code, negative for a signal that ended it."""
        if self._code is None:
            self._code = self._ask(wait=self.pid)
            self._limit.cancel()
        return self._code

    def end(self) -> None:
        """Kill it, unless its end has been seen: only then may its number belong to another process."""
        if self._code is None:
            self.kill(signal.SIGKILL)
            self.wait()

    @property
    def stdout(self) -> str:
        return self._files["stdout"].read_text()

    @property
    def stderr(self) -> str:
        return self._files["stderr"].read_text()


@pytest.fixture(scope="session")
def start(tmp_path_factory) -> Iterator[Callable[..., Process]]:
    """start("maskless", ...) or start(script, ...): a process forked from a warm one."""
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout.readline() == "ready\n"
    started: list[Process] = []

    def ask(**request: Any) -> int:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def start(*arguments: Any, **environment: str) -> Process:
        started.append(Process(ask, arguments, folder / str(len(started)), environment))
        return started[-1]

    yield start
    for process in started:
        process.end()
    server.stdin.close()
    server.wait()


@pytest.fixture
def start_several(start) -> Callable[..., list]:
    """start_several(n, ...): processes with what torchrun would tell them. Their store is here, and holds its port."""
    stores = []

    def start_several(world: int, *arguments) -> list:
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stores[-1].port), "WORLD_SIZE": str(world)}
        common |= {"LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return [start(*arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world)]

    return start_several


@pytest.fixture
def start_two(start_several) -> Callable[..., list]:
    return partial(start_several, 2)


@pytest.fixture(scope="session")
def on_two_machines() -> Callable[..., list[tuple[str, str]]]:
    """on_two_machines(...): what two agents of torchrun print that meet at an address and start one process each."""

    def run(*arguments: Any) -> list[tuple[str, str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--local-addr", "127.0.0.1"]
        command, environment = [*torchrun, "-m", "maskless", "--", *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
        agents = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
        said = [agent.communicate(timeout=300) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], said
        return said

    return run


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """ctrl_c(): what a terminal does to this process, also where it was started by a shell that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A folder on a disk of 6 MB: room for one or two states of a tiny run."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount a small disk: {error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("text") / "toy.txt", 800, seed=0)


@pytest.fixture(scope="session")
def data(text, tmp_path_factory) -> Prepared:
    return open_tokens(prepare([text], tmp_path_factory.mktemp("data") / "toy", vocab=300, length=16))


@pytest.fixture(scope="session")
def configure(data) -> Callable[..., RunConfig]:
    """configure(model, dropout=, context=, **settings): a tiny run on the toy corpus."""

    def configure(model: str = "pgm", *, dropout: float = 0.0, context: str = "full", **settings: Any) -> RunConfig:
        sizes = network_config(model, data.codec(), 16, width=32, layers=2, dropout=dropout, context=context)
        return RunConfig(
            data=str(data.folder), network=dataclasses.asdict(sizes), train=TrainConfig(model=model, **QUICK | settings)
        )

    return configure


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], dict[int, tuple[float, float, float]]]:
    """losses(run): loss, gradient norm and rate of each step in its metrics.jsonl, where each step stands once."""

    def losses(folder: Path) -> dict[int, tuple[float, float, float]]:
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        found = {line["step"]: (line["loss"], line["gradient"], line["rate"]) for line in lines}
        assert list(found) == [line["step"] for line in lines], "a step is there twice"
        return found

    return losses


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("images") / "blobs.npy"
    np.save(path, blobs(40))
    return str(path)


@pytest.fixture
def quick(images) -> Callable[..., CodecConfig]:
    """quick(**changed): settings of a tiny codec's run on the pictures."""
    return partial(quick_config, images)
