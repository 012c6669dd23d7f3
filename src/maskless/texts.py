"""Texts from a model: generated, filled in, and scored. Text in, text out, any order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from maskless.checkpoint import Model, check_rows
from maskless.codec.text import TextCodec, parse_gaps, starts_with_space
from maskless.engine import Engine, engine_of, serves
from maskless.logits import row_keys, seed_of
from maskless.nn.calls import evaluating
from maskless.nn.causal import CausalTransformer
from maskless.order import COUNTS, ORDERS, Order, in_place
from maskless.plans import Plan, check_steps, plan_causal, plan_strands
from maskless.plans import plan as make_plan
from maskless.revision import cooled, erased, steps_of
from maskless.sampling import Filter, Step, Truncation, numbered_from, sample

OnStep = Callable[[Step], None]
TEXT_ORDERS = (*ORDERS, "strands")


class Text(str):
    """A text that remembers its tokens and how they came.

    tokens: the ids; steps: for each of them the step that decided it, -1 where it was given; order: the positions that
    were decided, in the order in which they came.
    """

    tokens: list[int]
    steps: list[int]
    order: list[int]


@dataclass(frozen=True)
class Sampled:
    """Rows of tokens and how they came."""

    tokens: Tensor  # (B, L)
    steps: Tensor  # (B, L) the step that decided each token, -1 where it was given
    order: list[list[int]]  # of each row: the decided positions, in the order in which they came


@dataclass(frozen=True, kw_only=True)
class How:
    """How to sample; `generate` and `fill` take these as keywords."""

    steps: int | None = None  # 1 to the number of unknown tokens; by default all of them in a chain model, else 32
    seed: int = 0  # the same one gives the same samples; None: others each time
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int | None = None
    top_p: float | None = None
    order: str | None = None  # random, left or strands; by default what the model was trained on
    strands: int | None = None  # parts that are written in step: about as many tokens are decided in each step
    counts: str = "uniform"
    refresh: int = 1  # full context: encode all that is known in every r-th step only (faster, no longer exact)
    revise: int = 0  # rounds in which the least likely tokens are decided again (better texts, no longer exact)

    def __post_init__(self) -> None:
        Truncation(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        if self.order == "raster":
            warnings.warn("the order raster is called left now", FutureWarning, stacklevel=4)
            object.__setattr__(self, "order", "left")
        for what, name, table in (("order", self.order, TEXT_ORDERS), ("counts", self.counts, COUNTS)):
            if name is not None and name not in table:
                raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(table)}")
        if self.strands is not None:
            if self.strands < 1:
                raise ValueError(f"strands {self.strands} is out of range: expected 1 or more")
            if self.order not in (None, "strands") or self.steps is not None or self.counts != "uniform":
                raise ValueError(
                    f"strands {self.strands} settle order, steps and counts: expected none of them beside it"
                )
        if self.refresh < 1:
            raise ValueError(f"refresh {self.refresh} is out of range: expected 1 or more")
        if self.revise < 0:
            raise ValueError(f"revise {self.revise} is out of range: expected 0 (none) or more rounds")
        object.__setattr__(self, "seed", seed_of(self.seed))


def generate_texts(
    model: Model,
    n: int = 1,
    *,
    prompt: str = "",
    length: int | None = None,
    first: int = 0,
    batch: int = 128,
    on_step: OnStep | None = None,
    **how: Any,
) -> list[Text]:
    """n texts from a model, each `length` tokens long (the model's context by default), starting with the prompt.

    Sample i of a seed is the same whatever n is; `first` starts at another sample, so that processes can share a seed.
    At most `batch` samples are computed at once, which bounds the memory and changes nothing else.
    The other keywords are those of `How`: steps, seed, temperature, top_k, top_p, order, strands, counts, refresh,
    revise.
    """
    settings, text = How(**how), model.text_codec
    context = model.config.length
    length = context if length is None else length
    given = model.lead + text.encode(prompt)
    if not len(given) < context:
        raise ValueError(f"the prompt is {len(given)} tokens long: expected less than the model's context of {context}")
    if not len(given) < length <= context:
        raise ValueError(
            f"length {length} is out of range: expected {len(given) + 1} to {context}, "
            f"more than the {len(given)} tokens given and at most the model's context"
        )
    for name, value in (("n", n), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} {value} is out of range: expected 1 or more")
    texts: list[Text] = []
    for begin in range(0, n, batch):
        rows = min(batch, n - begin)
        tokens = torch.tensor(given + [0] * (length - len(given))).repeat(rows, 1)
        known = torch.arange(length).expand(rows, length) < len(given)
        keys = row_keys(settings.seed, first + begin + torch.arange(rows))
        watch = None if on_step is None else numbered_from(begin, on_step)
        texts += _texts(text, _sample(model, tokens, known, ~known, keys, settings, watch))
    return texts


@overload
def fill_text(model: Model, text: str, *, on_step: OnStep | None = None, **how: Any) -> Text: ...
@overload
def fill_text(model: Model, text: Sequence[str], *, on_step: OnStep | None = None, **how: Any) -> list[Text]: ...
@overload
def fill_text(model: Model, text: Tensor, *, known: Tensor, on_step: OnStep | None = None, **how: Any) -> Sampled: ...


def fill_text(
    model: Model,
    text: str | Sequence[str] | Tensor,
    *,
    known: Tensor | None = None,
    numbers: Tensor | None = None,
    on_step: OnStep | None = None,
    **how: Any,
) -> Any:
    """A text with its gaps filled: "The [8] sat on [12]." has gaps of 8 and 12 tokens, decided in any order.

    A list of texts gives a list. Token ids (B, L) with a mask `known` of those that stay give a `Sampled`; numbers (B,)
    says which sample of the seed each row is (0 to B-1). A text's result does not depend on the texts beside it.
    The other keywords are those of `How`.
    """
    settings = How(**how)
    if isinstance(text, Tensor):
        return _fill_tokens(model, text, known, numbers, settings, on_step)
    if known is not None or numbers is not None:
        raise ValueError("known= goes with token ids, as numbers= does; a text marks its gaps itself: 'The [8] sat.'")
    given = [text] if isinstance(text, str) or not isinstance(text, Iterable) else text
    context = model.config.length
    templates = [parse_gaps(model.text_codec, one, context) for one in given]
    if not templates:
        return []
    lead = model.lead
    lengths = torch.tensor([len(lead) + len(template.tokens) for template in templates])
    L = int(lengths.max())
    if L > context:
        raise ValueError(f"a text with its gaps is {L} tokens long: expected at most the model's context of {context}")
    tokens, asked, spaced = torch.zeros(len(templates), L, dtype=torch.long), *torch.zeros(2, len(templates), L).bool()
    for row, template in enumerate(templates):
        end = len(lead) + len(template.tokens)
        tokens[row, :end] = torch.tensor(lead + template.tokens)
        asked[row, len(lead) : end] = ~torch.tensor(template.known)
        spaced[row, [len(lead) + i for i in template.spaced]] = True
    known = ~asked & (torch.arange(L) < lengths[:, None])
    keys = row_keys(settings.seed, torch.zeros(len(templates), dtype=torch.long))
    only = _after_space(model.text_codec, spaced, model) if spaced.any() else None
    filled = _texts(model.text_codec, _sample(model, tokens, known, asked, keys, settings, on_step, only), lengths)
    return filled[0] if isinstance(text, str) else filled


def _fill_tokens(
    model: Model, tokens: Tensor, known: Tensor | None, numbers: Tensor | None, settings: How, on_step: OnStep | None
) -> Sampled:
    if known is None or known.shape != tokens.shape or tokens.ndim != 2:
        raise ValueError("token ids to fill are (B, L), with known= a mask of the same shape")
    if not len(tokens):
        raise ValueError(f"token ids to fill are {tuple(tokens.shape)}: expected 1 row or more")
    tokens, known = tokens.cpu().clone(), known.cpu().bool()
    check_rows(model, tokens, known, only_known=True)
    numbers = torch.arange(len(tokens)) if numbers is None else numbers.cpu()
    if numbers.shape != (len(tokens),):
        raise ValueError(f"numbers {tuple(numbers.shape)} of {len(tokens)} rows: expected one for each")
    keys = row_keys(settings.seed, numbers)
    return _sample(model, tokens, known, ~known, keys, settings, on_step)


def _sample(
    model: Model,
    tokens: Tensor,
    known: Tensor,
    wanted: Tensor,
    keys: Tensor,
    how: How,
    on_step: OnStep | None,
    before: Filter | None = None,
) -> Sampled:
    """Decide the wanted tokens, in place: a draft, and then as many rounds of second thoughts as asked for."""

    def filter(temperature: float) -> Filter:
        truncation = Truncation(temperature=temperature, top_k=how.top_k, top_p=how.top_p)
        return truncation if before is None else _Both(before, truncation)

    plan = plan_of(model, known, wanted, keys, how)
    engine = engine_of(model.network) if serves(model.network) else None  # for all rounds: it looks at all weights
    _follow(model, engine, tokens, plan, keys, filter(how.temperature), how.refresh, on_step)
    came, decided, done = plan.came(), plan.decided(), plan.steps
    for number, steps in enumerate(steps_of(plan.steps, how.revise)):
        own = row_keys(number + 1, keys)
        with evaluating(model.network):
            again = erased(model.network, tokens, known, wanted, own, number=number, rounds=how.revise)
        order, counts = order_again(model, how), COUNTS[how.counts]
        plan = make_plan(known | (wanted & ~again), again, own, steps=steps, order=order, counts=counts)
        watch = None if on_step is None else _later(done, on_step)
        cool = filter(cooled(how.temperature, number, how.revise))
        cool = partial(cool)  # a plain function: rounds share buffers
        _follow(model, engine, tokens, plan, own, cool, how.refresh, watch)
        came = torch.where(again, done + plan.came(), came)
        new = plan.decided()
        decided = [[p for p in old if not again[row, p]] + new[row] for row, old in enumerate(decided)]
        done += plan.steps
    return Sampled(tokens, came, decided)


def plan_of(model: Model, known: Tensor, wanted: Tensor, keys: Tensor, how: How) -> Plan:
    """What is decided when, as asked for, or as suits the model.  (B, L), (B, L), (B,) -> Plan"""
    m = wanted.sum(1, keepdim=True)
    unknown = int(m.max())
    if isinstance(model.network, CausalTransformer):
        if how.steps not in (None, unknown):
            raise ValueError(f"a causal model takes one step per token ({unknown} here) from left to right")
        if how.revise:
            raise ValueError(f"revise {how.revise} with a causal model, which cannot go back: expected 0")
        return plan_causal(known, wanted)
    mixture, order = model.mixture, how.order or ("strands" if how.strands else None)
    trained = [] if mixture is None else mixture.strands(unknown)
    if order is None:
        order = "strands" if trained else "random"
    if mixture is not None and not (mixture.has(order) or (order == "left" and 1 in trained)):
        warnings.warn(f"this model was trained on {mixture}: the order {order} is new to it", stacklevel=5)
    if order != "strands":
        steps = how.steps if how.steps is not None else min(32, unknown) if mixture is None else unknown
        chosen = shaped(model, ORDERS[order])
        return make_plan(known, wanted, keys, steps=steps, order=chosen, counts=COUNTS[how.counts])
    if how.counts != "uniform":
        raise ValueError(f"counts {how.counts!r} with strands, which settle them: expected none")
    if how.steps is not None:
        check_steps(how.steps, unknown)
    number = how.strands or (trained[0] if trained else 1)
    longest = -(-m // number) if how.steps is None else torch.full_like(m, how.steps)  # rounded up
    return plan_strands(known, wanted, keys, longest=longest.clamp_min(1), shape=partial(shaped, model))


def order_again(model: Model, how: How) -> Order:
    """The order in which what was erased is decided again: scattered tokens are no strands."""
    return shaped(model, ORDERS["left" if how.order == "left" else "random"])


def shaped(model: Model, order: Order) -> Order:
    """The order with the known tokens as the model's training showed them: as they stand, or shuffled."""
    mixture = model.mixture
    return in_place(order) if mixture is not None and mixture.has("left", "strands", "gaps") else order


def _follow(
    model: Model,
    engine: Engine | None,
    tokens: Tensor,
    plan: Plan,
    keys: Tensor,
    filter: Filter,
    refresh: int,
    on_step: OnStep | None,
) -> None:
    """Decide tokens as planned, in place."""
    if engine is not None:
        engine.sample(tokens, plan, keys, filter=filter, refresh=refresh, on_step=on_step)
        return
    with evaluating(model.network):
        for step in sample(model.network, tokens, plan, keys, filter=filter):
            if on_step is not None:
                on_step(step)


def _later(done: int, on_step: OnStep) -> OnStep:
    return lambda step: on_step(replace(step, number=step.number + done))


@dataclass(frozen=True)
class _Both:
    """One filter after another."""

    first: Filter
    second: Filter

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return self.second(self.first(logits, rows, positions), rows, positions)


def _after_space(text: TextCodec, spaced: Tensor, model: Model) -> Filter:
    """Where the given text ends in a space before a gap, the gap starts with a token that brings the space."""
    starts = torch.zeros(model.config.vocab, dtype=torch.bool)
    starts[: text.vocab] = torch.tensor(starts_with_space(text))
    starts, spaced = starts.to(model.device), spaced.to(model.device)

    def filter(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return logits.masked_fill(spaced[rows, positions][:, None] & ~starts, -torch.inf)

    return filter


def _texts(text: TextCodec, done: Sampled, lengths: Sequence[int] | Tensor | None = None) -> list[Text]:
    ends = [done.tokens.shape[1]] * len(done.tokens) if lengths is None else [int(n) for n in lengths]
    texts = []
    for row, end in enumerate(ends):
        one = Text(text.decode(done.tokens[row, :end].tolist()))
        one.tokens, one.steps = done.tokens[row, :end].tolist(), done.steps[row, :end].tolist()
        one.order = done.order[row]
        texts.append(one)
    return texts
