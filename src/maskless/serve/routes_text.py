"""The endpoints for text: generate, fill, alternatives, and completions as OpenAI's clients ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi import APIRouter, Request

from maskless.decide import drafts_of
from maskless.drafts import Drafts
from maskless.how import How
from maskless.logits import row_keys
from maskless.serve import texts
from maskless.serve.completions import Completion
from maskless.serve.host import Host
from maskless.serve.requests import (
    AlternativesAnswer,
    AlternativesRequest,
    CompletionAnswer,
    CompletionRequest,
    FillRequest,
    GenerateRequest,
    TextAnswer,
    TextSampling,
)
from maskless.serve.state import State, how_of, wants_stream
from maskless.serve.tickets import Steps, event

STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer, or its steps."}
}


def text_routes(state: State) -> APIRouter:
    """The router of all of them; long texts are read in threads, so that the event loop stays free."""
    router = APIRouter(tags=["text"])

    @router.post("/v1/generate", response_model=TextAnswer, responses=STREAMS, summary="Write texts from a prompt")
    async def generate(request: Request, body: GenerateRequest) -> Any:
        host = state.host(body.model)
        gapped = await asyncio.to_thread(texts.from_prompt, host, body.prompt, body.length)
        return await _filled(state, request, host, gapped, body)

    @router.post("/v1/fill", response_model=TextAnswer, responses=STREAMS, summary="Fill the gaps of a text")
    async def fill(request: Request, body: FillRequest) -> Any:
        host = state.host(body.model)
        if body.text is not None:
            gapped = await asyncio.to_thread(texts.from_template, host, texts.blanks(body.text))
        else:
            gapped = texts.from_tokens(host, body.tokens or [], body.spaced)
        return await _filled(state, request, host, gapped, body)

    @router.post("/v1/alternatives", response_model=AlternativesAnswer, summary="Alternatives at a position")
    async def alternatives(request: Request, body: AlternativesRequest) -> Any:
        host = state.host(body.model)
        drafts = _probe(host, body)
        await state.whole(request, host, drafts)
        found = drafts.alternatives[body.position]
        some = [{"token": t, "text": host.piece(t), "probability": texts.rounded(p)} for t, p in found]
        return {"model": host.name, "position": body.position, "alternatives": some}

    @router.post("/v1/completions", response_model=CompletionAnswer, responses=STREAMS, summary="As OpenAI's")
    async def completions(request: Request, body: CompletionRequest) -> Any:
        completion = await asyncio.to_thread(Completion, state.host(body.model), body)
        return await _completed(state, request, completion)

    return router


def _check_rows(state: State, n: int) -> None:
    if n > state.limits.rows:
        raise ValueError(f"n is {n}: expected at most {state.limits.rows} texts in a request")


async def _filled(state: State, request: Request, host: Host, gapped: texts.Gapped, body: TextSampling) -> Any:
    """Filled texts, whole or step by step."""
    _check_rows(state, body.n)
    drafts = await asyncio.to_thread(texts.drafts_of, host, gapped, how_of(body), body.n)
    if not wants_stream(request, body.stream):
        seconds = await state.whole(request, host, drafts)
        return texts.answer(host, gapped, drafts, seconds)

    async def landed(steps: Steps, seconds: float) -> AsyncIterator[bytes]:
        for one in texts.landings(host, steps):
            yield event("step", one | {"seconds": round(seconds, 4)})

    return state.stream(
        host,
        drafts,
        opened=[event("start", texts.opening(host, gapped, drafts))],
        landed=landed,
        ended=lambda seconds: [event("done", texts.answer(host, gapped, drafts, seconds))],
    )


async def _completed(state: State, request: Request, completion: Completion) -> Any:
    """Completions, whole or in chunks of what is decided without a hole."""
    host, body = completion.host, completion.body
    _check_rows(state, len(completion.prompts) * body.n)
    drafts = await asyncio.to_thread(completion.drafts, how_of(body))
    if not wants_stream(request, body.stream):
        await state.whole(request, host, drafts)
        return completion.answer(drafts)

    async def landed(steps: Steps, seconds: float) -> AsyncIterator[bytes]:
        for number in dict.fromkeys(row for step in steps for row in step.rows.tolist()):
            if chunk := completion.chunk(number, drafts):
                yield chunk

    return state.stream(host, drafts, opened=[], landed=landed, ended=lambda seconds: completion.last(drafts))


def _probe(host: Host, body: AlternativesRequest) -> Drafts:
    """A draft of one step that decides a single position, all other known tokens given."""
    if host.causal:
        raise ValueError(f"{host.name} writes from left to right: alternatives need a model that knows both sides")
    gapped = texts.from_tokens(host, body.tokens, [])
    L = len(gapped.tokens)
    if body.position >= L or L > host.length:
        raise ValueError(f"position {body.position} of {L} tokens: expected one of them, and at most {host.length}")
    tokens = torch.tensor([[0 if token is None else token for token in gapped.tokens]])
    wanted = torch.arange(L)[None] == body.position
    known = torch.tensor([[token is not None for token in gapped.tokens]]) & ~wanted
    key = row_keys(0, torch.zeros(1, dtype=torch.long))
    drafts = drafts_of(host.model, tokens, known, key, How(steps=1, order="random"), wanted=wanted)
    drafts.top = body.k
    return drafts
