"""What stands before the application: limits on what comes in, the key, and headers that keep a page to itself.

Plain ASGI, so that streams pass through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskless.serve.host import LOOPBACK, Limits
from maskless.serve.metrics import Metrics

App = ASGIApp
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
    "cache-control": "no-store",
}
CLOSE = {"connection": "close"}
MORE = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}, 408: CLOSE, 413: CLOSE}  # of an error
PATIENCE = 10.0  # seconds in which a request's body has to arrive
LISTS = 1 << 13  # lists and objects of a body: to read half a million empty ones takes a second
TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # of JSON, also one that does not end
DRAINED, DRAINING = 1 << 24, 2.0  # bytes and seconds of a body too long that are read nevertheless


def problem(message: str, status: int) -> dict[str, Any]:
    """The body of every answer that is an error; one line, whatever the message holds."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = " ".join(message.encode("utf-8", "replace").decode().split())
    return {"error": {"message": text, "type": kind, "code": status}}


def refusal(message: str, status: int) -> JSONResponse:
    """The answer that is an error."""
    return JSONResponse(problem(message, status), status, headers=MORE.get(status))


class Guard:
    """Wraps an application; `paths` are those that metrics name, others count as one."""

    def __init__(
        self, app: App, metrics: Metrics, limits: Limits, *, key: str | None, local: bool, paths: frozenset[str]
    ):
        self.app, self.metrics, self.body, self.paths = app, metrics, limits.body, paths
        self.running, self.most = 0, limits.connections - limits.connections // 8
        self.key = None if key is None else key.encode()
        self.local = local  # bound to this machine: only its own names may stand in Host, which stops DNS rebinding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 499  # the client left before an answer began

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        self.running += 1
        try:
            if self.running > self.most:
                raise HTTPException(503, f"too many requests at once: {self.most} are under way, try again in a moment")
            headers = Headers(scope=scope)
            self._check(scope, headers)
            received = await self._whole(headers, receive) if scope["method"] in ("POST", "PUT", "PATCH") else receive
            await self.app(scope, received, sending)
        except HTTPException as refused:
            await refusal(refused.detail, refused.status_code)(scope, receive, sending)
        finally:
            self.running -= 1
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.seen(path, status, time.monotonic() - begun)

    def _check(self, scope: Scope, headers: Headers) -> None:
        path, host = scope["path"], headers.get("host", "")
        name = host[1:].split("]")[0] if host.startswith("[") else host.split(":")[0]
        if self.local and name.lower() not in LOOPBACK:
            raise HTTPException(421, f"unknown host {name[:80]!r}: this server answers to localhost only")
        if self.key is not None and (path.startswith("/v1/") or path == "/metrics"):
            kind, _, given = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.key):
                raise HTTPException(401, "a key is needed: send the header 'Authorization: Bearer KEY'")
        if scope["method"] == "POST":
            content = headers.get("content-type", "").split(";")[0].strip().lower()
            if content != "application/json":  # also what keeps other sites' forms out
                raise HTTPException(415, f"content-type is {content[:80] or 'nothing'}: expected application/json")

    async def _whole(self, headers: Headers, receive: Receive) -> Receive:
        """The body, read up to the limit; what is received after it is whether the client is still there."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.body:
            await _drain(receive)
            raise HTTPException(413, f"the request is {int(length):,} bytes long: expected at most {self.body:,}")
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(PATIENCE):
                while more and len(body) <= self.body:
                    message = await receive()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)  # of a client that has left: no more
        except TimeoutError:
            raise HTTPException(408, f"the request did not arrive within {PATIENCE:.0f} seconds") from None
        if len(body) > self.body:
            await _drain(receive)
            raise HTTPException(413, f"the request is longer than {self.body:,} bytes")
        if (lists := _lists(body)) > LISTS:
            raise HTTPException(413, f"the request has {lists:,} lists and objects: expected at most {LISTS:,}")
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


async def _drain(receive: Receive) -> None:
    """Read on for a while and forget it: a client that is still sending would not see why it is refused."""
    size, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAINING):
            while more and size < DRAINED:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
