"""Text requests as rows, and rows as answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from maskless.codec.text import Template, lay_out, parse_gaps
from maskless.logits import row_keys
from maskless.order import COUNTS
from maskless.plans import plan
from maskless.revision import steps_of
from maskless.sampling import Truncation
from maskless.serve.host import Host
from maskless.serve.rows import Landed, Row
from maskless.texts import How, order_again, plan_of

_BLANK = re.compile(r"\\(_{3,})|(_{3,})")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to decide the unknown tokens."""

    steps: int | None = None
    seed: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    order: str | None = None  # as the model was trained
    strands: int | None = None
    counts: str = "uniform"
    revise: int = 0
    n: int = 1


@dataclass(frozen=True)
class Gapped:
    """A text with gaps, as tokens."""

    tokens: list[int | None]  # None: to be decided
    spaced: frozenset[int] = frozenset()  # positions whose token has to begin with a space
    lead: int = 0  # tokens before the text's own, which are not shown


def blanks(text: str) -> str:
    """The text with every blank as a gap: three underscores or more are as many tokens; \\___ is literal."""
    return _BLANK.sub(lambda found: found[1] or f"[{len(found[2])}]", text)


def from_template(host: Host, text: str) -> Gapped:
    """ "The [8] sat on ___." as tokens."""
    return _led(host, parse_gaps(host.text, text, host.length))


def between(host: Host, prompt: str, gap: int, suffix: str) -> Gapped:
    """A gap of so many tokens between two texts, in which nothing is read as a gap."""
    return _led(host, lay_out(host.text, [prompt, gap, suffix], host.length))


def _led(host: Host, template: Template) -> Gapped:
    lead = host.lead
    tokens = [token if known else None for token, known in zip(template.tokens, template.known, strict=True)]
    return Gapped([*lead, *tokens], frozenset(len(lead) + i for i in template.spaced), len(lead))


def from_prompt(host: Host, prompt: str, length: int | None) -> Gapped:
    """A prompt and all that follows it, `length` tokens in all."""
    lead, given = host.lead, lay_out(host.text, [prompt], host.length).tokens
    length = host.length if length is None else length
    known = len(lead) + len(given)
    if not known < length <= host.length:
        most = f"{known + 1} to {host.length}" if known < host.length else f"a prompt of less than {host.length} tokens"
        raise ValueError(f"length {length} with a prompt of {known} tokens is out of range: expected {most}")
    return Gapped([*lead, *given, *[None] * (length - known)], frozenset(), len(lead))


def from_tokens(host: Host, tokens: Sequence[int | None], spaced: Sequence[int]) -> Gapped:
    """Token ids with null for what is to be decided; the lead is one of them where the model has one."""
    for token in tokens:
        if token is not None and not 0 <= token < host.text.vocab:
            raise ValueError(f"a token is {token}: expected 0 to {host.text.vocab - 1}, or null for a gap")
    for position in spaced:
        if not 0 <= position < len(tokens):
            raise ValueError(f"a spaced position is {position}: expected 0 to {len(tokens) - 1}")
    lead = host.lead
    led = len(lead) if list(tokens[: len(lead)]) == lead else 0
    return Gapped(list(tokens), frozenset(spaced), led)


def rows_of(host: Host, gapped: Gapped, settings: Settings) -> list[Row]:
    """n rows that fill the same gaps, each with numbers of its own: row i of a seed is the same whatever n is."""
    L, unknown = len(gapped.tokens), sum(token is None for token in gapped.tokens)
    if L > host.length:
        raise ValueError(f"the text is {L} tokens long with its gaps: expected at most {host.length}")
    if not unknown:
        raise ValueError("nothing to decide: every token is known")
    tokens = torch.tensor([0 if token is None else token for token in gapped.tokens])
    known = torch.tensor([token is not None for token in gapped.tokens])[None]
    keys = row_keys(settings.seed, torch.arange(settings.n))
    truncation = Truncation(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    confident, how = settings.order == "confidence", _how(host, settings, unknown)
    replan = partial(plan, order=order_again(host.model, how), counts=COUNTS[settings.counts])
    rows = []
    for key in keys:
        made = plan_of(host.model, known, ~known, key[None], how)
        if made.steps > host.limits.steps:
            raise ValueError(f"{made.steps} steps are more than the server allows: {host.limits.steps}")
        _check_rounds(host, settings, made.steps)
        rows.append(
            Row(
                tokens=tokens.clone(),
                plan=made,
                key=key,
                truncation=truncation,
                spaced=gapped.spaced,
                confident=confident,
                revise=settings.revise,
                replan=replan,
            )
        )
    return rows


def _how(host: Host, settings: Settings, unknown: int) -> How:
    """The settings as the library takes them: at most one step for each token, and no more than the server allows."""
    order, steps = settings.order, settings.steps
    if host.causal:
        if order not in (None, "random", "left", "raster"):
            raise ValueError(f"{host.name} writes from left to right: expected the order left")
        return How()
    if order == "confidence":
        if settings.strands is not None:
            raise ValueError(f"strands {settings.strands} go with the order 'strands', not with 'confidence'")
        order = "random"  # which decides between equals
    if steps is None and settings.strands is None and host.model.mixture is None:
        steps = min(32, host.limits.steps)
    if steps is None and settings.strands is None and unknown > host.limits.steps:
        steps = host.limits.steps
    if steps is not None and steps > host.limits.steps:
        raise ValueError(f"{steps} steps are more than the server allows: {host.limits.steps}")
    steps = None if steps is None else min(steps, unknown)
    return How(steps=steps, order=order, strands=settings.strands, counts=settings.counts)


def _check_rounds(host: Host, settings: Settings, steps: int) -> None:
    """Whether a draft of so many steps may have the second thoughts that are asked for."""
    revise, most = settings.revise, host.limits.steps
    if not revise:
        return
    if host.causal:
        raise ValueError(f"revise {revise} with {host.name}, which writes from left to right: expected 0")
    if settings.order == "confidence":
        raise ValueError(f"revise {revise} with the order confidence: expected 0, or another order")
    if (needed := steps + sum(steps_of(steps, revise))) > most:
        raise ValueError(f"{steps} steps and revise {revise} make {needed}, more than the server allows: {most}")


def opening(host: Host, gapped: Gapped, rows: Sequence[Row]) -> dict[str, Any]:
    """What a client can show before anything is decided."""
    return {
        "model": host.name,
        "steps": rows[0].steps,
        "lead": gapped.lead,
        "spaced": sorted(gapped.spaced),
        "tokens": gapped.tokens,
        "pieces": [None if token is None else host.piece(token) for token in gapped.tokens],
        "unknown": rows[0].left(),
        "texts": len(rows),
    }


def landings(host: Host, steps: list[tuple[int, Landed]]) -> list[dict[str, Any]]:
    """What was decided, step by step: rows that were computed together may be at different steps of their plans."""
    decided: dict[int, list[dict[str, Any]]] = {}
    for row, landed in steps:
        for position, token, chance in zip(landed.positions, landed.tokens, landed.probabilities, strict=True):
            one = {"row": row, "position": position, "token": token, "text": host.piece(token)}
            decided.setdefault(landed.step, []).append(one | {"probability": rounded(chance)})
    return [{"step": step, "decided": some} for step, some in sorted(decided.items())]


def answer(host: Host, gapped: Gapped, rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """The finished texts: tokens, how they look, the step and the probability of each."""
    texts = []
    for row in rows:
        tokens = row.tokens.tolist()
        texts.append(
            {
                "text": host.text.decode(tokens),
                "tokens": tokens,
                "pieces": [host.piece(token) for token in tokens],
                "came": row.came,
                "probabilities": [None if p is None else rounded(p) for p in row.probability],
            }
        )
    decided = sum(step >= 0 for row in rows for step in row.came)
    return {
        "model": host.name,
        "steps": rows[0].steps,
        "lead": gapped.lead,
        "spaced": sorted(gapped.spaced),
        "seconds": round(seconds, 4),
        "tokens_per_second": round(decided / max(seconds, 1e-9), 1),
        "texts": texts,
    }


def rounded(probability: float) -> float:
    """Five digits: what is beyond is noise of the arithmetic."""
    return float(f"{min(1.0, probability):.5g}")
