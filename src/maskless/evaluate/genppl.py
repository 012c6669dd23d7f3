"""Generative perplexity: what a judge thinks of a model's samples, always beside how varied they are and how fast.

Two forms. Raw: the judge reads the model's own ids, where the vocabularies agree. Re-tokenised: it reads the text.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from maskless.codec.text import TextCodec
from maskless.evaluate.judge import Judge
from maskless.evaluate.likelihood import Likelihood, check_positive, summary
from maskless.evaluate.variety import distinct, entropy, longest_repeat
from maskless.files import json_text, write_aside

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
class Quality:
    """What a set of texts is like. Perplexities are exp(nats) of the judge's tokens; errors are over samples."""

    samples: int
    retokenised: Likelihood | None
    raw: Likelihood | None
    entropy: Mean
    distinct: dict[int, Mean]
    longest_repeat: Mean
    mauve: Mean | None = None

    def as_dict(self) -> dict[str, Any]:
        forms = {name: None if one is None else one.as_dict() for name, one in self._forms()}
        return json.loads(json_text(asdict(self) | forms))

    def _forms(self) -> tuple[tuple[str, Likelihood | None], ...]:
        return ("retokenised", self.retokenised), ("raw", self.raw)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Quality:
        def likelihood(found: dict[str, Any] | None) -> Likelihood | None:
            names = ("nats", "error", "sequences", "tokens")
            return None if found is None else Likelihood(**_known({name: found[name] for name in names}))

        return cls(
            samples=given["samples"],
            retokenised=likelihood(given["retokenised"]),
            raw=likelihood(given["raw"]),
            entropy=Mean(**_known(given["entropy"])),
            distinct={int(n): Mean(**_known(mean)) for n, mean in given["distinct"].items()},
            longest_repeat=Mean(**_known(given["longest_repeat"])),
            mauve=None if given["mauve"] is None else Mean(**_known(given["mauve"])),
        )


@dataclass(frozen=True)
class Point:
    """The quality of what so many steps give (0: of real texts), and how fast it was drawn."""

    steps: int
    quality: Quality
    tokens_per_second: float | None  # None for texts that were not drawn
    texts: list[str] | None = field(default=None, repr=False, compare=False)
    drawn: str | None = field(default=None, compare=False)  # how, as far as the speed alone depends on it

    def as_dict(self) -> dict[str, Any]:
        texts = {} if self.texts is None else {"texts": self.texts}
        speed = {"tokens_per_second": self.tokens_per_second, "drawn": self.drawn}
        return {"steps": self.steps, **speed, "quality": self.quality.as_dict(), **texts}


def sample_of(row: Sequence[int], codec: TextCodec, layout: str) -> Sample:
    """The text of a row of tokens. In a padded row it ends where its document ends: what follows is no text."""
    ids = list(row)
    if layout == "padded" and codec.eos in ids[1:]:  # the first is BOS, which may be the same token
        ids = ids[: ids.index(codec.eos, 1)]
    return Sample(ids, codec.decode(ids), len(row))


def quality(
    samples: Sequence[Sample],
    judge: Judge | None,
    codec: TextCodec | None = None,
    *,
    batch: int = 8,
    reference: Tensor | None = None,
) -> Quality:
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
        known["retokenised"] = _likelihood(judge.costs(own, batch=batch))
        if codec is not None and judge.shares_vocabulary(codec):
            known["raw"] = _likelihood(judge.costs(rows, batch=batch))
        if reference is not None and mauve_installed():
            features = judge.features(own, batch=batch).tolist() if own else []
            mauve = _mauve(reference, _everyones(features))
    return Quality(
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
) -> Iterator[Point]:
    """Yield a point for each number of steps; with a path, those in that JSON file are not computed again.

    Each process draws and judges its share of the n samples. settings: whatever else the figures depend on (model,
    judge, truncation, seed); a file made with others is an error. Samples do not depend on the batch, but their speed
    does, and on the device: a point says how it was drawn.
    """
    check_positive(texts=n, batch=batch)
    state, conditions = PartialState(), json.loads(json.dumps({"texts": n, **(settings or {})}))
    points: dict[int, Point] = {}
    if path is not None:
        points, problem = broadcast_object_list([*_read(path, conditions)] if state.is_main_process else [None, None])
        if problem:
            raise ValueError(problem)
    first, end = (n * rank // state.num_processes for rank in (state.process_index, state.process_index + 1))
    for K in dict.fromkeys(steps):
        if K not in points or (keep_texts and points[K].texts is None):
            samples: list[Sample] = []
            clock: list[tuple[int, float]] = []
            for begin in range(first, end, batch):
                started = time.perf_counter()
                some = draw(begin, min(batch, end - begin), K)
                clock.append((sum(sample.decided for sample in some), time.perf_counter() - started))
                samples += some
                if on_batch is not None:
                    on_batch(len(some))
            found = quality(samples, judge, codec, reference=reference if K else None)  # not with itself
            texts = gather_object([sample.text for sample in samples]) if keep_texts else None
            drawn = f"batch {batch}" + (f", {state.num_processes} x {device}" if device else "")
            points[K] = Point(K, found, _speed(clock) if K else None, texts, drawn if K else None)
            if path is not None and state.is_main_process:
                _write(path, conditions, points)
        yield points[K]


def mauve_installed() -> bool:
    return find_spec("mauve") is not None


def _known(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a mean or a likelihood; an error that JSON has as null is nan."""
    return given if given["error"] is not None else given | {"error": math.nan}


def _everyones(rows: list[list[float]]) -> Tensor:
    """The rows of all processes, in the order of the samples.  -> (N, F) float64"""
    return torch.tensor(gather_object(rows), dtype=torch.float64)


def _likelihood(costs: Tensor) -> Likelihood:
    """Nats per token of the judge; errors over samples."""
    everyones = _everyones(costs.tolist())
    if not float(everyones[:, 1].sum()):
        raise ValueError("the samples have no text that a judge could read")
    return summary(everyones[:, 0], everyones[:, 1])


def _speed(clock: list[tuple[int, float]]) -> float:
    """Tokens a second, of all processes together; without the first batch, which warms up, if there are more."""
    counted = clock[1:] or clock
    mine = sum(n for n, _ in counted) / max(1e-9, sum(seconds for _, seconds in counted))
    return float(sum(gather_object([mine])))


def _mauve(real: Tensor, made: Tensor) -> Mean:
    compute = importlib.import_module("mauve").compute_mauve
    p, q = real.float().numpy(), made.float().numpy()
    scores = [compute(p_features=p, q_features=q, seed=seed, verbose=False).mauve for seed in range(MAUVE_SEEDS)]
    return Mean.of(torch.tensor(scores, dtype=torch.float64))


def _read(path: Path, conditions: dict[str, Any]) -> tuple[dict[int, Point], str]:
    """The points of a file, and what is wrong with it."""
    if not path.exists():
        return {}, ""
    try:
        found = json.loads(path.read_text())
        points = [
            Point(p["steps"], Quality.from_dict(p["quality"]), p["tokens_per_second"], p.get("texts"), p.get("drawn"))
            for p in found["points"]
        ]
        stated = dict(found["conditions"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, f"{path} is not a file of generative perplexities: {error!r}"
    for name in conditions | stated:
        before, now = stated.get(name), conditions.get(name)
        if before != now:
            return {}, f"{path} was made with {name} {before}, not {now}: name another file"
    return {point.steps: point for point in points}, ""


def _write(path: Path, conditions: dict[str, Any], points: dict[int, Point]) -> None:
    entries = [points[K].as_dict() for K in sorted(points)]
    text = json_text({"conditions": conditions, "points": entries}, indent=1)
    write_aside(path, lambda aside: aside.write_text(text))
