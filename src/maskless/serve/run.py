"""A server from models: loads them, listens, and stops in good order when it is told to."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from maskless import api
from maskless.serve.host import LOOPBACK, Host, Limits, name_of
from maskless.serve.shares import FairShare


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where to listen, and the key that requests need."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} is out of range: expected 0 (any) to 65535")
        if self.key is not None and (len(self.key) < 8 or not self.key.isascii() or self.key.split() != [self.key]):
            raise ValueError("the key is too simple: expected 8 ASCII characters or more, without spaces")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOOPBACK


def load(sources: list[str], limits: Limits, *, device: str | None = None) -> list[Host]:
    """The models by name, folder, hub id or file, each with a batcher of its own."""
    hosts: list[Host] = []
    share = FairShare()
    for source in sources:
        name = name_of(source, {host.name for host in hosts})
        hosts.append(Host(name, api.load(source, device=device), limits, share))
    return hosts


def serve(
    hosts: list[Host],
    limits: Limits,
    address: Address,
    *,
    ready: Callable[[str], None],
    listener: socket.socket | None = None,
    share: Callable[[str], str] | None = None,
) -> None:
    """Listen until SIGINT or SIGTERM; `ready` is told the page's address.

    One of several workers brings the socket that all listen on, and a function from its figures to those of all.
    """
    try:
        from maskless.serve.connection import Server, config_of
        from maskless.serve.web import build
    except ImportError as error:
        raise ValueError(f"the live page needs the extra web: pip install 'maskless[web]' ({error})") from None
    app = build(hosts, limits, key=address.key, address=address.host, share=share)
    gc.freeze()  # what is loaded stays: a collection that looks through it stops everybody for a third of a second
    listener = listener or bind(address)
    ready(page_of(address, listener))
    before = {number: signal.signal(number, _ignored) for number in (signal.SIGINT, signal.SIGTERM)}
    try:  # uvicorn raises the signal again when it has stopped: by then it has been heeded
        Server(config_of(app, limits), [host.batcher for host in hosts]).run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignored(number: int, frame: object) -> None:
    pass


def page_of(address: Address, listener: socket.socket) -> str:
    """The page's address."""
    shown = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{shown}:{listener.getsockname()[1]}"


def bind(address: Address) -> socket.socket:
    """A socket that listens."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's delay on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
        listener.listen(1024)  # whoever comes from now on is answered as soon as the application runs
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot listen on {address.host} port {address.port}: {reason}") from None
    return listener
