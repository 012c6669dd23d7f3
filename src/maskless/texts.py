"""Texts from a model: generated, filled in, and scored. Text in, text out, any order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from maskless.checkpoint import Model, Numbers, check_rows, whole
from maskless.codec.text import Template, TextCodec, parse_gaps
from maskless.decide import Sampled, decide, drafts_of
from maskless.drafts import Drafts, OnStep, numbered_from
from maskless.how import Choices, How, check_positive, spelled_out
from maskless.logits import row_keys

BATCH = 128  # texts that are computed at once
TURNS = 16  # exact texts are done one by one, and the next take their places: so many batches are decided together


class Text(str):
    """A text that remembers its tokens and how they came.

    tokens: the ids; steps: for each of them the step that decided it, -1 where it was given; order: the positions that
    were decided, in the order in which they came; rounds: how many steps it took, which of exact samples are rounds;
    written: how many of the decided tokens are text, without end marks, padding and what stands behind the end.
    """

    tokens: list[int]
    steps: list[int]
    order: list[int]
    rounds: int
    written: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"text": self, "tokens": self.tokens, "steps": self.steps, "order": self.order, "rounds": self.rounds}


@spelled_out
def generate_texts(
    model: Model,
    n: int = 1,
    *,
    prompt: str = "",
    length: int | None = None,
    first: int = 0,
    batch: int = BATCH,
    on_step: OnStep | None = None,
    **how: Unpack[Choices],
) -> list[Text]:
    """n texts from a model, each `length` tokens long (the model's context by default), starting with the prompt.

    Sample i of a seed is the same whatever n is; `first` starts at another sample, so that processes can share a seed.
    At most `batch` samples are computed at once, which bounds the memory and changes nothing else.
    The other keywords are those of `How`.
    """
    settings = How(**how)
    context = model.config.length
    length = context if length is None else length
    given = model.lead + model.text_codec.encode(prompt)
    if not len(given) < context:
        raise ValueError(f"the prompt is {len(given)} tokens long: expected less than the model's context of {context}")
    if not len(given) < length <= context:
        raise ValueError(
            f"length {length} is out of range: expected {len(given) + 1} to {context}, "
            f"more than the {len(given)} tokens given and at most the model's context"
        )
    check_positive(n=n, batch=batch)
    texts: list[Text] = []
    some = TURNS * batch if settings.exact else batch
    for begin in range(0, n, some):
        numbers = first + begin + torch.arange(min(some, n - begin))
        watch = None if on_step is None else numbered_from(begin, on_step)
        drafts = new_drafts(model, given, length, numbers, settings, at_once=batch)
        texts += _texts(model, decide(model, drafts, watch))
    return texts


def new_drafts(
    model: Model, given: list[int], length: int, numbers: Tensor, how: How, *, at_once: int | None = None
) -> Drafts:
    """Drafts of texts that begin with the given tokens; numbers (B,): which sample of the seed each is."""
    tokens = torch.tensor(given + [0] * (length - len(given))).repeat(len(numbers), 1)
    known = torch.arange(length).expand_as(tokens) < len(given)
    return drafts_of(model, tokens, known, row_keys(how.seed, numbers), how, at_once=at_once)


@spelled_out
def fill_text(
    model: Model,
    text: Any,
    *,
    n: int | None = None,
    known: Numbers | None = None,
    numbers: Numbers | None = None,
    on_step: OnStep | None = None,
    **how: Unpack[Choices],
) -> Any:
    """A text with its gaps filled: "The [8] sat on [12]." has gaps of 8 and 12 tokens, decided in any order.

    With n, so many ways to fill it: the first is that without n. A list of texts gives a list. Token ids (B, L) with
    a mask `known` of those that stay give a `Sampled`; numbers (B,) says which sample of the seed each row is (0 to
    B-1). A text's result does not depend on the texts beside it. The other keywords are those of `How`.
    """
    settings = How(**how)
    if _are_ids(text):
        if n is not None:
            raise ValueError(f"n {n} goes with one text: expected token ids once for each way to fill them")
        return _fill_tokens(model, whole("tokens", text), known, numbers, settings, on_step)
    if known is not None or numbers is not None:
        raise ValueError("known= goes with token ids, as numbers= does; a text marks its gaps itself: 'The [8] sat.'")
    if n is None:
        given = [text] if isinstance(text, str) or not isinstance(text, Iterable) else list(text)
        filled = _fill_templates(model, given, torch.zeros(len(given), dtype=torch.long), settings, on_step)
        return filled[0] if isinstance(text, str) else filled
    if not isinstance(text, str):
        raise ValueError(f"n {n} goes with one text: expected no list of them")
    check_positive(n=n)
    ways: list[Text] = []
    for begin in range(0, n, BATCH):
        rows = min(BATCH, n - begin)
        watch = None if on_step is None else numbered_from(begin, on_step)
        ways += _fill_templates(model, [text] * rows, begin + torch.arange(rows), settings, watch)
    return ways


def _are_ids(given: Any) -> bool:
    """Whether these are token ids: a tensor, an array, or lists of numbers."""
    if isinstance(given, list | tuple):
        return bool(given) and (isinstance(given[0], int) or _are_ids(given[0]))
    return hasattr(given, "shape")


def _fill_templates(
    model: Model, given: Sequence[str], numbers: Tensor, settings: How, on_step: OnStep | None
) -> list[Text]:
    """Each text with its gaps filled; numbers (B,): which sample of the seed each is."""
    context = model.config.length
    templates = [parse_gaps(model.text_codec, one, context).behind(model.lead) for one in given]
    if not templates:
        return []
    lengths = [len(template.tokens) for template in templates]
    if (L := max(lengths)) > context:
        raise ValueError(f"a text with its gaps is {L} tokens long: expected at most the model's context of {context}")
    drafts = template_drafts(model, templates, row_keys(settings.seed, numbers), settings)
    return _texts(model, decide(model, drafts, on_step), lengths)


def template_drafts(model: Model, templates: Sequence[Template], keys: Tensor, how: How) -> Drafts:
    """Drafts that fill the gaps of templates, which may differ in length; keys (B,) from `row_keys`."""
    B, L = len(templates), max(len(template.tokens) for template in templates)
    tokens, (known, wanted, spaced) = torch.zeros(B, L, dtype=torch.long), torch.zeros(3, B, L).bool()
    for row, template in enumerate(templates):
        own, given = slice(len(template.tokens)), torch.tensor(template.known)
        tokens[row, own], known[row, own], wanted[row, own] = torch.tensor(template.tokens), given, ~given
        spaced[row, template.spaced] = True
    return drafts_of(model, tokens, known, keys, how, wanted=wanted, spaced=spaced)


def _fill_tokens(
    model: Model, tokens: Tensor, known: Numbers, numbers: Numbers, settings: How, on_step: OnStep | None
) -> Sampled:
    known = None if known is None else torch.as_tensor(known).cpu().bool()
    if known is None or known.shape != tokens.shape or tokens.ndim != 2:
        raise ValueError("token ids to fill are (B, L), with known= a mask of the same shape")
    if not len(tokens):
        raise ValueError(f"token ids to fill are {tuple(tokens.shape)}: expected 1 row or more")
    tokens = tokens.cpu().clone()
    check_rows(model, tokens, known, only_known=True)
    numbers = torch.arange(len(tokens)) if numbers is None else whole("numbers", numbers).cpu()
    if numbers.shape != (len(tokens),):
        raise ValueError(f"numbers {tuple(numbers.shape)} of {len(tokens)} rows: expected one for each")
    keys = row_keys(settings.seed, numbers)
    return decide(model, drafts_of(model, tokens, known, keys, settings), on_step)


def document_end(codec: TextCodec, layout: str, tokens: Sequence[int], steps: Sequence[int]) -> int:
    """How many tokens of a sequence its document has: a padded one ends with the first end mark that was decided.

    What stands behind it was meant as padding, unless something there was given. steps: as those of a `Text`.
    """
    if layout == "padded":
        given = max((i for i, step in enumerate(steps) if step < 0), default=-1)
        if codec.eos in tokens[given + 1 :]:
            return tokens.index(codec.eos, given + 1)
    return len(tokens)


def written(codec: TextCodec, tokens: Sequence[int], steps: Sequence[int]) -> int:
    """How many tokens of a document were decided and are text."""
    return sum(step >= 0 and token not in codec.marks for token, step in zip(tokens, steps, strict=True))


def _texts(model: Model, done: Sampled, lengths: Sequence[int] | None = None) -> list[Text]:
    texts, codec = [], model.text_codec
    for row, end in enumerate(lengths or [done.tokens.shape[1]] * len(done.tokens)):
        tokens, steps = done.tokens[row, :end].tolist(), done.steps[row, :end].tolist()
        last = document_end(codec, model.layout, tokens, steps)
        one = Text(codec.decode(tokens[:last]))
        one.tokens, one.steps, one.written = tokens, steps, written(codec, tokens[:last], steps[:last])
        one.order, one.rounds = done.order[row], 1 + max(one.steps)
        texts.append(one)
    return texts
