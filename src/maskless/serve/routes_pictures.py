"""The endpoints for pictures: draw one of a class, or redraw a part of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request

from maskless.serve import pictures
from maskless.serve.host import Host
from maskless.serve.requests import PictureAnswer, PictureFillRequest, PictureRequest, PictureSampling
from maskless.serve.routes_text import STREAMS
from maskless.serve.state import State, how_of, wants_stream
from maskless.serve.tickets import Steps, event


def picture_routes(state: State) -> APIRouter:
    """The router of both; codecs work in threads of their own, so that the event loop stays free."""
    router = APIRouter(tags=["pictures"])

    async def run(request: Request, host: Host, canvas: pictures.Canvas, body: PictureSampling) -> Any:
        drafts = pictures.drafts_of(host, canvas, how_of(body), body.label)
        if not wants_stream(request, body.stream):
            seconds = await state.whole(request, host, drafts)
            return await asyncio.to_thread(pictures.answer, host, canvas, drafts, seconds)
        first = await asyncio.to_thread(pictures.opening, host, canvas, drafts)
        tokens, known = canvas.tokens.clone(), canvas.known.clone()  # the draft itself may be further on by then

        async def landed(steps: Steps, seconds: float) -> AsyncIterator[bytes]:
            image = None
            (step,) = steps
            cells = step.positions - 1
            tokens.view(-1)[cells], known.view(-1)[cells] = step.tokens, True
            if body.frames:
                image = await asyncio.to_thread(pictures.frame, host, canvas, tokens, known)
            yield event("step", pictures.landing(host, image, step) | {"seconds": round(seconds, 4)})

        return state.stream(
            host,
            drafts,
            opened=[event("start", first)],
            landed=landed,
            ended=lambda seconds: [event("done", pictures.answer(host, canvas, drafts, seconds))],
        )

    @router.post("/v1/pictures", response_model=PictureAnswer, responses=STREAMS, summary="Draw a picture of a class")
    async def draw(request: Request, body: PictureRequest) -> Any:
        host = state.host(body.model, pictures=True)
        return await run(request, host, pictures.empty(host), body)

    @router.post("/v1/pictures/fill", response_model=PictureAnswer, responses=STREAMS, summary="Redraw a part")
    async def fill(request: Request, body: PictureFillRequest) -> Any:
        host = state.host(body.model, pictures=True)
        if body.tokens is not None:
            canvas = pictures.from_cells(host, body.tokens)
        else:
            canvas = await asyncio.to_thread(pictures.from_image, host, body.image or "", body.mask or [])
        return await run(request, host, canvas, body)

    return router
