"""The application: endpoints, the page, errors as one line of JSON, and the guard around it all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from maskless.logits import BrokenModelError
from maskless.serve.batcher import BusyError
from maskless.serve.guard import App, Guard, refusal
from maskless.serve.host import LOOPBACK, Host, Limits
from maskless.serve.metrics import TYPE, Metrics
from maskless.serve.requests import ErrorAnswer, Health, ModelsAnswer
from maskless.serve.routes import picture_routes, text_routes
from maskless.serve.state import State, UnknownModelError
from maskless.serve.tickets import GoneError
from maskless.version import __version__

log = logging.getLogger("maskless.serve")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorAnswer, "description": text}
    for code, text in {
        400: "An invalid value; the message names it and what was expected.",
        401: "The key is missing or wrong.",
        404: "Unknown model or path.",
        408: "The request took too long to arrive.",
        413: "The request is too long.",
        415: "Not JSON.",
        421: "A host name that is not this server's.",
        422: "A field that is missing, unknown, or of the wrong kind.",
        503: "Too busy, or stopping: try again.",
    }.items()
}
STATUSES = {UnknownModelError: 404, BrokenModelError: 500, ValueError: 400, BusyError: 503}  # the first that fits
READERS = 2  # threads that read texts and pictures and write answers: each may take 100 MB, and keeps some of it
SHARED = 1.0  # seconds between two times that a worker leaves its figures for the others
SUMMARY = "Text and images generated in parallel and in any order, without a mask token."


def build(
    hosts: Sequence[Host],
    limits: Limits,
    *,
    key: str | None = None,
    address: str = "127.0.0.1",
    share: Callable[[str], str] | None = None,
) -> App:
    """The whole application as an ASGI callable; it closes the batchers when it ends.

    `share` takes the figures of this process and returns those of all that serve together.
    """
    metrics = Metrics()
    state = State(hosts, limits, metrics)

    def figures() -> str:
        own = metrics.text(hosts)
        return own if share is None else share(own)

    async def share_figures() -> None:
        while share is not None:
            figures()
            await asyncio.sleep(SHARED)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(READERS, "reader"))
        sharing = asyncio.create_task(share_figures())
        yield
        sharing.cancel()
        for host in hosts:
            host.batcher.close()

    app = FastAPI(
        title="maskless",
        version=__version__,
        summary=SUMMARY,
        docs_url=None,  # FastAPI's own pages fetch their scripts from elsewhere
        redoc_url=None,
        responses=ERRORS,
        lifespan=lifespan,
    )
    app.include_router(text_routes(state))
    app.include_router(picture_routes(state))
    _plain_routes(app, state, figures)
    _page_routes(app)
    _error_answers(app)
    paths = frozenset([*app.openapi()["paths"], "/", "/docs"])
    return Guard(app, metrics, limits, key=key, local=address in LOOPBACK, paths=paths)


def _plain_routes(app: FastAPI, state: State, figures: Callable[[], str]) -> None:
    @app.get("/v1/models", response_model=ModelsAnswer, tags=["about"], summary="The models and their capabilities")
    async def models() -> Any:
        return {"data": [host.described() for host in state.hosts.values()]}

    @app.get("/v1/models/{name}", response_model=dict[str, Any], tags=["about"], summary="One of the models")
    async def model(name: str) -> Any:
        if name not in state.hosts:
            raise UnknownModelError(f"unknown model {name[:100]!r}: expected one of {', '.join(state.hosts)}")
        return state.hosts[name].described()

    @app.get("/healthz", response_model=Health, tags=["about"], summary="Health of the server")
    async def healthz() -> Any:
        dead = [host.name for host in state.hosts.values() if not host.batcher.thread.is_alive()]
        if dead:
            return refusal(f"the thread of {', '.join(dead)} has ended", 503)
        return {"models": list(state.hosts), "version": __version__}

    @app.get("/metrics", response_class=Response, tags=["about"], summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(figures(), media_type=TYPE)


def _page_routes(app: FastAPI) -> None:
    """The page's files, read once: no path of a request ever reaches the disk."""
    pages: dict[str, tuple[bytes, str]] = {}
    for file in files("maskless.serve").joinpath("page").iterdir():
        kind = KINDS.get(f".{file.name.rpartition('.')[2]}")
        if kind is not None:
            pages[file.name] = file.read_bytes(), kind

    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str) -> Response:
        if name not in pages:
            raise HTTPException(404, "no such page")
        content, kind = pages[name]
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await page("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return await page("docs.html")


def _error_answers(app: FastAPI) -> None:
    async def told(request: Request, error: Exception) -> Response:
        return refusal(str(error), next(status for kind, status in STATUSES.items() if isinstance(error, kind)))

    for kind in STATUSES:
        app.add_exception_handler(kind, told)

    @app.exception_handler(RequestValidationError)
    async def misformed(request: Request, error: RequestValidationError) -> Response:
        return refusal(_first(error), 422)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:100]
        known = {404: f"no such path: {path}", 405: f"{request.method} is not allowed for {path}"}
        answer = refusal(known.get(error.status_code, str(error.detail)), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(GoneError)
    async def gone(request: Request, error: GoneError) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return refusal("the server failed on this request", 500)


def _first(error: RequestValidationError | ValidationError) -> str:
    """One line about the first thing that is wrong."""
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first.get('ctx', {}).get('error', 'cannot be parsed')}"
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = f" (got {repr(given)[:60]})" if isinstance(given, str | int | float | bool) else ""
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{place[:100]}: {message}{shown}{more}" if place else f"{message}{more}"
