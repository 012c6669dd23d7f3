"""The endpoints for text: generate, fill, alternatives, and completions as OpenAI's clients ask for them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi import APIRouter, Request

from maskless.decide import drafts_of
from maskless.drafts import Drafts
from maskless.how import How
from maskless.logits import row_keys
from maskless.serve import texts
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
        completion = await asyncio.to_thread(_Completion, state.host(body.model), body)
        return await _completed(state, request, completion)

    return router


async def _drafts(state: State, host: Host, gapped: texts.Gapped, body: TextSampling | CompletionRequest) -> Drafts:
    """What a request asks to be decided."""
    if body.n > state.limits.rows:
        raise ValueError(f"n is {body.n}: expected at most {state.limits.rows} texts in a request")
    return await asyncio.to_thread(texts.drafts_of, host, gapped, how_of(body), body.n)


async def _filled(state: State, request: Request, host: Host, gapped: texts.Gapped, body: TextSampling) -> Any:
    """Filled texts, whole or step by step."""
    drafts = await _drafts(state, host, gapped, body)
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


async def _completed(state: State, request: Request, completion: _Completion) -> Any:
    """Completions, whole or in chunks of what is decided without a hole."""
    host, body = completion.host, completion.body
    drafts = await _drafts(state, host, completion.gapped, body)
    if not wants_stream(request, body.stream):
        await state.whole(request, host, drafts)
        return completion.answer(drafts)

    async def landed(steps: Steps, seconds: float) -> AsyncIterator[bytes]:
        for number in dict.fromkeys(row for step in steps for row in step.rows.tolist()):
            if chunk := completion.chunk(number, drafts):
                yield chunk

    return state.stream(
        host, drafts, opened=[], landed=landed, ended=lambda seconds: [*completion.last(drafts), b"data: [DONE]\n\n"]
    )


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


class _Completion:
    """A prompt, so many tokens, and perhaps a suffix; and what is said about them."""

    def __init__(self, host: Host, body: CompletionRequest):
        self.host, self.body = host, body
        self.gapped = texts.between(host, body.prompt, body.max_tokens, body.suffix or "")
        self.gap = [i for i, token in enumerate(self.gapped.tokens) if token is None]
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.sent: dict[int, int] = {}  # characters of each text that were streamed
        self.stops = [body.stop] if isinstance(body.stop, str) else [stop for stop in body.stop or [] if stop]

    def answer(self, drafts: Drafts) -> dict[str, Any]:
        choices = []
        for index, tokens in enumerate(drafts.tokens.tolist()):
            text, reason = self._text(tokens)
            choices.append({"text": self._echoed(text), "index": index, "finish_reason": reason})
        given = len(self.gapped.tokens) - len(self.gap)
        decided = len(self.gap) * len(drafts)
        usage = {"prompt_tokens": given, "completion_tokens": decided, "total_tokens": given + decided}
        about = {"id": self.id, "created": self.created, "model": self.host.name}
        return about | {"choices": choices, "usage": usage}

    def chunk(self, index: int, drafts: Drafts) -> bytes | None:
        """What can be said by now: the text as far as it is decided without a hole."""
        came = drafts.came[index].tolist()  # first: a token stands before its step is noted
        hole, tokens = next((i for i in self.gap if came[i] < 0), None), drafts.tokens[index].tolist()
        if hole is None or self.body.revise:
            return None  # the last chunk says the rest, or all where a token may change
        text, reason = self._text(tokens[:hole])
        held = max((len(stop) for stop in self.stops), default=0)  # a stop may have begun
        text = text if reason == "stop" else text[: max(0, len(text.rstrip("\ufffd")) - held)]
        return self._said(index, self._echoed(text), None)

    def last(self, drafts: Drafts) -> list[bytes]:
        chunks = []
        for index, tokens in enumerate(drafts.tokens.tolist()):
            text, reason = self._text(tokens)
            chunks.append(self._said(index, self._echoed(text), reason) or b"")
        return chunks

    def _said(self, index: int, text: str, reason: str | None) -> bytes | None:
        new = text[self.sent.get(index, 0) :]
        if not new and reason is None:
            return None
        self.sent[index] = self.sent.get(index, 0) + len(new)
        about = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.host.name}
        choice = {"text": new, "index": index, "logprobs": None, "finish_reason": reason}
        return f"data: {json.dumps(about | {'choices': [choice]})}\n\n".encode()

    def _echoed(self, text: str) -> str:
        return self.body.prompt + text if self.body.echo else text

    def _text(self, tokens: list[int]) -> tuple[str, str]:
        """The completion alone, up to the end of the document or a stop, and why it ends."""
        own, codec, reason = [tokens[i] for i in self.gap if i < len(tokens)], self.host.text, "length"
        if self.body.suffix is None and codec.eos in own:
            own, reason = own[: own.index(codec.eos)], "stop"
        before = tokens[: self.gap[0]]
        text = codec.decode([*before, *own])[len(codec.decode(before)) :]  # as it reads behind the prompt
        if self.gap[0] in self.gapped.spaced:  # the prompt brings the space itself
            text = text.removeprefix(" ")
        cuts = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return (text[: min(cuts)], "stop") if cuts else (text, reason)
