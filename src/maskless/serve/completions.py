"""Completions as OpenAI's clients ask for them: prompts with so many tokens behind each, whole or in chunks.

A row is one completion: those of the first prompt come first.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from typing import Any

from maskless.drafts import Drafts
from maskless.how import How
from maskless.serve import texts
from maskless.serve.host import Host
from maskless.serve.requests import CompletionRequest


class Completion:
    """Prompts, so many tokens behind each, and perhaps a suffix; and what is said about them."""

    def __init__(self, host: Host, body: CompletionRequest):
        self.host, self.body = host, body
        self.prompts = prompts_of(host, body.prompt)
        self.templates = [texts.between(host, prompt, body.max_tokens, body.suffix or "") for prompt in self.prompts]
        self.gaps = [[i for i, known in enumerate(one.known) if not known] for one in self.templates]
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self.sent: dict[int, int] = {}  # characters of each text that were streamed
        self.stops = [body.stop] if isinstance(body.stop, str) else [stop for stop in body.stop or [] if stop]

    def drafts(self, how: How) -> Drafts:
        """What is to be sampled: n times each prompt."""
        return texts.drafts_of(self.host, self.templates, how, self.body.n)

    def answer(self, drafts: Drafts) -> dict[str, Any]:
        choices = []
        for index, tokens in enumerate(drafts.tokens.tolist()):
            text, reason = self.text(index, tokens)
            choice = {"text": self._echoed(index, text), "index": index, "finish_reason": reason}
            choices.append(choice | {"logprobs": self._logprobs(index, drafts)})
        about = {"id": self.id, "created": self.created, "model": self.host.name}
        return about | {"choices": choices, "usage": self.usage(drafts)}

    def usage(self, drafts: Drafts) -> dict[str, int]:
        """Tokens of text: neither what leads every sequence nor an end and what stands behind it."""
        given = sum(sum(one.known) - len(self.host.lead) for one in self.templates)
        marks = self.host.text.marks
        written = (self._own(index, tokens) for index, tokens in enumerate(drafts.tokens.tolist()))
        sampled = sum(token not in marks for own in written for token in own)
        return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}

    def chunk(self, index: int, drafts: Drafts) -> bytes | None:
        """What can be said by now: the text as far as it is sampled without a hole."""
        came = drafts.came[index].tolist()  # first: a token stands before its step is noted
        hole, tokens = next((i for i in self._gap(index) if came[i] < 0), None), drafts.tokens[index].tolist()
        if hole is None or self.body.revise or self.body.logprobs is not None:
            return None  # the last chunk says the rest, or all where a token may change or its probability is told
        text, reason = self.text(index, tokens[:hole])
        held = max((len(stop) for stop in self.stops), default=0)  # a stop may have begun
        text = text if reason == "stop" else text[: max(0, len(text.rstrip("\ufffd")) - held)]
        return self._said(index, self._echoed(index, text), None)

    def last(self, drafts: Drafts) -> list[bytes]:
        chunks = []
        for index, tokens in enumerate(drafts.tokens.tolist()):
            text, reason = self.text(index, tokens)
            chunks.append(self._said(index, self._echoed(index, text), reason, self._logprobs(index, drafts)) or b"")
        if self._tells_usage:
            chunks.append(self._event([], self.usage(drafts)))
        return [*chunks, b"data: [DONE]\n\n"]

    def text(self, index: int, tokens: list[int]) -> tuple[str, str]:
        """The completion alone, up to the end of the document or a stop, and why it ends."""
        gap, codec = self._gap(index), self.host.text
        own = self._own(index, tokens)
        reason = "stop" if len(own) < sum(i < len(tokens) for i in gap) else "length"
        before = tokens[: gap[0]]
        text = codec.decode([*before, *own])[len(codec.decode(before)) :]  # as it reads behind the prompt
        if gap[0] in self.templates[index // self.body.n].spaced:  # the prompt brings the space itself
            text = text.removeprefix(" ")
        cuts = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return (text[: min(cuts)], "stop") if cuts else (text, reason)

    def _gap(self, index: int) -> list[int]:
        return self.gaps[index // self.body.n]

    def _own(self, index: int, tokens: list[int]) -> list[int]:
        """The tokens of a completion, as far as they are there, up to the end of the document."""
        own, eos = [tokens[i] for i in self._gap(index) if i < len(tokens)], self.host.text.eos
        return own[: own.index(eos)] if self.body.suffix is None and eos in own else own

    def _logprobs(self, index: int, drafts: Drafts) -> dict[str, Any] | None:
        """Of each token of a completion, under the model, before temperature and top-p; of no others."""
        if self.body.logprobs is None:
            return None
        tokens, chances = drafts.tokens[index].tolist(), drafts.chance[index].tolist()
        own = self._own(index, tokens)
        pieces = [self.host.piece(token) for token in own]
        logs = [math.log(max(chances[i], 1e-45)) for i in self._gap(index)[: len(own)]]
        offset = len(self._echoed(index, ""))
        offsets = [offset + sum(map(len, pieces[:i])) for i in range(len(pieces))]
        top = [{piece: log} for piece, log in zip(pieces, logs, strict=True)] if self.body.logprobs else None
        return {"tokens": pieces, "token_logprobs": logs, "top_logprobs": top, "text_offset": offsets}

    def _said(self, index: int, text: str, reason: str | None, logprobs: Any = None) -> bytes | None:
        new = text[self.sent.get(index, 0) :]
        if not new and reason is None:
            return None
        self.sent[index] = self.sent.get(index, 0) + len(new)
        return self._event([{"text": new, "index": index, "logprobs": logprobs, "finish_reason": reason}])

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        about = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.host.name}
        told = {"usage": usage} if self._tells_usage else {}
        return f"data: {json.dumps(about | {'choices': choices} | told)}\n\n".encode()

    @property
    def _tells_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _echoed(self, index: int, text: str) -> str:
        if not self.body.echo:
            return text
        prompt = self.prompts[index // self.body.n]
        return (prompt if isinstance(prompt, str) else self.host.text.decode(prompt)) + text


def prompts_of(host: Host, given: str | list[Any]) -> list[str | list[int]]:
    """Each prompt, as text or as tokens; a ValueError about a token that is none."""
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    for prompt in several:
        for token in [] if isinstance(prompt, str) else prompt:
            if token >= host.text.vocab:
                raise ValueError(f"a token of the prompt is {token}: expected 0 to {host.text.vocab - 1}")
    return [*several]
