"""The endpoints that sample tokens: texts, completions as OpenAI's clients ask for them, and pictures.

Long texts are read, and codecs work, in threads of their own, so that the event loop stays free.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from maskless.codec.text import Template
from maskless.serve import pictures, requests, texts
from maskless.serve.completions import Completion
from maskless.serve.host import Host
from maskless.serve.state import State, how_of
from maskless.serve.tickets import Steps, event

STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "The response, or a stream of its steps.",
    }
}


def text_routes(state: State) -> APIRouter:
    """Generate, fill, alternatives and completions."""
    router = APIRouter(tags=["text"])

    @router.post(
        "/v1/generate", response_model=requests.TextAnswer, responses=STREAMS, summary="Write texts from a prompt"
    )
    async def generate(request: Request, body: requests.GenerateRequest) -> Any:
        host = state.host(body.model)
        template = await asyncio.to_thread(texts.from_prompt, host, body.prompt, body.length)
        return await _filled(state, request, host, template, body)

    @router.post("/v1/fill", response_model=requests.TextAnswer, responses=STREAMS, summary="Fill the gaps of a text")
    async def fill(request: Request, body: requests.FillRequest) -> Any:
        host = state.host(body.model)
        if body.text is not None:
            template = await asyncio.to_thread(texts.from_template, host, texts.underscores(body.text))
        else:
            template = texts.from_tokens(host, body.tokens or [], body.spaced)
        return await _filled(state, request, host, template, body)

    @router.post("/v1/alternatives", response_model=requests.AlternativesAnswer, summary="Alternatives at a position")
    async def alternatives(request: Request, body: requests.AlternativesRequest) -> Any:
        host = state.host(body.model)
        drafts = texts.probe(host, body.tokens, body.position, body.k)
        await state.whole(request, host, drafts)
        found = drafts.alternatives[body.position]
        some = [{"token": t, "text": host.piece(t), "probability": texts.rounded(p)} for t, p in found]
        return {"model": host.name, "position": body.position, "alternatives": some}

    @router.post(
        "/v1/completions", response_model=requests.CompletionAnswer, responses=STREAMS, summary="OpenAI's completions"
    )
    async def completions(request: Request, body: requests.CompletionRequest) -> Any:
        return await _completed(state, request, state.host(body.model), body)

    return router


def picture_routes(state: State) -> APIRouter:
    """Draw a picture of a class, or redraw a part of one."""
    router = APIRouter(tags=["pictures"])

    @router.post(
        "/v1/pictures", response_model=requests.PictureAnswer, responses=STREAMS, summary="Draw an image of a class"
    )
    async def draw(request: Request, body: requests.PictureRequest) -> Any:
        host = state.host(body.model, pictures=True)
        return await _drawn(state, request, host, pictures.empty(host), body)

    @router.post(
        "/v1/pictures/fill", response_model=requests.PictureAnswer, responses=STREAMS, summary="Redraw part of an image"
    )
    async def fill(request: Request, body: requests.PictureFillRequest) -> Any:
        host = state.host(body.model, pictures=True)
        if body.tokens is not None:
            canvas = pictures.from_cells(host, body.tokens)
        else:
            canvas = await asyncio.to_thread(pictures.from_image, host, body.image or "", body.mask or [])
        return await _drawn(state, request, host, canvas, body)

    return router


def _check_rows(state: State, n: int) -> None:
    if n > state.limits.rows:
        raise ValueError(f"{n} texts: expected at most {state.limits.rows} in a request")


async def _filled(state: State, request: Request, host: Host, template: Template, body: requests.TextSampling) -> Any:
    """Filled texts, whole or step by step."""
    _check_rows(state, body.n)
    drafts = await asyncio.to_thread(texts.drafts_of, host, [template], how_of(body), body.n)

    async def landed(steps: Steps, seconds: float) -> list[bytes]:
        return [event("step", one | {"seconds": round(seconds, 4)}) for one in texts.landings(host, steps)]

    opening = partial(texts.opening, host, template, drafts)
    answer = partial(texts.answer, host, template, drafts)
    return await state.reply(request, body, host, drafts, opening=opening, landed=landed, answer=answer)


async def _completed(state: State, request: Request, host: Host, body: requests.CompletionRequest) -> Any:
    """Completions, whole or in chunks of what is sampled without a hole."""
    completion = await asyncio.to_thread(Completion, host, body)
    _check_rows(state, len(completion.prompts) * body.n)
    drafts = await asyncio.to_thread(completion.drafts, how_of(body))

    async def landed(steps: Steps, seconds: float) -> list[bytes]:
        rows = dict.fromkeys(row for step in steps for row in step.rows.tolist())
        return [chunk for row in rows if (chunk := completion.chunk(row, drafts))]

    return await state.reply(
        request,
        body,
        host,
        drafts,
        landed=landed,
        answer=lambda seconds: completion.answer(drafts),
        ended=lambda seconds: completion.last(drafts),
    )


async def _drawn(
    state: State, request: Request, host: Host, canvas: pictures.Canvas, body: requests.PictureSampling
) -> Any:
    """A picture, whole or step by step."""
    drafts = pictures.drafts_of(host, canvas, how_of(body), body.label)
    tokens, known = canvas.tokens.clone(), canvas.known.clone()  # the draft itself may be further on by then

    async def landed(steps: Steps, seconds: float) -> list[bytes]:
        (step,) = steps
        cells = step.positions - 1
        tokens.view(-1)[cells], known.view(-1)[cells] = step.tokens, True
        shown = await asyncio.to_thread(pictures.frame, host, canvas, tokens, known) if body.frames else None
        return [event("step", pictures.landing(host, shown, step) | {"seconds": round(seconds, 4)})]

    opening = partial(pictures.opening, host, canvas, drafts)
    answer = partial(pictures.answer, host, canvas, drafts)
    return await state.reply(request, body, host, drafts, opening=opening, landed=landed, answer=answer)
