"""FID and Inception Score over a range of guidance: one table, one curve, and nothing computed twice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from maskless.evaluate.images import ImageQuality, SeenImages, Statistics, look, need_logits, quality, short
from maskless.evaluate.inception import Features
from maskless.evaluate.points import Watch, keep, kept
from maskless.files import write_aside

Sample = Callable[[float], Iterable[Tensor]]  # guidance -> batches of uint8 images (n, H, W, 3) of this process
Draw = Callable[[Any], None]  # on a panel of matplotlib
COLUMNS: list[tuple[str, str, int, Callable[[list[float]], float]]] = [
    ("fid", "FID", 2, min),
    ("inception_score", "Inception Score", 2, max),
    ("precision", "precision", 3, max),
    ("recall", "recall", 3, max),
]


@dataclass(frozen=True)
class ImagePoint:
    """The quality of what one guidance gives, and how fast it was drawn."""

    guidance: float
    quality: ImageQuality
    images_per_second: float | None = field(default=None, compare=False)
    drawn: str | None = field(default=None, compare=False)  # how, as far as the speed alone depends on it

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> ImagePoint:
        return cls(**given | {"quality": ImageQuality(**given["quality"])})


def sweep(
    sample: Sample,
    guidances: Sequence[float],
    network: Features,
    real: SeenImages,
    path: Path,
    *,
    score: bool = True,
    settings: Mapping[str, Any] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Iterator[ImagePoint]:
    """Yield a point for each guidance, and keep all in a JSON file: points that are in it are not computed again.

    Each process samples its own share of the images; their statistics are put together. settings: whatever else the
    figures depend on (model, steps, order, seed); a file made with others, or with another reference or network, is
    an error. score=False leaves the Inception Score out, for a network without logits.
    """
    if score:
        need_logits(network)
    for guidance in guidances:
        if not math.isfinite(guidance):
            raise ValueError(f"guidance {guidance} is out of range: expected a finite number")
    figures = ["fid"] + ["inception_score"] * score + ["precision", "recall"] * (real.features is not None)
    reference = _fingerprint(real.statistics)
    conditions = {"network": network.sha256, "reference": reference, "figures": figures, "settings": settings or {}}
    found = kept(path, "the file of a sweep", conditions, ImagePoint.from_dict, _same)
    points = {point.guidance: point for point in found}
    for guidance in dict.fromkeys(map(float, guidances)):
        if guidance not in points:
            watch = Watch(sample(guidance))
            seen = look(watch, network, keep=real.features is not None, on_batch=on_batch)
            if not score:
                seen = SeenImages(seen.statistics, None, seen.features)
            largest = max((n for n, _ in watch.made), default=0)
            drawn = f"batch {largest}, {PartialState().num_processes} x {network.device.type}"
            points[guidance] = ImagePoint(guidance, quality(seen, real, network), watch.speed(), drawn)
            keep(path, conditions, (asdict(points[guidance]) for guidance in sorted(points)))
        yield points[guidance]


def table(points: Sequence[ImagePoint]) -> str:
    """A table in Markdown, by guidance, the best of each column in bold; below it the network and the sizes.

    Where pictures were not all drawn in one way (batch, device), each speed says in which.
    """
    if not points:
        raise ValueError("no points: expected at least one guidance")
    points = sorted(points, key=lambda point: point.guidance)
    columns = [column for column in COLUMNS if any(getattr(p.quality, column[0]) is not None for p in points)]
    titles = ["guidance", *(title for _, title, *_ in columns), "images/s"]
    lines = [" | ".join(titles), "|".join("---" for _ in titles)]
    ways = {point.drawn for point in points if point.images_per_second is not None}
    for point in points:
        cells = [f"{point.guidance:g}"]
        for name, _, digits, best in columns:
            values = [value for p in points if (value := getattr(p.quality, name)) is not None]
            value = getattr(point.quality, name)
            text = "" if value is None else f"{value:.{digits}f}"
            if name == "inception_score" and value is not None:
                text += f" ± {point.quality.inception_score_error:.{digits}f}"
            cells.append(f"**{text}**" if value == best(values) and len(points) > 1 else text)
        way = f" ({point.drawn})" if len(ways) > 1 else ""
        cells.append("" if point.images_per_second is None else f"{point.images_per_second:,.1f}{way}")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines) + f"\n\n{caption(points)}"


def caption(points: Iterable[ImagePoint]) -> str:
    """What the figures rest on: the images, the reference, and the network by name and sha256; one for all points."""
    found = dict.fromkeys(described(point.quality) for point in points)
    if len(found) > 1:
        raise ValueError(f"figures that cannot be compared: {'; but '.join(found)}")
    return next(iter(found))


def described(q: ImageQuality) -> str:
    """What the figures of one set rest on."""
    known = "" if q.standard else "; not a network known to give published figures"
    return f"{q.images:,} images against {q.reference:,}; features of {q.network} ({short(q.sha256)}){known}"


def plot(curves: Mapping[str, Sequence[ImagePoint]], path: Path) -> None:
    """A PNG: FID against guidance and, where there are scores, FID against Inception Score along the guidance."""
    if not curves or not all(curves.values()):
        raise ValueError("nothing to plot: expected at least one point in each curve")
    text = caption(point for points in curves.values() for point in points)
    lines = {name: sorted(points, key=lambda point: point.guidance) for name, points in curves.items()}

    def by_guidance(panel: Any) -> None:
        for name, points in lines.items():
            (line,) = panel.plot([p.guidance for p in points], [p.quality.fid for p in points], "o-", ms=4, label=name)
            best = min(points, key=lambda point: point.quality.fid)
            panel.plot(best.guidance, best.quality.fid, "o", ms=9, mfc="none", color=line.get_color())
        panel.set_xlabel("guidance w (ring: lowest FID)")
        panel.set_ylabel("FID")

    def by_score(panel: Any) -> None:
        for name, points in lines.items():
            places = [(p.quality.inception_score or 0.0, p.quality.fid, f"{p.guidance:g}") for p in points]
            numbered_line(panel, places, label=name)
        panel.set_xlabel("Inception Score (numbers: guidance w)")
        panel.set_ylabel("FID")

    scored = all(p.quality.inception_score is not None for points in lines.values() for p in points)
    title = textwrap.fill(text, 72 * (1 + scored))
    draw_panels(path, [by_guidance, *[by_score] * scored], height=4.8, title=title, legend={})


def draw_panels(path: Path, draws: Sequence[Draw], *, height: float, legend: dict[str, Any], title: str = "") -> None:
    """A PNG with panels side by side, each with its legend."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (panels,) = pyplot.subplots(1, len(draws), figsize=(6.4 * len(draws), height), squeeze=False)
    for panel, draw in zip(panels, draws, strict=True):
        draw(panel)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, **legend)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    write_aside(path, lambda aside: figure.savefig(aside, dpi=120, format="png"))
    pyplot.close(figure)


def numbered_line(panel: Any, points: Sequence[tuple[float, float, object]], look: str = "o-", **style: Any) -> None:
    """A line through points (x, y, number), with the numbers beside them."""
    panel.plot([x for x, _, _ in points], [y for _, y, _ in points], look, ms=4, **style)
    for x, y, number in points:
        panel.annotate(f"{number}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)


def _fingerprint(statistics: Statistics) -> list[float]:
    """The count, and sums that tell mean and covariance apart: a digest would change with the last digit of a feature.

    Weights make them depend on the order of features; the mean is seen from a point off the origin, for its signs.
    """
    mean, covariance = statistics.mean, statistics.covariance
    weights, spread = torch.linspace(1, 2, len(mean)).to(mean), covariance.trace()
    apart = mean + weights * (spread / len(mean)).sqrt()
    sums = (spread, (weights * apart.square()).sum(), (weights.outer(weights) * covariance.square()).sum())
    return [statistics.n, *(float(f"{float(value):.9g}") for value in sums)]


def _same(name: str, before: Any, now: Any) -> bool:
    """Whether a condition is as it was; the sums of a reference differ a little from device to device."""
    if name != "reference" or not isinstance(before, list) or len(before) != len(now):
        return bool(before == now)
    near = (isinstance(a, int | float) and math.isclose(a, b, rel_tol=1e-5) for a, b in zip(before, now, strict=True))
    return before[0] == now[0] and all(near)
