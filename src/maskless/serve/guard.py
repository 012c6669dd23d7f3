"""What stands before the application: limits on what comes in, the key, and headers that keep a page to itself.

Plain ASGI, so that streams pass through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from maskless.serve.host import Limits
from maskless.serve.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
CLOSE = (b"connection", b"close")
MORE = {401: (b"www-authenticate", b"Bearer"), 503: (b"retry-after", b"1"), 408: CLOSE, 413: CLOSE}  # of a refusal
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
PATIENCE = 10.0  # seconds in which a request's body has to arrive
LISTS = 1 << 13  # lists and objects of a body: to read half a million empty ones takes a second
TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # of JSON, also one that does not end
DRAINED, DRAINING = 1 << 24, 2.0  # bytes and seconds of a body too long that are read nevertheless


class RefusedError(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message


def problem(message: str, status: int) -> dict[str, Any]:
    """The body of every answer that is an error; one line, whatever the message holds."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = " ".join(message.encode("utf-8", "replace").decode().split())
    return {"error": {"message": text, "type": kind, "code": status}}


class Guard:
    """Wraps an application; `paths` are those that metrics name, others count as one."""

    def __init__(
        self, app: App, metrics: Metrics, limits: Limits, *, key: str | None, local: bool, paths: frozenset[str]
    ):
        self.app, self.metrics, self.body, self.paths = app, metrics, limits.body, paths
        self.running, self.most = 0, limits.connections - limits.connections // 8
        self.key = None if key is None else key.encode()
        self.local = local  # bound to this machine: only its own names may stand in Host, which stops DNS rebinding

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 499  # the client left before an answer began

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message.get("headers", [])}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in own]
                if b"cache-control" not in own:
                    more.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        self.running += 1
        try:
            if self.running > self.most:
                raise RefusedError(503, f"too many requests at once: {self.most} are under way, try again in a moment")
            headers = {name.lower(): value for name, value in scope["headers"]}
            self._check(scope, headers)
            received = await self._whole(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else receive
            await self.app(scope, received, sending)
        except RefusedError as refusal:
            await _refuse(refusal, sending)
        finally:
            self.running -= 1
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.seen(path, status, time.monotonic() - begun)

    def _check(self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        host = headers.get(b"host", b"").decode("latin-1")
        name = host[1:].split("]")[0] if host.startswith("[") else host.split(":")[0]
        if self.local and name.lower() not in LOOPBACK:
            raise RefusedError(421, f"unknown host {name[:80]!r}: this server answers to localhost only")
        if self.key is not None and (path.startswith("/v1/") or path == "/metrics"):
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key):
                raise RefusedError(401, "a key is needed: send the header 'Authorization: Bearer KEY'")
        if scope["method"] == "POST":
            content = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if content != b"application/json":  # also what keeps other sites' forms out
                shown = content.decode("latin-1")[:80] or "nothing"
                raise RefusedError(415, f"content-type is {shown}: expected application/json")

    async def _whole(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The body, read up to the limit; what is received after it is whether the client is still there."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.body:
            await _drain(receive)
            raise RefusedError(413, f"the request is {int(length):,} bytes long: expected at most {self.body:,}")
        body = bytearray()
        deadline = time.monotonic() + PATIENCE
        while True:
            message = await _received(receive, deadline)
            if message is None:
                raise RefusedError(408, f"the request did not arrive within {PATIENCE:.0f} seconds")
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            if len(body) > self.body:
                await _drain(receive)
                raise RefusedError(413, f"the request is longer than {self.body:,} bytes")
            if not message.get("more_body", False):
                break
        if (lists := _lists(body)) > LISTS:
            raise RefusedError(413, f"the request has {lists:,} lists and objects: expected at most {LISTS:,}")
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replayed() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        return replayed


def _lists(body: bytearray) -> int:
    """How many lists and objects begin in a body, or may begin where that is few; brackets in texts do not count."""
    count = body.count(b"[") + body.count(b"{")
    if count <= LISTS:
        return count
    bare = TEXT.sub(b"", body)
    return bare.count(b"[") + bare.count(b"{")


async def _received(receive: Receive, deadline: float) -> Message | None:
    """The next message, or None where it does not come in time."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
    return None


async def _drain(receive: Receive) -> None:
    """Read on for a while and forget it: a client that is still sending would not see why it is refused."""
    size, deadline = 0, time.monotonic() + DRAINING
    while size < DRAINED:
        message = await _received(receive, deadline)
        if message is None or message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        size += len(message.get("body", b""))


async def _refuse(refusal: RefusedError, send: Send) -> None:
    body = json.dumps(problem(refusal.message, refusal.status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status in MORE:
        headers.append(MORE[refusal.status])
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
