"""Texts from a model: generated, filled in, and scored. Text in, text out, any order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from maskless.checkpoint import Model, check_rows
from maskless.codec.text import TextCodec, parse_gaps
from maskless.decide import Sampled, decide, drafts_of
from maskless.drafts import OnStep, numbered_from
from maskless.how import How
from maskless.logits import row_keys


class Text(str):
    """A text that remembers its tokens and how they came.

    tokens: the ids; steps: for each of them the step that decided it, -1 where it was given; order: the positions that
    were decided, in the order in which they came; rounds: how many steps it took, which of exact samples are rounds.
    """

    tokens: list[int]
    steps: list[int]
    order: list[int]
    rounds: int


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
    The other keywords are those of `How`.
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
        texts += _texts(text, decide(model, drafts_of(model, tokens, known, keys, settings), watch))
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
    drafts = drafts_of(model, tokens, known, keys, settings, wanted=asked, spaced=spaced)
    filled = _texts(model.text_codec, decide(model, drafts, on_step), lengths)
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
    return decide(model, drafts_of(model, tokens, known, keys, settings), on_step)


def _texts(text: TextCodec, done: Sampled, lengths: Sequence[int] | Tensor | None = None) -> list[Text]:
    ends = [done.tokens.shape[1]] * len(done.tokens) if lengths is None else [int(n) for n in lengths]
    texts = []
    for row, end in enumerate(ends):
        one = Text(text.decode(done.tokens[row, :end].tolist()))
        one.tokens, one.steps = done.tokens[row, :end].tolist(), done.steps[row, :end].tolist()
        one.order, one.rounds = done.order[row], 1 + max(one.steps)
        texts.append(one)
    return texts
