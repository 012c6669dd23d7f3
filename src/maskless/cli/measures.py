"""What `evaluate --what` measures: the bound, generative perplexity, orders, leaks, gradient variance.

A measure is a function of the model, the texts and the options that it takes; no other option goes with it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from maskless.checkpoint import Model
from maskless.cli import evaluate_tables as tables
from maskless.cli import show
from maskless.cli.checks import check_places, flag, numbers
from maskless.cli.options import Given
from maskless.codec.text import TextCodec
from maskless.evaluate.corpora import TextSet
from maskless.evaluate.corpora import corpus as open_corpus
from maskless.evaluate.genppl import Sample, TextPoint, mauve_installed, sweep
from maskless.evaluate.judge import DEFAULT, Judge
from maskless.evaluate.judge import judge as read_judge
from maskless.evaluate.likelihood import Likelihood, likelihood, over_rows, spread
from maskless.evaluate.orders import (
    EXACT,
    NAMES,
    along,
    depending_on,
    drawing,
    exactly,
    in_gaps,
    parallel,
    unknown,
    usual_steps,
)
from maskless.evaluate.probes import gradient_variance, leak, objectives_of
from maskless.files import json_text
from maskless.how import check_positive
from maskless.images import class_ids, codec_of
from maskless.nn.partition import chains
from maskless.objective import pgm_arccos
from maskless.plans import check_steps

ANY_ORDER, BOTH_GROUPS, PAPERS, GAPS = "any order", "both groups, stratified", "the paper's", "gaps, given the rest"
DRAWING = ("counts", "temperature", "top_k", "top_p")  # the options of a measure that draws: its `**how`


Measured = tuple[dict[str, Any], Callable[[], None]]  # what was found: for a program, and what shows it to a reader


def measure(
    name: str,
    model: Model,
    seed: int,
    as_json: bool,
    *,
    what: str | None = None,
    data: list[str] | None = None,
    **given: Any,
) -> None:
    """Measure what was asked for, one after the other; the main process shows it."""
    asked, results = _asked(what or "bound", given), {}
    with ExitStack() as stack:
        for one in asked:
            if one in ("bound", "orders", "variance") and not data:
                also = "" if one == "bound" else f" for --what {one}"
                raise ValueError(f"this is a text model: expected --data DIR (a prepared folder) or a text file{also}")
        split = given.get("split", "valid")
        with show.waiting("reading the data"):
            corpora = [stack.enter_context(open_corpus(source, model, name, split)) for source in data or []]
        for one in asked:
            taken = {option: value for option, value in given.items() if option in _takes(MEASURES[one])}
            results[one] = MEASURES[one](model, corpora, seed=seed, **taken)
    if not PartialState().is_main_process:
        return
    if not as_json:
        for _, show_it in results.values():
            show_it()
        return
    found = {one: measured for one, (measured, _) in results.items()}
    if what is None:  # what `evaluate` said before it could measure anything else
        texts = found["bound"]
        found = next(iter(texts.values())) if len(texts) == 1 else texts
    print(json_text(found))


def _asked(what: str, given: Given) -> list[str]:
    """The measures by name, each once; a ValueError about an option that goes with none of them."""
    asked = list(dict.fromkeys(one.strip() for one in what.split(",")))
    for one in asked:
        if one not in MEASURES:
            raise ValueError(f"--what {one!r} is unknown: expected some of {', '.join(MEASURES)}")
    for option in given:
        fitting = [one for one, measure in MEASURES.items() if option in _takes(measure)]
        if option not in ("batch", "split") and not set(fitting) & set(asked):
            raise ValueError(f"{flag(option)} goes with --what {' or '.join(fitting)}, not with {', '.join(asked)}")
    if given.get("revise") and "orders" in asked:
        raise ValueError("--revise goes with a planned order: expected no --what orders beside it")
    if given.get("save_texts") and "out" not in given:
        raise ValueError("--save-texts keeps the texts in --out: expected --out FILE.json")
    return asked


def _takes(measure: Callable[..., Measured]) -> set[str]:
    names = {*inspect.signature(measure).parameters}
    return names | {*DRAWING} if "how" in names else names


def _bound(
    model: Model, corpora: list[TextSet], *, seed: int, sequences: int = 2048, samples: int = 8, batch: int = 32
) -> Measured:
    network, lead = model.network, len(model.lead) if _codec(model) else 0

    def exact(way: str) -> Callable[..., Likelihood]:
        return partial(over_rows, cost=lambda tokens, counted, *_: exactly(network, tokens, counted, way, lead=lead))

    def gaps(tokens: Any, counted: Any, _: Any, own: int) -> Any:
        return in_gaps(network, tokens, counted, lead=lead, seed=own, samples=samples)

    ways: dict[str, Callable[..., Likelihood]]
    if model.mixture:
        ways = {ANY_ORDER: partial(likelihood, samples=samples, lead=lead)}
    else:
        ways = {BOTH_GROUPS: partial(likelihood, samples=samples), PAPERS: partial(likelihood, paper=True)}
    ways |= {way: exact(way) for way in EXACT} if chains(network) else {}
    ways |= {} if model.kind == "causal" else {GAPS: partial(over_rows, cost=gaps)}
    found: dict[str, dict[str, Any]] = {}
    for corpus in corpora:
        size, characters = corpus.bytes_per_token, None if corpus.codec is None else corpus.characters_per_byte()
        for way, of in ways.items():
            with show.bar(f"{way}: {Path(corpus.name).name}", min(sequences, len(corpus.rows))) as advance:
                sizes = {"sequences": sequences, "batch": batch, "seed": seed}
                r = of(network, corpus.rows, pad=corpus.pad, on_batch=advance, **sizes)
            bits = r.bits_per_byte(size)
            units = {"bits_per_byte": bits, "bits_per_byte_error": bits * r.error / r.nats}
            if characters:
                ends = ("", "_error")
                units |= {f"bits_per_character{end}": units[f"bits_per_byte{end}"] / characters for end in ends}
            found.setdefault(corpus.name, {})[way] = r.as_dict() | units
    return (found, lambda: tables.likelihoods(found))


def _steps(model: Model, steps: str | None, length: int | None) -> list[int]:
    """The numbers of steps, each possible."""
    most = unknown(model, length)
    if model.kind == "causal":
        if steps is not None:
            raise ValueError(f"a causal model takes one step per token ({most} here): leave --steps out")
        return [most]
    asked = [usual_steps(model, most)] if steps is None else numbers("steps", steps, int, "8,16,32")
    for K in asked:
        check_steps(K, most)
    return asked


def _genppl(
    model: Model,
    corpora: list[TextSet],
    *,
    seed: int,
    split: str | None = None,
    judge: str | None = None,
    texts: int = 1024,
    length: int | None = None,
    steps: str | None = None,
    order: str | None = None,
    revise: int = 0,
    exact: bool = False,
    draft: str | None = None,
    batch: int = 32,
    out: Path | None = None,
    save_texts: bool = False,
    **how: Any,
) -> Measured:
    check_places(out)
    if len(corpora) > 1:
        raise ValueError(f"{len(corpora)} texts: samples are compared with one --data at most")
    how |= {"seed": seed, "revise": revise}
    if exact or draft is not None:
        if steps is not None:
            raise ValueError(f"--steps {steps} with --exact, which settles them: expected one of the two")
        sizes = [None] if draft is None else numbers("draft", draft, int, "4,8,16")
        if len(sizes) > 1:
            raise ValueError(f"--draft {draft} with --what genppl: expected one number")
        how |= {"exact": exact, "draft": sizes[0]}
    asked = [unknown(model, length)] if exact else _steps(model, steps, length)
    draw = drawing(model, order=order, length=length, **how)
    by = _loaded(judge or DEFAULT, model)
    with show.waiting("judging the data"):
        real = corpora[0].samples(texts) if corpora else None
        features = by.features(by.encode([one.text for one in real])) if real and mauve_installed() else None
    points_at = [0, *asked] if real else asked  # 0 steps: the data itself
    settings = depending_on(model, order=order, length=length, **how) | {"judge": by.digest()}
    settings |= {"data": corpora[0].name if corpora else None, "mauve": features is not None}
    settings |= {"data_sha256": None if real is None else hashlib.sha256(json_text(real).encode()).hexdigest()}
    settings |= {"split": split} if corpora and split else {}

    def drawn(first: int, count: int, K: int) -> list[Sample]:
        return draw(first, count, K) if K or real is None else real[first : first + count]

    more: dict[str, Any] = {"device": model.device.type, "reference": features, "keep_texts": save_texts}
    swept = partial(sweep, drawn, points_at, texts, by, _codec(model), out, batch=batch, settings=settings, **more)
    points: list[TextPoint] = show.sweeping(swept, len(points_at), texts, lambda point: f"{point.steps} steps")
    missing = "; MAUVE: not installed" if real and features is None else ""
    said = f"{texts:,} texts, {order or 'the default'} order; judge {by.name}{missing}"
    found = {"judge": by.name, "points": [point.as_dict() for point in points]}
    return (found, lambda: tables.points(points, said, out))


def _orders(
    model: Model,
    corpora: list[TextSet],
    *,
    seed: int,
    sequences: int = 256,
    samples: int = 8,
    judge: str | None = None,
    texts: int = 256,
    length: int | None = None,
    steps: str | None = None,
    batch: int = 32,
    **how: Any,
) -> Measured:
    if model.kind == "causal":
        raise ValueError("a causal model knows one order only, left to right: expected pgm or mdlm")
    network, corpus, asked = model.network, corpora[0], _steps(model, steps, length)
    check_positive(samples=samples, texts=texts)
    by = None if judge is None else _loaded(judge, model)
    sizes: dict[str, Any] = {"sequences": sequences, "batch": batch, "seed": seed, "pad": corpus.pad}
    rows: list[tuple[str, int, Likelihood, TextPoint]] = []
    for order in NAMES:
        for K in asked:

            def cost(tokens: Any, counted: Any, _: Any, own: int, order: str = order, K: int = K) -> Any:
                K = min(K, tokens.shape[1])
                return along(network, tokens, order, steps=K, samples=samples, counted=counted, seed=own)

            with show.bar(f"{order}, {K} steps", min(sequences, len(corpus.rows)) + texts) as advance:
                if order == "random" and corpus.rows.length <= K:  # the same, with less noise
                    bound = likelihood(network, corpus.rows, samples=samples, on_batch=advance, **sizes)
                else:
                    bound = over_rows(network, corpus.rows, cost, on_batch=advance, **sizes)
                draw = drawing(model, order=order, length=length, seed=seed, **how)
                (point,) = sweep(draw, [K], texts, by, _codec(model), batch=batch, on_batch=advance)
            rows.append((order, K, bound, point))
    found = [
        {"order": order, "steps": K, "bound": bound.as_dict(), "samples": point.as_dict()}
        for order, K, bound, point in rows
    ]
    return ({"orders": found}, lambda: tables.orders(rows))


def _parallel(
    model: Model,
    corpora: list[TextSet],
    *,
    seed: int,
    order: str | None = None,
    draft: str = "4,8,16",
    texts: int = 64,
    length: int | None = None,
    batch: int = 32,
    **how: Any,
) -> Measured:
    if "counts" in how:
        raise ValueError("--counts are settled by --draft: expected no --counts with --what parallel")
    check_positive(texts=texts, batch=batch)
    sizes, orders = numbers("draft", draft, int, "4,8,16"), ["random", "strands"] if order is None else [order]
    with show.bar("drafts and checks", len(sizes) * len(orders) * texts) as advance:
        settings: dict[str, Any] = {"texts": texts, "length": length, "batch": batch, "seed": seed, **how}
        found = list(parallel(model, orders, sizes, on_batch=advance, **settings))
    return ({"parallel": [asdict(one) for one in found]}, lambda: tables.parallel(found))


def _leak(model: Model, corpora: list[TextSet], *, seed: int, sequences: int = 4) -> Measured:
    """Pictures are probed on random codes behind a BOS and with their classes in turn, texts without data on any."""
    check_positive(sequences=sequences)
    image, codec = model.layout == "image", _codec(model)
    vocab = codec_of(model).codes if image else min(codec.vocab if codec else model.config.vocab, model.config.vocab)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (sequences, model.config.length), generator=generator)
    of_pictures: dict[str, Any] = {}
    if image:
        tokens[:, 0] = vocab + 1  # BOS, after the codes and the mask
        labels = None if model.config.classes is None else class_ids(model, None, sequences)
        of_pictures = {"objective": pgm_arccos, "labels": labels}
    if corpora:
        tokens = corpora[0].rows.rows(spread(len(corpora[0].rows), sequences))
    with show.waiting("looking for leaks"):
        found = leak(model.network, tokens, vocab=vocab, seed=seed, **of_pictures)
    return (found.as_dict(), lambda: tables.leak(found))


def _variance(model: Model, corpora: list[TextSet], *, seed: int, pairs: int = 16, batch: int = 32) -> Measured:
    check_positive(pairs=pairs, batch=batch)
    corpus = corpora[0]
    tokens = corpus.rows.rows(spread(len(corpus.rows), batch))
    valid = None if corpus.pad is None else tokens != corpus.pad
    found = []
    for name, objective in objectives_of(model.network).items():
        with show.bar(f"gradients: {name}", pairs) as advance:
            how: dict[str, Any] = {"pairs": pairs, "seed": seed, "valid": valid, "on_pair": advance}
            found.append(gradient_variance(model.network, tokens, objective, name, **how))
    said = f"{pairs} pairs of gradients of one batch of {len(tokens)} x {tokens.shape[1]} tokens"
    return ({"objectives": [one.as_dict() for one in found]}, lambda: tables.variances(found, said))


def _loaded(name: str, model: Model) -> Judge:
    with show.waiting(f"loading the judge {name}"):
        return read_judge(name, device=model.device)


def _codec(model: Model) -> Any:
    return model.codec if isinstance(model.codec, TextCodec) else None


MEASURES: dict[str, Callable[..., Measured]] = {
    "bound": _bound,
    "genppl": _genppl,
    "orders": _orders,
    "parallel": _parallel,
    "leak": _leak,
    "variance": _variance,
}
