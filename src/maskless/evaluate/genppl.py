"""Generative perplexity: what a judge thinks of a model's samples, always beside how varied they are and how fast.

A low perplexity under a judge is easily had by repeating oneself: no figure of that kind goes without entropy, distinct
n-grams and the longest stretch that comes twice.

Two forms. Raw: the judge reads the model's own ids, where the vocabularies agree. Re-tokenised: it reads the text.
"""

from __future__ import annotations

import importlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from maskless.codec.text import TextCodec
from maskless.evaluate.judge import Judge
from maskless.evaluate.likelihood import Likelihood, summary
from maskless.evaluate.points import Watch, keep, kept
from maskless.how import check_positive

GRAMS = (1, 2, 3, 4)
MAUVE_SEEDS = 3  # of its clustering


class Sample(NamedTuple):
    """A text to be measured."""

    ids: list[int]
    text: str
    decided: int = 0  # tokens that were drawn for it, those after its end too


Draw = Callable[[int, int, int], list[Sample]]  # first, count, steps (0: real texts) -> samples


@dataclass(frozen=True)
class Mean:
    """A mean with its standard error, which is nan for a single value."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """Of independent values.  (N,)"""
        n = len(values)
        return cls(float(values.mean()), float(values.std()) / math.sqrt(n) if n > 1 else math.nan)


@dataclass(frozen=True)
class TextQuality:
    """What a set of texts is like. Perplexities are exp(nats) of the judge's tokens; errors are over samples."""

    samples: int
    retokenised: Likelihood | None
    raw: Likelihood | None
    entropy: Mean
    distinct: dict[int, Mean]
    longest_repeat: Mean
    mauve: Mean | None = None

    def as_dict(self) -> dict[str, Any]:
        forms = {name: one and one.as_dict() for name, one in (("retokenised", self.retokenised), ("raw", self.raw))}
        return asdict(self) | forms

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> TextQuality:
        forms = {name: _known(Likelihood, given[name]) for name in ("retokenised", "raw")}
        means = {name: _known(Mean, given[name]) for name in ("entropy", "longest_repeat", "mauve")}
        grams = {int(n): _known(Mean, mean) for n, mean in given["distinct"].items()}
        return cls(samples=given["samples"], distinct=grams, **forms, **means)


@dataclass(frozen=True)
class TextPoint:
    """The quality of what so many steps give (0: of real texts), and how fast it was drawn."""

    steps: int
    quality: TextQuality
    tokens_per_second: float | None  # None for texts that were not drawn
    texts: list[str] | None = field(default=None, repr=False, compare=False)
    drawn: str | None = field(default=None, compare=False)  # how, as far as the speed alone depends on it

    def as_dict(self) -> dict[str, Any]:
        found = {"steps": self.steps, "tokens_per_second": self.tokens_per_second, "drawn": self.drawn}
        return found | {"quality": self.quality.as_dict()} | ({} if self.texts is None else {"texts": self.texts})

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> TextPoint:
        return cls(**given | {"quality": TextQuality.from_dict(given["quality"])})


def sample_of(row: Sequence[int], codec: TextCodec, layout: str) -> Sample:
    """The text of a row of tokens. In a padded row it ends where its document ends: what follows is no text."""
    ids = list(row)
    if layout == "padded" and codec.eos in ids[1:]:  # the first is BOS, which may be the same token
        ids = ids[: ids.index(codec.eos, 1)]
    return Sample(ids, codec.decode(ids), len(row))


def entropy(tokens: Sequence[int]) -> float:
    """Of the distribution of tokens within the sequence, in nats: 0 for one token again and again.

    (The released code's "sample entropy"; that of n different tokens is log n.)
    """
    n = len(tokens)
    return -sum(count / n * math.log(count / n) for count in Counter(tokens).values()) + 0.0


def distinct(tokens: Sequence[int], n: int) -> float:
    """The share of different n-grams among all n-grams: 1 where none comes twice; 1 where there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def longest_repeat(tokens: Sequence[int]) -> int:
    """How many tokens the longest stretch has that begins at two places (which may overlap): 0 where none does."""
    packed, n = np.asarray(tokens, dtype="<u4").tobytes(), len(tokens)

    def differ(length: int) -> bool:
        places = range(n - length + 1)
        return len({packed[4 * begin : 4 * (begin + length)] for begin in places}) == len(places)

    return bisect_left(range(1, n), True, key=differ)  # a stretch that comes twice holds shorter ones that do


def quality(
    samples: Sequence[Sample], judge: Judge | None, codec: TextCodec | None = None, *, reference: Tensor | None = None
) -> TextQuality:
    """What this process's share of a set of texts, together with those of the others, is like.

    judge: or None for how varied they are alone; codec: of the ids, for the raw form where the judge has the same.
    reference: features of real texts (`judge.features`), for MAUVE.
    """
    rows, texts = [sample.ids for sample in samples], [sample.text for sample in samples]
    each = [[entropy(ids), float(longest_repeat(ids)), *(distinct(ids, n) for n in GRAMS)] for ids in rows]
    varied = _everyones(each)  # (N, 2 + grams)
    known: dict[str, Likelihood | None] = {"retokenised": None, "raw": None}
    mauve = None
    if judge is not None:
        own = judge.encode(texts)
        known["retokenised"] = _likelihood(judge.costs(own))
        if codec is not None and judge.shares_vocabulary(codec):
            known["raw"] = _likelihood(judge.costs(rows))
        if reference is not None and mauve_installed():
            features = judge.features(own).tolist() if own else []
            mauve = _mauve(reference, _everyones(features))
    return TextQuality(
        samples=len(varied),
        entropy=Mean.of(varied[:, 0]),
        longest_repeat=Mean.of(varied[:, 1]),
        distinct={n: Mean.of(varied[:, 2 + i]) for i, n in enumerate(GRAMS)},
        mauve=mauve,
        **known,
    )


def sweep(
    draw: Draw,
    steps: Sequence[int],
    n: int,
    judge: Judge | None,
    codec: TextCodec | None = None,
    path: Path | None = None,
    *,
    batch: int = 32,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
    reference: Tensor | None = None,
    keep_texts: bool = False,
    on_batch: Callable[[int], None] | None = None,
) -> Iterator[TextPoint]:
    """Yield a point for each number of steps; with a path, those in that JSON file are not computed again.

    Each process draws and judges its share of the n samples. settings: whatever else the figures depend on (model,
    judge, truncation, seed); a file made with others is an error. Samples do not depend on the batch, but their speed
    does, and on the device: a point says how it was drawn.
    """
    check_positive(texts=n, batch=batch)
    state, conditions = PartialState(), {"texts": n, **(settings or {})}
    found = kept(path, "a file of generative perplexities", conditions, TextPoint.from_dict)
    points = {point.steps: point for point in found}
    first, end = (n * rank // state.num_processes for rank in (state.process_index, state.process_index + 1))
    for K in dict.fromkeys(steps):
        if K not in points or (keep_texts and points[K].texts is None):
            batches = (draw(begin, min(batch, end - begin), K) for begin in range(first, end, batch))
            watch, samples = Watch(batches, lambda drawn: sum(one.decided for one in drawn)), list[Sample]()
            for some in watch:
                samples += some
                if on_batch is not None:
                    on_batch(len(some))
            figures = quality(samples, judge, codec, reference=reference if K else None)  # not with itself
            texts = gather_object([sample.text for sample in samples]) if keep_texts else None
            drawn = f"batch {batch}" + (f", {state.num_processes} x {device}" if device else "")
            points[K] = TextPoint(K, figures, watch.speed() if K else None, texts, drawn if K else None)
            keep(path, conditions, (points[K].as_dict() for K in sorted(points)))
        yield points[K]


def mauve_installed() -> bool:
    return find_spec("mauve") is not None


def _known(kind: type[Any], given: dict[str, Any] | None) -> Any:
    """A mean or a likelihood out of JSON, which has null for an error that is not a number."""
    if given is None:
        return None
    names = (each.name for each in fields(kind))
    return kind(**{name: math.nan if given[name] is None else given[name] for name in names})


def _everyones(rows: list[list[float]]) -> Tensor:
    """The rows of all processes, in the order of the samples.  -> (N, F) float64"""
    return torch.tensor(gather_object(rows), dtype=torch.float64)


def _likelihood(costs: Tensor) -> Likelihood:
    """Nats per token of the judge; errors over samples."""
    everyones = _everyones(costs.tolist())
    if not float(everyones[:, 1].sum()):
        raise ValueError("the samples have no text that a judge could read")
    return summary(everyones[:, 0], everyones[:, 1])


def _mauve(real: Tensor, made: Tensor) -> Mean:
    compute = importlib.import_module("mauve").compute_mauve
    p, q = real.float().numpy(), made.float().numpy()
    scores = [compute(p_features=p, q_features=q, seed=seed, verbose=False).mauve for seed in range(MAUVE_SEEDS)]
    return Mean.of(torch.tensor(scores, dtype=torch.float64))
