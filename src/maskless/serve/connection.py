"""Connections: how uvicorn listens, how long it waits for the head of a request, and how it stops.

uvicorn waits for ever for the rest of a head, so that a few hundred silent clients would keep all others out. When it
stops and a request takes too long, it answers 500; here the batchers end first, which is a clear 503.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from maskless.serve.batcher import Batcher
from maskless.serve.guard import App
from maskless.serve.host import Limits

GRACE = 5  # seconds that requests under way have to end when the server stops
TELLING = 2  # seconds after that in which the others are told so
IDLE = 30  # seconds that a connection may be idle between requests
PATIENCE = 10.0  # seconds in which the head of a request has to arrive
HEAD = 1 << 16  # bytes of it


class Patient(H11Protocol):
    """A connection that is closed if it does not say in time what it wants."""

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()  # the guard waits for the body
        elif self.timer is None:
            self.timer = self.loop.call_later(PATIENCE, self._give_up)

    def _forget(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, with batchers that end where requests under way take longer than the grace."""

    def __init__(self, config: uvicorn.Config, batchers: Sequence[Batcher]):
        super().__init__(config)
        self.batchers = batchers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends the grace. (uvicorn would cut everybody off with a 500.)"""
        if not self.should_exit:
            super().handle_exit(sig, frame)
            return
        for batcher in self.batchers:
            batcher.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for batcher in self.batchers:
            asyncio.get_running_loop().call_later(GRACE, batcher.stop)
        await super().shutdown(sockets)


def config_of(app: App, limits: Limits) -> uvicorn.Config:
    """How an application is served."""
    return uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE + TELLING,
        timeout_keep_alive=IDLE,
        h11_max_incomplete_event_size=HEAD,
        limit_concurrency=8 * (limits.queue + limits.batch),
    )
