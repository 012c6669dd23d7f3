"""A real server on a free port with tiny models, a client that needs no library, and a browser that visits it."""

import contextlib
import copy
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import toy_text
from maskless.checkpoint import Model
from maskless.codec.text import train_bpe
from maskless.codec.vq import PixelCodec
from maskless.mixture import Mixture
from tiny_networks import shaken

pytest.importorskip("fastapi", reason="needs the extra web")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra web")

from maskless.nn.partition import PartitionConfig, PartitionTransformer  # noqa: E402
from maskless.serve.connection import config_of  # noqa: E402
from maskless.serve.host import Host, Limits  # noqa: E402
from maskless.serve.shares import FairShare  # noqa: E402
from maskless.serve.web import build  # noqa: E402

LIMITS = Limits(length=48, steps=64, rows=8, batch=16, queue=64, seconds=20, body=1 << 16)
CLASSES = ("cat", "dog", "ship")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def models(tiny: Callable[..., Any]) -> dict[str, Model]:
    """Untrained networks whose answers are far from uniform: a PGM and an MDLM over one BPE, and one of pictures."""
    codec = train_bpe(list(toy_text.corpus(300, 0)), 460)
    sizes = {"vocab": codec.vocab, "length": 48, "width": 32}
    pgm = tiny("position", scale=0.15, **sizes)
    mdlm = tiny("masked", scale=0.15, **sizes | {"vocab": codec.vocab + 1})
    return {"pgm": Model(pgm, codec), "mdlm": Model(mdlm, codec), "pictures": painter()}


@pytest.fixture(scope="session")
def keeping(tiny: Callable[..., Any], models: dict[str, Model]) -> dict[str, Model]:
    """Networks that never change what they have encoded."""
    codec = models["pgm"].codec
    sizes = {"vocab": codec.vocab, "length": 48, "width": 32, "scale": 0.15}
    ordered, causal = (Model(tiny(kind, **sizes), codec) for kind in ("ordered", "causal"))
    chain = Model(ordered.network, codec, mixture=Mixture.parse("random=1,strands=2,gaps=1"))
    painter_ = painter(context="ordered", registers=True)
    return {"ordered": ordered, "chain": chain, "causal": causal, "painter": painter_}


def painter(**kind: Any) -> Model:
    torch.manual_seed(1)
    sizes = {"vocab": 11, "length": 17, "grid": (4, 4), "classes": len(CLASSES), "encoder": 1, "decoder": 1}
    network = PartitionTransformer(PartitionConfig(**sizes, width=32, heads=2, condition=8, **kind))
    return Model(shaken(network, 0.3), PixelCodec(9), "image", CLASSES)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """Of an error: one line, in the one shape that errors have."""
        error = self.json["error"]
        assert error["code"] == self.status
        assert "\n" not in error["message"]
        return error["message"]

    @property
    def events(self) -> list[tuple[str, Any]]:
        blocks = [block for block in self.body.decode().split("\n\n") if block.startswith("event: ")]
        pairs = [block.split("\n", 1) for block in blocks]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


@dataclass
class Server:
    port: int
    hosts: dict[str, Host] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, {"content-type": "application/json"} | headers)


@contextlib.contextmanager
def running(hosts: list[Host], limits: Limits, key: str | None = None) -> Iterator[Server]:
    """The application under uvicorn, in a thread."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = config_of(build(hosts, limits, key=key), limits)
    config.timeout_graceful_shutdown = 2
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield Server(listener.getsockname()[1], {host.name: host for host in hosts})
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def serving(models: dict[str, Model]) -> Callable[..., Any]:
    return partial(real_process, models)


@contextlib.contextmanager
def real_process(models: dict[str, Model], words: list[str], folder: Path, descriptors: int = 0) -> Iterator[Any]:
    """`maskless serve` in a process of its own, its server, and the file with all that it complains of.

    words: its options, and the names of the models that it serves; descriptors: how many files it may open, if fewer.
    """
    for name in models.keys() & {*words}:
        models[name].save_pretrained(folder / name)
    command = [sys.executable, "-m", "maskless", "serve", *words, "--port", "0", "--device", "cpu"]
    if descriptors:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    environment, said = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}, folder / "stderr"
    with (
        said.open("w") as err,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=err, text=True) as run,
    ):
        try:
            line = run.stdout.readline()
            found = re.match(r"http://127\.0\.0\.1:(\d+) ", line)
            assert found, line + said.read_text()
            yield run, Server(int(found[1])), said
        finally:
            run.kill()


@pytest.fixture(scope="session")
def server(models: dict[str, Model]) -> Iterator[Server]:
    share = FairShare()
    with running([Host(name, model, LIMITS, share) for name, model in models.items()], LIMITS) as started:
        yield started


@pytest.fixture(scope="session")
def chained(keeping: dict[str, Model], models: dict[str, Model]) -> Iterator[Server]:
    """A model of chains, an MDLM and a left-to-right model; two of them say how good they are."""
    share = FairShare()
    named = {"chain": keeping["chain"], "mdlm": models["mdlm"], "causal": keeping["causal"]}
    named = {name: copy.copy(model) for name, model in named.items()}
    named["chain"].defaults, named["chain"].quality = {"strands": 4}, "Gen-PPL 4.6"
    named["mdlm"].defaults, named["mdlm"].quality = {"steps": 6, "revise": 2}, "Gen-PPL 9.8"
    hosts = [Host(name, model, LIMITS, share) for name, model in named.items()]
    with running(hosts, LIMITS) as started:
        yield started


@pytest.fixture
def slow(models: dict[str, Model]) -> Iterator[Callable[..., Any]]:
    """slow(pause of a step, key=, **limits): a server whose model takes its time."""
    with contextlib.ExitStack() as stack:

        def start(pause: float, key: str | None = None, **limits: Any) -> Server:
            bounds = Limits(**{"length": 48, "steps": 64, "rows": 8} | limits)
            host = Host("pgm", models["pgm"], bounds)
            quick = host.batcher.backend.logits

            def logits(rows: Any) -> Any:
                time.sleep(pause)
                return quick(rows)

            host.batcher.backend.logits = logits
            return stack.enter_context(running([host], bounds, key))

        yield start


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium, or playwright's own; of a module, as its event loop is in the way of others."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    with playwright.sync_playwright() as tools:
        try:
            arguments = ["--no-sandbox", "--disable-gpu"]
            started = tools.chromium.launch(executable_path=path, args=arguments, timeout=120_000)
        except playwright.Error as error:
            pytest.skip(f"no browser: apt install chromium ({str(error).splitlines()[0][:100]})")
        yield started
        started.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory) -> Path:
    """Where screenshots go: the folder that MASKLESS_SHOTS names, or a temporary one."""
    folder = Path(os.environ.get("MASKLESS_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def visit(browser, server):
    """visit(**context): the page, ready; nothing may go wrong in its console."""
    from playwright.sync_api import expect

    contexts, wrong = [], []

    def open_page(url=None, ready=True, **how):
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, "reduced_motion": "reduce"} | how)
        context.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
        page.on("request", lambda request: wrong.append(request.url) if foreign(request.url) else None)
        page.goto(url or server.url)
        if ready:
            expect(page.locator("body[data-ready]")).to_have_count(1)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def foreign(url: str) -> bool:
    return not re.match(r"http://127\.0\.0\.1:|data:|blob:", url)
