"""Tables of what `evaluate` measured of a text model: samples, orders, leaks, gradient variance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from maskless.cli import show
from maskless.evaluate.genppl import Mean, TextPoint
from maskless.evaluate.likelihood import Likelihood
from maskless.evaluate.orders import Parallel
from maskless.evaluate.probes import Leak, Variance
from maskless.terminal import Screen, say
from maskless.train.report import or_unknown

PIPED = 200  # columns where there is no terminal: numbers must not break


def likelihoods(found: dict[str, dict[str, Any]]) -> None:
    """Bounds, by text and estimator."""
    digits = {"perplexity": 2, "nats": 4, "bits_per_byte": 4, "bits_per_character": 4}
    rows = []
    for text, ways in found.items():
        for way, one in ways.items():
            errors = {unit: one.get(f"{unit}_error", one["error"]) for unit in digits}
            cells = [_pm(one[unit], errors[unit], n) if unit in one else "" for unit, n in digits.items()]
            rows.append([text, way, *cells, f"{one['sequences']:,}"])
    units = ["perplexity", "nats per token", "bits per byte", "bits per character"]
    _table(["text", "estimator", *units, "sequences"], rows)


def image_likelihoods(found: dict[str, Likelihood]) -> None:
    """Bounds and likelihoods of images by their order: per token, and in bits for a whole image."""
    rows = []
    for name, r in found.items():
        bits = r.nats * r.tokens / r.sequences / math.log(2)
        rows.append([name, _perplexity(r), _pm(r.nats, r.error, 4), f"{bits:,.0f}", f"{r.sequences:,}"])
    _table(["order", "perplexity", "nats per token", "bits per image", "images"], rows)


def _pm(value: float, error: float, digits: int) -> str:
    """A value with its error, which a single sequence does not have."""
    return f"{value:.{digits}f} ± {or_unknown(error, f'.{digits}f')}"


def _number(mean: Mean | None, digits: int = 3) -> str:
    return "" if mean is None else _pm(mean.value, mean.error, digits)


def _perplexity(found: Likelihood | None) -> str:
    return "" if found is None else _pm(found.perplexity, found.perplexity_error, 2)


SAMPLED = ("Gen-PPL", "Gen-PPL, raw tokens", "entropy", "distinct-1/2/3/4", "longest repeat", "MAUVE", "tokens/s")


def _cells(point: TextPoint, way: str = "") -> list[str]:
    q = point.quality
    distinct = " / ".join(f"{mean.value:.3f}" for mean in q.distinct.values())
    speed = "" if point.tokens_per_second is None else f"{point.tokens_per_second:,.0f}{way}"
    variety = [_number(q.entropy), distinct, _number(q.longest_repeat, 1), _number(q.mauve)]
    return [_perplexity(q.retokenised), _perplexity(q.raw), *variety, speed]


def points(found: list[TextPoint], said: str, to: Path | None) -> None:
    """Samples by steps; where they were not all drawn in one way (batch, device), each speed says in which."""
    apart = len({point.drawn for point in found if point.tokens_per_second is not None}) > 1
    ways = [f" ({point.drawn})" if apart else "" for point in found]
    cells = [_cells(point, way) for point, way in zip(found, ways, strict=True)]
    _table(["steps", *SAMPLED], [[str(p.steps or "the data"), *own] for p, own in zip(found, cells, strict=True)])
    say(said)
    if to is not None:
        show.note(f"figures: {to}")


def orders(rows: list[tuple[str, int, Likelihood, TextPoint]]) -> None:
    cells = [
        [order, str(K), _perplexity(bound), _pm(bound.nats, bound.error, 4), *_cells(point)]
        for order, K, bound, point in rows
    ]
    _table(["order", "steps", "perplexity", "nats per token", *SAMPLED], cells)


def parallel(found: list[Parallel]) -> None:
    titles = ["order", "tokens drawn at once", "accepted", "KL of a draft, nats", "tokens per round"]
    rows = []
    for one in found:
        nats = "infinite" if one.divergence is None else f"{one.divergence:.3f}"
        rows.append([one.order, str(one.draft), f"{one.accepted:.1%}", nats, f"{one.tokens_per_round:.2f}"])
    _table(titles, rows)


def leak(found: Leak) -> None:
    share = f"{found.moved:,} of {found.predictions:,} (± {found.error:.1e})"
    gradient = "" if found.gradient is None else f"{found.gradient:.3g}"
    verdict = "no" if found.tight else "YES"
    titles = ["leaks", "predictions that moved", "largest change", "largest gradient", "moved by what they see"]
    _table(titles, [[verdict, share, f"{found.furthest:.3g}", gradient, f"{found.seen:.1%}"]])


def variances(found: list[Variance], said: str) -> None:
    base = next(one for one in found if one.objective == "mdlm")
    rows = []
    for one in found:
        of, at_cost = one.variance / base.variance, one.at_equal_cost / base.at_equal_cost
        value = f"{one.variance:.4g} ± {or_unknown(one.error, '.2g')}"
        noise = or_unknown(one.noise, ".3g")
        rows.append([one.objective, value, f"{of:.3f}", noise, f"{one.cost:.2f}", f"{at_cost:.3f}"])
    titles = ["objective", "gradient variance", "of mdlm's", "variance / signal", "cost", "at equal cost, of mdlm's"]
    _table(titles, rows)
    say(said)


def _table(titles: list[str], rows: list[list[str]]) -> None:
    """A table without the columns that are empty."""
    kept = [i for i, _ in enumerate(titles) if any(row[i] for row in rows)]
    table = Table(*(titles[i] for i in kept))
    for row in rows:
        table.add_row(*(Text(row[i]) for i in kept))
    Screen(width=None if show.out.is_terminal else PIPED).print(table)
