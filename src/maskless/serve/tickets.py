"""Between the event loop and a batcher's thread: a job is waited for, streamed, and cancelled with its client.

The batcher calls back in its own thread; what it says is put on a queue of the loop. Whoever waits gives up when the
client has left, and then the job is cancelled, which frees its rows before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from maskless.drafts import Drafts, Step
from maskless.serve.batcher import LATE, Batcher, BusyError, Job

Steps = list[Step]
KEEP_ALIVE = 15.0  # seconds without an event after which a comment is sent


class GoneError(Exception):
    """The client has left."""


class Ticket:
    """A job that is under way; made and used in the event loop."""

    def __init__(self, batcher: Batcher, drafts: Drafts, seconds: float, *, watched: bool = False):
        self.loop, self.begun = asyncio.get_running_loop(), time.monotonic()
        self.said: asyncio.Queue[tuple[Steps, float] | Exception | None] = asyncio.Queue()
        on_step = self._landed if watched else None
        self.job = Job(drafts, on_end=self._say, on_step=on_step, deadline=self.begun + seconds)
        batcher.submit(self.job)
        self.timer = self.loop.call_later(seconds, self._say, BusyError(LATE))  # also where a step does not come back

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def _landed(self, steps: Steps) -> None:
        self._say((steps, self.seconds))

    def _say(self, what: tuple[Steps, float] | Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
            self.loop.call_soon_threadsafe(self.said.put_nowait, what)

    async def steps(self) -> AsyncIterator[tuple[Steps, float] | None]:
        """What each step samples and when, until all rows are done; raises what ended the job.

        None wherever nothing comes for a while: a stream says something then, so that proxies keep the line open.
        """
        while True:
            try:
                said = await asyncio.wait_for(self.said.get(), KEEP_ALIVE)
            except TimeoutError:
                yield None
                continue
            if said is None:
                return
            if isinstance(said, Exception):
                raise said
            yield said

    async def done(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Wait for the end of the job, or raise GoneError as soon as the client leaves."""
        leaving = asyncio.ensure_future(_left(receive))
        ending = asyncio.ensure_future(self.said.get())
        try:
            await asyncio.wait({leaving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise GoneError
            said = ending.result()
            if isinstance(said, Exception):
                raise said
        finally:
            self.cancel()
            for task in (leaving, ending):
                task.cancel()

    def cancel(self) -> None:
        """Nobody waits any more."""
        self.timer.cancel()
        self.job.cancel()


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(name: str, data: Any) -> bytes:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
