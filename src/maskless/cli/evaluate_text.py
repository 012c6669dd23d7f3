"""What `evaluate` measures of a model of text: the bound, generative perplexity, orders, leaks, gradient variance."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskless.cli import evaluate_tables as tables
from maskless.cli import show
from maskless.files import json_text

if TYPE_CHECKING:
    from maskless.checkpoint import Model
    from maskless.evaluate.corpora import TextSet
    from maskless.evaluate.genppl import Sample, TextPoint
    from maskless.evaluate.judge import Judge
    from maskless.evaluate.likelihood import Likelihood

ANY_ORDER, BOTH_GROUPS, PAPERS, GAPS = "any order", "both groups, stratified", "the paper's", "gaps, given the rest"
DRAWING = ("genppl", "orders")
GOES_WITH = {  # which measures an option concerns
    "split": ("bound", "genppl", "orders", "leak", "variance"),
    "sequences": ("bound", "orders", "leak"),
    "samples": ("bound", "orders"),
    "judge": DRAWING,
    "texts": DRAWING,
    "length": DRAWING,
    "steps": DRAWING,
    "counts": DRAWING,
    "temperature": DRAWING,
    "top-k": DRAWING,
    "top-p": DRAWING,
    "revise": ("genppl",),
    "order": ("genppl",),
    "out": ("genppl",),
    "save-texts": ("genppl",),
    "pairs": ("variance",),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `evaluate` that concern text; given: by name, those that were not given are None."""

    seed: int
    as_json: bool
    given: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, otherwise: Any) -> Any:
        value = self.given.get(name)
        return otherwise if value is None else value

    @property
    def how(self) -> dict[str, Any]:
        """How to draw, without the order and the steps."""
        names = ("counts", "temperature", "top-k", "top-p", "revise")
        found = {n.replace("-", "_"): self.given[n] for n in names if self.given.get(n) is not None}
        return found | {"seed": self.seed}


@dataclass(frozen=True)
class Measured:
    """What a measurement found: for a program, and for a reader."""

    found: dict[str, Any]
    show: Callable[[], None]


def evaluate_text(name: str, model: Model, asked: Asked) -> None:
    """Measure what was asked for, one after the other; the main process shows it."""
    from accelerate import PartialState

    from maskless.evaluate.corpora import corpus

    what = _what(asked)
    split = asked.get("split", "valid")
    with ExitStack() as stack:
        named = list(asked.given.get("data") or [])
        for one in what:
            if one in ("bound", "orders", "variance") and not named:
                also = "" if one == "bound" else f" for --what {one}"
                raise ValueError(
                    f"this is a model of text: expected --data DIR (a prepared folder) or a text file{also}"
                )
        corpora = [stack.enter_context(corpus(one, model, name, split)) for one in named]
        results = {one: MEASURES[one](model, corpora, asked) for one in what}
    if not PartialState().is_main_process:
        return
    if not asked.as_json:
        for measured in results.values():
            measured.show()
        return
    found = {one: measured.found for one, measured in results.items()}
    if asked.given.get("what") is None:  # what `evaluate` said before it could measure anything else
        texts = found["bound"]
        print(json_text(next(iter(texts.values())) if len(texts) == 1 else texts))
        return
    print(json_text(found))


def _what(asked: Asked) -> list[str]:
    what = [one.strip() for one in (asked.given.get("what") or "bound").split(",")]
    for one in what:
        if one not in MEASURES:
            raise ValueError(f"--what {one!r} is unknown: expected some of {', '.join(MEASURES)}")
    for option, measures in GOES_WITH.items():
        if asked.given.get(option) not in (None, False) and not set(measures) & set(what):
            raise ValueError(f"--{option} goes with --what {' or '.join(measures)}, not with {', '.join(what)}")
    if asked.given.get("revise") and "orders" in what:
        raise ValueError("--revise goes with a planned order: expected no --what orders beside it")
    if asked.given.get("save-texts") and asked.given.get("out") is None:
        raise ValueError("--save-texts keeps the texts in --out: expected --out FILE.json")
    return list(dict.fromkeys(what))


def whole_numbers(option: str, given: str) -> list[int]:
    """A number, or several with commas between."""
    try:
        return [int(number) for number in given.split(",")]
    except ValueError:
        raise ValueError(f"--{option} {given!r}: expected a whole number, or several: 8,16,32") from None


def check_files(*paths: Path | None) -> None:
    """Refuse, before any work, a file whose folder does not exist."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: {path.parent} is not a folder")


def _bar(what: str, total: int) -> Any:
    from accelerate import PartialState

    return show.bar(what, total, shown=PartialState().is_main_process)


def _bound(model: Model, corpora: list[TextSet], asked: Asked) -> Measured:
    from maskless.evaluate.likelihood import likelihood, over_rows
    from maskless.evaluate.orders import EXACT, exactly, in_gaps
    from maskless.nn.partition import chains

    network, samples = model.network, asked.get("samples", 8)
    sizes = {"sequences": asked.get("sequences", 2048), "batch": asked.get("batch", 32), "seed": asked.seed}
    chained, lead = chains(network), len(model.lead) if _codec(model) else 0
    bounds = [ANY_ORDER if model.mixture else BOTH_GROUPS, PAPERS]
    ways = bounds[: 1 if model.mixture else 2] + (list(EXACT) if chained else [])
    ways += [] if model.kind == "causal" else [GAPS]
    rows: list[tuple[str, str, Likelihood, float, float | None]] = []
    for corpus in corpora:
        results = []
        for way in ways:

            def cost(tokens: Any, counted: Any, numbers: Any, own: int, way: str = way) -> Any:
                if way == GAPS:
                    return in_gaps(network, tokens, counted, lead=lead, seed=own, samples=samples)
                return exactly(network, tokens, counted, way, lead=lead)

            with _bar(f"{way}: {Path(corpus.name).name}", min(sizes["sequences"], len(corpus.rows))) as advance:
                given: dict[str, Any] = {**sizes, "pad": corpus.pad, "on_batch": advance}
                if way in bounds:
                    given["lead"] = lead if model.mixture else 0
                    found_ = likelihood(network, corpus.rows, samples=samples, paper=way == PAPERS, **given)
                else:
                    found_ = over_rows(network, corpus.rows, cost, **given)
                results.append((way, found_))
        characters = None if corpus.codec is None else corpus.characters_per_byte()
        rows += [(corpus.name, estimator, r, corpus.bytes_per_token, characters) for estimator, r in results]
    found: dict[str, Any] = {}
    for name, estimator, r, size, characters in rows:
        bits = {"bits_per_byte": r.bits_per_byte(size), "bits_per_byte_error": r.bits_per_byte(size) * r.error / r.nats}
        if characters:
            bits |= {f"bits_per_character{end}": bits[f"bits_per_byte{end}"] / characters for end in ("", "_error")}
        found.setdefault(name, {})[estimator] = r.as_dict() | bits
    return Measured(found, lambda: tables.likelihoods(rows))


def _steps(model: Model, asked: Asked) -> list[int]:
    """The numbers of steps, each possible."""
    from maskless.evaluate.orders import unknown
    from maskless.plans import check_steps

    most = unknown(model, asked.given.get("length"))
    if model.kind == "causal":
        if asked.given.get("steps") is not None:
            raise ValueError(f"a causal model takes one step per token ({most} here): leave --steps out")
        return [most]
    steps = whole_numbers("steps", asked.get("steps", str(min(32, most))))
    for K in steps:
        check_steps(K, most)
    return steps


def _judge(model: Model, asked: Asked, otherwise: str | None) -> Judge | None:
    from maskless.evaluate.judge import judge

    name = asked.get("judge", otherwise)
    return None if name is None else judge(name, device=model.device)


def _genppl(model: Model, corpora: list[TextSet], asked: Asked) -> Measured:
    from maskless.evaluate.genppl import mauve_installed, sweep
    from maskless.evaluate.judge import DEFAULT
    from maskless.evaluate.orders import drawing

    to: Path | None = asked.given.get("out")
    check_files(to)
    if len(corpora) > 1:
        raise ValueError(f"{len(corpora)} texts: samples are compared with one --data at most")
    steps, order, n = _steps(model, asked), asked.given.get("order"), asked.get("texts", 1024)
    draw = drawing(model, order=order, length=asked.given.get("length"), **asked.how)
    judge = _judge(model, asked, DEFAULT)
    assert judge is not None
    real = corpora[0].samples(n) if corpora else None
    features = judge.features(judge.encode([one.text for one in real])) if real and mauve_installed() else None
    numbers = [0, *steps] if real else steps  # 0 steps: the data itself
    swept = partial(
        sweep,
        lambda first, count, K: draw(first, count, K) if K or real is None else real[first : first + count],
        numbers,
        n,
        judge,
        _codec(model),
        to,
        batch=asked.get("batch", 32),
        device=model.device.type,
        settings=_conditions(model, judge, corpora, real, asked, mauve=features is not None),
        reference=features,
        keep_texts=bool(asked.given.get("save-texts")),
    )
    points: list[TextPoint] = show.sweeping(swept, len(numbers), n, lambda point: f"{point.steps} steps")
    said = f"{n:,} texts, {order or 'the default'} order; judge {judge.name}" + (
        "" if features is not None or not real else "; MAUVE: not installed"
    )
    dumped = {"judge": judge.name, "points": [point.as_dict() for point in points]}
    return Measured(dumped, lambda: tables.points(points, said, to))


def _conditions(
    model: Model, judge: Judge, corpora: list[TextSet], real: list[Sample] | None, asked: Asked, *, mauve: bool
) -> dict[str, Any]:
    """What the figures of samples depend on, but for the steps, which each point has."""
    from maskless.checkpoint import digest
    from maskless.how import How

    found = {name: value for name, value in asdict(How(**asked.how)).items() if name != "steps"}
    found |= {"model": digest(model.network), "judge": judge.digest()}
    codec = _codec(model)
    found |= {"tokenizer": None if codec is None else _sha256(codec.tokenizer.to_str()), "layout": model.layout}
    found |= {"order": asked.get("order", "random"), "length": asked.given.get("length")}
    found |= {"data": corpora[0].name if corpora else None, "mauve": mauve}
    found |= {"data_sha256": None if real is None else _sha256(json_text(real))}
    return found | ({"split": asked.given["split"]} if corpora and asked.given.get("split") else {})


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _orders(model: Model, corpora: list[TextSet], asked: Asked) -> Measured:
    from maskless.evaluate.genppl import sweep
    from maskless.evaluate.likelihood import check_positive, likelihood, over_rows
    from maskless.evaluate.orders import NAMES, along, drawing

    if model.kind == "causal":
        raise ValueError("a causal model knows one order only, left to right: expected pgm or mdlm")
    corpus, length = corpora[0], asked.given.get("length")
    steps, samples, n = _steps(model, asked), asked.get("samples", 8), asked.get("texts", 256)
    sequences, batch = asked.get("sequences", 256), asked.get("batch", 32)
    check_positive(samples=samples, texts=n)
    judge = _judge(model, asked, None)
    sizes: dict[str, Any] = {"sequences": sequences, "batch": batch, "seed": asked.seed, "pad": corpus.pad}
    rows: list[tuple[str, int, Likelihood, TextPoint]] = []
    for order in NAMES:
        for K in steps:
            network = model.network

            def cost(tokens: Any, counted: Any, numbers: Any, own: int, order: str = order, K: int = K) -> Any:
                K = min(K, tokens.shape[1])
                return along(model.network, tokens, order, steps=K, samples=samples, counted=counted, seed=own)

            with _bar(f"{order}, {K} steps", min(sequences, len(corpus.rows)) + n) as advance:
                if order == "random" and corpus.rows.length <= K:  # the same, with less noise
                    bound = likelihood(network, corpus.rows, samples=samples, on_batch=advance, **sizes)
                else:
                    bound = over_rows(network, corpus.rows, cost, on_batch=advance, **sizes)
                draw = drawing(model, order=order, length=length, **asked.how)
                (point,) = sweep(draw, [K], n, judge, _codec(model), batch=batch, on_batch=advance)
            rows.append((order, K, bound, point))
    found = [
        {"order": order, "steps": K, "bound": bound.as_dict(), "samples": point.as_dict()}
        for order, K, bound, point in rows
    ]
    return Measured({"orders": found}, lambda: tables.orders(rows))


def _leak(model: Model, corpora: list[TextSet], asked: Asked) -> Measured:
    import torch

    from maskless.evaluate.leak import leak
    from maskless.evaluate.likelihood import check_positive, spread

    sequences = asked.get("sequences", 4)
    check_positive(sequences=sequences)
    codec = _codec(model)
    vocab = model.config.vocab if codec is None else min(codec.vocab, model.config.vocab)
    if corpora:
        tokens = corpora[0].rows.rows(spread(len(corpora[0].rows), sequences))
    else:
        generator = torch.Generator().manual_seed(asked.seed)
        tokens = torch.randint(0, vocab, (sequences, model.config.length), generator=generator)
    found = leak(model.network, tokens, vocab=vocab, seed=asked.seed)
    return Measured(found.as_dict(), lambda: tables.leak(found))


def _variance(model: Model, corpora: list[TextSet], asked: Asked) -> Measured:
    from maskless.evaluate.likelihood import check_positive, spread
    from maskless.evaluate.variance import gradient_variance, objectives_of

    pairs, batch, corpus = asked.get("pairs", 16), asked.get("batch", 32), corpora[0]
    check_positive(pairs=pairs, batch=batch)
    tokens = corpus.rows.rows(spread(len(corpus.rows), batch))
    valid = None if corpus.pad is None else tokens != corpus.pad
    found = []
    for name, objective in objectives_of(model.network).items():
        with _bar(f"gradients: {name}", pairs) as advance:
            how: dict[str, Any] = {"pairs": pairs, "seed": asked.seed, "valid": valid, "on_pair": advance}
            found.append(gradient_variance(model.network, tokens, objective, name, **how))
    said = f"{pairs} pairs of gradients of one batch of {len(tokens)} x {tokens.shape[1]} tokens"
    return Measured({"objectives": [one.as_dict() for one in found]}, lambda: tables.variances(found, said))


def _codec(model: Model) -> Any:
    from maskless.codec.text import TextCodec

    return model.codec if isinstance(model.codec, TextCodec) else None


MEASURES: dict[str, Callable[[Any, list[Any], Asked], Measured]] = {
    "bound": _bound,
    "genppl": _genppl,
    "orders": _orders,
    "leak": _leak,
    "variance": _variance,
}
