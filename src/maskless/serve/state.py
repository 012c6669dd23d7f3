"""What all requests share: hosted models, limits, figures; and how a job is answered, whole or in pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from maskless.drafts import Drafts
from maskless.how import How
from maskless.logits import BrokenModelError
from maskless.serve.batcher import BusyError
from maskless.serve.guard import problem
from maskless.serve.host import Host, Limits
from maskless.serve.metrics import Metrics
from maskless.serve.requests import Sampling
from maskless.serve.tickets import Steps, Ticket, event

Landed = Callable[[Steps, float], Awaitable[list[bytes]]]  # what steps sampled and when, as events
READING = 30.0  # seconds that a client has to read the last events


class UnknownModelError(ValueError):
    """A model that this server does not have."""


class State:
    """The models of a server, the first of each kind being the one that is meant where none is named."""

    def __init__(self, hosts: Sequence[Host], limits: Limits, metrics: Metrics):
        self.hosts, self.limits, self.metrics = {host.name: host for host in hosts}, limits, metrics

    def host(self, name: str | None, *, pictures: bool = False) -> Host:
        """A model by name; an error that lists the others where there is none."""
        kind = "image" if pictures else "text"
        fitting = {known: host for known, host in self.hosts.items() if host.pictures == pictures}
        if not fitting:
            raise ValueError(f"this server has no {kind} model")
        name = next(iter(fitting)) if name is None else name
        if name not in fitting:
            raise UnknownModelError(f"unknown {kind} model {name[:100]!r}: expected one of {', '.join(fitting)}")
        return fitting[name]

    async def whole(self, request: Request, host: Host, drafts: Drafts) -> float:
        """Wait until drafts are done; returns the seconds that they took."""
        ticket = Ticket(host.batcher, drafts, self.limits.seconds)
        await ticket.done(request.receive)
        return ticket.seconds

    async def reply(
        self,
        request: Request,
        body: Sampling,
        host: Host,
        drafts: Drafts,
        *,
        landed: Landed,
        answer: Callable[[float], Any],
        opening: Callable[[], Any] | None = None,
        ended: Callable[[float], list[bytes]] | None = None,
    ) -> Any:
        """The answer when drafts are done, or a stream where the body or the Accept header asks for one.

        opening: what the first event says. ended: the last events, if these are more than the answer. It and `answer`
        take the seconds that all took.
        """
        if not (body.stream or "text/event-stream" in request.headers.get("accept", "")):
            return await asyncio.to_thread(answer, await self.whole(request, host, drafts))
        opened = [] if opening is None else [event("start", await asyncio.to_thread(opening))]
        done = ended or (lambda seconds: [event("done", answer(seconds))])
        return self.stream(host, drafts, opened=opened, landed=landed, ended=done)

    def stream(
        self,
        host: Host,
        drafts: Drafts,
        *,
        opened: list[bytes],
        landed: Landed,
        ended: Callable[[float], list[bytes]],
    ) -> StreamingResponse:
        """Drafts as server-sent events; what a request is refused for, it is refused for before the stream begins."""
        ticket = Ticket(host.batcher, drafts, self.limits.seconds, watched=True)

        async def events() -> AsyncIterator[bytes]:
            for one in opened:
                yield one
            try:
                seconds = 0.0
                async for said in ticket.steps():
                    if said is None:
                        yield b": still here\n\n"
                        continue
                    steps, seconds = said
                    for one in await landed(steps, seconds):
                        yield one
                for one in await asyncio.to_thread(ended, seconds):
                    yield one
            except BusyError as error:
                yield event("error", problem(str(error), 503))
            except BrokenModelError as error:
                yield event("error", problem(str(error), 500))
            except Exception:  # of a step: the log has it
                yield event("error", problem("the model failed on this request", 500))

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        answer = _Events(events(), media_type="text/event-stream", headers=headers)
        answer.ticket, answer.seconds = ticket, self.limits.seconds + READING
        return answer


class _Events(StreamingResponse):
    """A stream whose job is cancelled when it ends, also if the client left before the first event.

    One that its client does not read is cut off some time after the job has to be done.
    """

    ticket: Ticket
    seconds: float

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.seconds):
                    await super().__call__(scope, receive, send)
        finally:
            self.ticket.cancel()


def how_of(body: Any) -> How:
    """How a request wants its tokens sampled; a field without a value is left to the model."""
    given = {name: getattr(body, name, None) for name in How.__dataclass_fields__}
    return How(**{name: value for name, value in given.items() if value is not None})
