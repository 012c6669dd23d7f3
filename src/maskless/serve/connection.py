"""Connections: how uvicorn listens, how many it keeps, how long it waits for the head of a request, and how it stops.

uvicorn waits for ever for the rest of a head and counts no connection that is silent, so that a thousand of them would
take all descriptors. Here one that says nothing is closed after a while, and sooner where others come. When uvicorn
stops and a request takes too long, it answers 500; here the batchers end first, which is a clear 503.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from maskless.serve.batcher import Batcher
from maskless.serve.guard import App, problem
from maskless.serve.host import Limits
from maskless.serve.logs import throttle

GRACE = 5  # seconds that requests under way have to end when the server stops
ARRIVING = 0.1  # seconds in which connections that were accepted may still say what they want
TELLING = 2  # seconds after that in which the others are told so
IDLE = 30  # seconds that a connection may be idle between requests
PATIENCE = 10.0  # seconds in which the head of a request has to arrive
HEAD = 1 << 16  # bytes of it
WAITING = 1024  # connections that the system keeps until they are accepted
ACCEPTED = 16  # of these at a time: some four times as many are open before the first of them is counted
NO_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
)


class Patient(H11Protocol):
    """A connection that is closed if it does not say in time what it wants, or does not read what it is told."""

    timer: asyncio.TimerHandle | None = None
    since = 0.0  # when it was opened, or last answered
    gone = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most, self.limit_concurrency = self.limit_concurrency or 1, None  # uvicorn's own answer is not JSON

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self._watch()
        if len(self.connections) > self.most:
            self._make_room()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def timeout_keep_alive_handler(self) -> None:
        self._cut()  # uvicorn would wait until the answer is read

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps(problem(msg, 400)).encode()
            self.transport.write(NO_HTTP % len(body) + body)
        self.transport.close()

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Beyond the most connections, the one that has been idle for longest gives way; it may be this one."""
        there = [one for one in cast("set[Patient]", self.connections) if not one.gone]
        if len(there) > self.most:
            min((one for one in there if one.idle), key=lambda one: one.since)._cut()

    def _cut(self) -> None:
        self.gone = True
        self.transport.abort()

    def _watch(self) -> None:
        if not self.idle:
            self._forget()  # the guard waits for the body
        elif self.timer is None:
            self.timer = self.loop.call_later(PATIENCE, self._give_up)

    def _forget(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _give_up(self) -> None:
        if self.idle:
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(WAITING)  # asyncio has set it to what it accepts at a time

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for batcher in self.batchers:
            asyncio.get_running_loop().call_later(GRACE, batcher.stop)
        for server in self.servers:
            server.close()
        await asyncio.sleep(ARRIVING)
        await super().shutdown(sockets)


def config_of(app: App, limits: Limits) -> uvicorn.Config:
    """How an application is served."""
    config = uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE + TELLING,
        timeout_keep_alive=IDLE,
        h11_max_incomplete_event_size=HEAD,
        limit_concurrency=limits.connections,
        backlog=ACCEPTED,
    )
    throttle("uvicorn.error", "asyncio", "maskless.serve")
    return config
