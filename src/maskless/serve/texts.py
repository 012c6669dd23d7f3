"""Text requests as drafts, and drafts as answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isnan
from typing import Any

import torch

from maskless import decide
from maskless.codec.text import Template, lay_out, parse_gaps
from maskless.drafts import Drafts, Step
from maskless.how import How
from maskless.logits import row_keys
from maskless.serve.host import Host
from maskless.texts import document_end, template_drafts, written

_UNDERSCORES = re.compile(r"\\(_{3,})|(_{3,})")


def underscores(text: str) -> str:
    """The text with [n] for n underscores, three or more; \\___ is literal."""
    return _UNDERSCORES.sub(lambda found: found[1] or f"[{len(found[2])}]", text)


def from_template(host: Host, text: str) -> Template:
    """ "The [8] sat on ___." as tokens."""
    return parse_gaps(host.text, text, host.length).behind(host.lead)


def between(host: Host, prompt: str | list[int], gap: int, suffix: str) -> Template:
    """A gap of so many tokens between two texts, in which nothing is read as a gap; a prompt may be tokens."""
    if isinstance(prompt, str):
        return lay_out(host.text, [prompt, gap, suffix], host.length).behind(host.lead)
    led = prompt[: len(host.lead)] == host.lead
    return lay_out(host.text, [gap, suffix], host.length).behind(prompt if led else [*host.lead, *prompt])


def from_prompt(host: Host, prompt: str, length: int | None) -> Template:
    """A prompt and all that follows it, `length` tokens in all."""
    given = [*host.lead, *lay_out(host.text, [prompt], host.length).tokens]
    length, known = host.length if length is None else length, len(given)
    if not known < length <= host.length:
        most = f"{known + 1} to {host.length}" if known < host.length else f"a prompt of less than {host.length} tokens"
        raise ValueError(f"length {length} with a prompt of {known} tokens is out of range: expected {most}")
    unknown = length - known
    return Template([0] * unknown, [False] * unknown, []).behind(given)


def from_tokens(host: Host, tokens: Sequence[int | None], spaced: Sequence[int]) -> Template:
    """Token ids with null for what is to be sampled; the lead is one of them where the model has one."""
    for token in tokens:
        if token is not None and not 0 <= token < host.text.vocab:
            raise ValueError(f"a token is {token}: expected 0 to {host.text.vocab - 1}, or null for a gap")
    for position in spaced:
        if not 0 <= position < len(tokens):
            raise ValueError(f"a spaced position is {position}: expected 0 to {len(tokens) - 1}")
    return Template([token or 0 for token in tokens], [token is not None for token in tokens], sorted(set(spaced)))


def drafts_of(host: Host, templates: Sequence[Template], how: How, n: int = 1) -> Drafts:
    """n drafts of each text, each with numbers of its own: row i of a seed is the same whatever the others are."""
    L, unknown = max(len(one.known) for one in templates), max(one.known.count(False) for one in templates)
    if L > host.length:
        raise ValueError(f"the text is {L} tokens long with its gaps: expected at most {host.length}")
    if not unknown:
        raise ValueError("nothing to sample: every token is known")
    keys = row_keys(how.seed, torch.arange(n).repeat(len(templates)))
    rows = [template for template in templates for _ in range(n)]
    return host.checked(template_drafts(host.model, rows, keys, host.within(how, unknown)))


def probe(host: Host, tokens: Sequence[int | None], position: int, k: int) -> Drafts:
    """A draft of one step that samples a single position, all other known tokens given, and keeps k alternatives."""
    if host.causal:
        raise ValueError(f"{host.name} is autoregressive: alternatives need a model that sees both sides")
    template = from_tokens(host, tokens, [])
    L = len(tokens)
    if position >= L or L > host.length:
        raise ValueError(f"position {position} of {L} tokens: expected one of them, and at most {host.length}")
    wanted = torch.arange(L)[None] == position
    known = torch.tensor([template.known]) & ~wanted
    key, how = row_keys(0, torch.zeros(1, dtype=torch.long)), How(steps=1, order="random")
    drafts = decide.drafts_of(host.model, torch.tensor([template.tokens]), known, key, how, wanted=wanted)
    drafts.top = k
    return drafts


def _about(host: Host, template: Template, drafts: Drafts) -> dict[str, Any]:
    lead = len(host.lead)
    led = template.tokens[:lead] == host.lead and all(template.known[:lead])
    return {
        "model": host.name,
        "steps": drafts.steps,
        "revision_steps": drafts.steps - drafts.rounds[0],
        "lead": lead if led else 0,
        "spaced": template.spaced,
    }


def opening(host: Host, template: Template, drafts: Drafts) -> dict[str, Any]:
    """What a client can show before anything is sampled."""
    tokens = [token if known else None for token, known in zip(template.tokens, template.known, strict=True)]
    return _about(host, template, drafts) | {
        "tokens": tokens,
        "pieces": [None if token is None else host.piece(token) for token in tokens],
        "unknown": int(drafts.wanted[0].sum()),
        "texts": len(drafts),
        "draft": drafts.draft or None,
        "strands": None if drafts.strand is None else drafts.strand[0].tolist(),
    }


def landings(host: Host, steps: list[Step]) -> list[dict[str, Any]]:
    """What was sampled, step by step: rows that were computed together may be at different steps of their plans.

    Of exact rounds also the drafted tokens that were rejected.
    """
    return [
        {
            "step": step.number,
            "sampled": [
                {"row": row, "position": position, "token": token, "text": host.piece(token), "probability": p}
                for row, position, token, p in sampled(step)
            ],
        }
        | _rejected(host, step)
        for step in steps
    ]


def _rejected(host: Host, step: Step) -> dict[str, Any]:
    if step.refused is None:
        return {}
    columns = zip(*(x.tolist() for x in step.refused), strict=True)
    some = [{"row": row, "position": at, "token": token, "text": host.piece(token)} for row, at, token in columns]
    return {"rejected": some}


def sampled(step: Step) -> Iterator[tuple[int, int, int, float]]:
    """Row, position, token and probability of all that a step sampled."""
    assert step.chances is not None
    columns = (x.tolist() for x in (step.rows, step.positions, step.tokens, step.chances))
    for row, position, token, chance in zip(*columns, strict=True):
        yield row, position, token, rounded(chance)


def answer(host: Host, template: Template, drafts: Drafts, seconds: float) -> dict[str, Any]:
    """The finished texts: tokens, how they look, the step and the probability of each."""
    texts, count = [], 0
    for tokens, came, chances in zip(*(x.tolist() for x in (drafts.tokens, drafts.came, drafts.chance)), strict=True):
        end = document_end(host.text, host.model.layout, tokens, came)
        count += written(host.text, tokens[:end], came[:end])
        texts.append(
            {
                "text": host.text.decode(tokens[:end]),
                "tokens": tokens,
                "pieces": [host.piece(token) for token in tokens],
                "steps": came,
                "probabilities": [None if isnan(p) else rounded(p) for p in chances],
            }
        )
    return _about(host, template, drafts) | {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(count / max(seconds, 1e-9), 1),
        "texts": texts,
    }


def rounded(probability: float) -> float:
    """Five digits: what is beyond is noise of the arithmetic."""
    return float(f"{min(1.0, probability):.5g}")
