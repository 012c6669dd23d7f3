"""Every number of the paper's tables and figures as a value: whose it is, what makes it here, and what the paper has.

The numbers are those of "Partition Generative Modeling" (PGM). A latency of text is batch x length / throughput in its
tables (but for two rows of Tab. 7 that are exchanged), so only the throughput stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maskless.bench import figures
from maskless.bench.case import Case, Sampling
from maskless.bench.tables import TABLES as SPEEDS
from maskless.recipes import RECIPES

PERPLEXITY, GEN_PPL, ENTROPY, TOKENS = "perplexity", "Gen-PPL", "entropy", "tokens/s"
FID, SCORE, IMAGES, ACCURACY = "FID", "Inception Score", "images/s", "accuracy"
SPIKE, GRADIENT = "largest loss / median", "largest gradient norm"


@dataclass(frozen=True)
class Bound:
    """The validation bound of a recipe's network."""

    recipe: str


@dataclass(frozen=True)
class Texts:
    """What a recipe's network writes, in several numbers of steps."""

    recipe: str
    counts: str = "uniform"
    top_p: float | None = None
    distilled: bool = False


@dataclass(frozen=True)
class Pictures:
    """What a recipe's network draws, with several weights of the guidance."""

    recipe: str
    order: str
    steps: int


@dataclass(frozen=True)
class Speed:
    """How fast a random network of these sizes is."""

    case: Case


@dataclass(frozen=True)
class Answers:
    """What a recipe's network answers to lm-eval's tasks."""

    recipe: str
    distilled: bool = False


@dataclass(frozen=True)
class Curve:
    """The training losses of a recipe, with these weights."""

    recipe: str
    weights: str


Work = Bound | Texts | Pictures | Speed | Answers | Curve


@dataclass(frozen=True, kw_only=True)
class Line:
    """One number: the paper's row, what makes it, where along that work it is read, and the paper's value."""

    model: str
    work: Work
    measure: str
    at: int | str | None = None  # steps, weight of the guidance, task, or part of a training step
    paper: float | None = None
    why_not: str = ""  # a row that does not exist here


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines under a name, and how they are drawn."""

    name: str
    about: str
    lines: tuple[Line, ...] = ()
    draw: str = "lines"  # one of report.DRAWINGS
    note: str = ""


def table(name: str) -> Table:
    if name in DRAWN_BY_HAND:
        raise ValueError(f"{name} is a drawing ({DRAWN_BY_HAND[name]}): there is nothing to measure")
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}: expected one of {', '.join(TABLES)}")
    return TABLES[name]


def _name(recipe: str) -> str:
    """lm1b-pgm-6-6-mean-200k -> LM1B, PGM 6/6 mean, 200k steps"""
    data, model, *rest = recipe.split("-")
    steps = "200k steps" if rest[-1:] == ["200k"] else "1M steps"
    sizes = [word for word in rest if word != "200k"]
    depth = "/".join(sizes[:2]) if model == "pgm" else ""
    more = sizes[2:] if model == "pgm" else sizes
    shown = " ".join([{"lm1b": "LM1B,", "owt": "OWT,"}[data], model.upper(), *([depth] if depth else []), *more])
    return f"{shown}, {steps}"


def _bounds(*recipes: str) -> Iterator[Line]:
    for recipe in recipes:
        yield Line(model=_name(recipe), work=Bound(recipe), measure=PERPLEXITY, paper=RECIPES[recipe].goals[0].value)


def _speeds(name: str) -> Iterator[Line]:
    """The rows of a table of `maskless bench`."""
    for row in SPEEDS[name].rows:
        paper = row.others(figures.PAPER)
        at = row.case.steps if isinstance(row.case, Sampling) else row.part
        work = Speed(replace(row.case, steps=1) if isinstance(row.case, Sampling) else row.case)  # the lines have them
        model = f"{row.case.name}, length {row.case.length}"
        yield Line(
            model=model, work=work, measure=row.measure.unit, at=at, paper=None if paper is None else paper.value
        )


def _main_speeds() -> Iterator[Line]:
    short: dict[str, Any] = {"length": 128, "vocab": 30_522, "layers": 12}
    for model, case, value in (  # the paper does not say in how many steps; 128, by what the rows on OpenWebText take
        ("LM1B, MDLM", replace(figures.MDLM, **short), 1_081.57),
        ("LM1B, PGM 6/6", replace(figures.PGM_8_8, **short, encoder=6), 1_930.93),
        ("OWT, MDLM", figures.MDLM, 1_043.22),
        ("OWT, PGM 8/8", figures.PGM_8_8, 5_585.57),
        ("OWT, PGM 6/6 1024", figures.PGM_6_6_1024, 5_518.09),
    ):
        yield Line(model=model, work=Speed(replace(case, steps=1)), measure=TOKENS, at=128, paper=value)


STEPS = (32, 64, 128, 256, 512, 1024)
# name, recipe, counts, sizes; then Gen-PPL and entropy after 32, 64, ..., 1024 steps.  PGM, Tab. 6
_SAMPLES = [
    ("MDLM", "owt-mdlm", "mdlm", figures.MDLM,
     "192.31 5.73  142.58 5.69  122.89 5.67  113.96 5.66  109.05 5.64  106.75 5.64"),
    ("PGM 8/8", "owt-pgm-8-8", "uniform", figures.PGM_8_8,
     "189.02 5.73  143.79 5.69  122.21 5.66  112.48 5.65  108.76 5.64  107.03 5.63"),
    ("PGM 8/8, non-uniform", "owt-pgm-8-8", "mdlm", figures.PGM_8_8,
     "194.09 5.73  143.60 5.69  124.38 5.67  116.85 5.66  111.11 5.64  108.24 5.63"),
    ("PGM 6/6 1024", "owt-pgm-6-6-1024", "uniform", figures.PGM_6_6_1024,
     "185.16 5.73  138.87 5.70  116.95 5.67  108.51 5.65  101.94 5.63  99.64 5.62"),
    ("PGM 6/6 1024, non-uniform", "owt-pgm-6-6-1024", "mdlm", figures.PGM_6_6_1024,
     "191.30 5.74  138.67 5.69  118.17 5.67  108.93 5.65  105.41 5.64  102.93 5.62"),
]  # fmt: skip
# The same after five rounds of distillation; top-p, precision of the loss.  PGM, Tab. 7
_DISTILLED = [
    ("MDLM", "owt-mdlm", None, "BF16", figures.MDLM,
     "66.26 5.49  53.98 5.46  48.02 5.44  45.86 5.42  44.21 5.40  43.19 5.38"),
    ("MDLM", "owt-mdlm", None, "FP32", figures.MDLM,
     "61.65 5.46  50.65 5.43  45.06 5.40  41.70 5.37  40.63 5.36  39.50 5.32"),
    ("PGM 6/6 1024", "owt-pgm-6-6-1024", None, "BF16", figures.PGM_6_6_1024,
     "91.61 5.56  72.73 5.52  63.83 5.49  58.74 5.47  58.77 5.47  56.47 5.46"),
    ("PGM 6/6 1024, nucleus 0.9", "owt-pgm-6-6-1024", 0.9, "BF16", figures.PGM_6_6_1024,
     "68.33 5.50  53.88 5.45  46.99 5.42  43.22 5.40  42.79 5.39  40.99 5.38"),
    ("PGM 6/6 1024", "owt-pgm-6-6-1024", None, "FP32", figures.PGM_6_6_1024,
     "84.97 5.52  67.60 5.49  60.06 5.47  55.97 5.45  54.13 5.44  52.77 5.44"),
    ("PGM 6/6 1024, nucleus 0.9", "owt-pgm-6-6-1024", 0.9, "FP32", figures.PGM_6_6_1024,
     "63.46 5.45  49.94 5.41  43.84 5.39  40.76 5.36  39.46 5.36  38.81 5.35"),
    ("PGM 8/8", "owt-pgm-8-8", None, "BF16", figures.PGM_8_8,
     "102.64 5.54  82.93 5.50  73.19 5.48  70.30 5.47  68.07 5.46  65.87 5.44"),
    ("PGM 8/8", "owt-pgm-8-8", None, "FP32", figures.PGM_8_8,
     "87.64 5.51  70.47 5.48  62.66 5.46  59.38 5.45  57.57 5.44  56.12 5.44"),
]  # fmt: skip
_NUCLEUS = (18_866.12, 10_307.16, 5_375.20, 2_742.74, 1_386.79, 699.80)  # tokens/s of PGM 6/6 1024
FP32_ONLY = "our distillation has its loss in float32 only"


def _written(model: str, work: Texts, case: Sampling, row: str, why_not: str = "") -> Iterator[Line]:
    numbers = [float(number) for number in row.split()]
    for i, K in enumerate(STEPS):
        speed = figures.figure(figures.PAPER, replace(case, steps=K, counts=work.counts), "sample", figures.TOKENS)
        assert speed is not None
        value = _NUCLEUS[i] if work.top_p else speed.value
        for measure, paper in ((GEN_PPL, numbers[2 * i]), (ENTROPY, numbers[2 * i + 1]), (TOKENS, value)):
            yield Line(model=model, work=work, measure=measure, at=K, paper=paper, why_not=why_not)


def _samples() -> Iterator[Line]:
    for model, recipe, counts, case, row in _SAMPLES:
        yield from _written(model, Texts(recipe, counts), case, row)


def _distilled() -> Iterator[Line]:
    for model, recipe, top_p, precision, case, row in _DISTILLED:
        counts = "mdlm" if recipe == "owt-mdlm" else "uniform"
        work = Texts(recipe, counts, top_p, distilled=True)
        name, why_not = f"{model}, loss in {precision}", FP32_ONLY if precision == "BF16" else ""
        yield from _written(name, work, case, row, why_not)


# Throughput with the guidance 0, and with any other.  PGM, Tab. 8 and 9
_DRAWN = """
confidence  maskgit 32 2.05 1.05  maskgit 64 1.03 0.52  pgm-12-12 32 6.86 3.76  pgm-12-12 64 3.52 1.90
confidence  pgm-14-10 32 7.09 3.90  pgm-14-10 64 3.63 1.97
halton      maskgit 32 2.02 1.05  maskgit 64 1.03 0.52  pgm-12-12 32 13.44 7.93  pgm-12-12 64 7.17 4.12
halton      pgm-14-10 32 12.70 7.37  pgm-14-10 64 6.69 3.80
"""
_PICTURED = {"maskgit": "MaskGIT", "pgm-12-12": "PGM 12/12", "pgm-14-10": "PGM 14/10"}


def _drawn(wanted: str) -> Iterator[Line]:
    for order, *rest in map(str.split, _DRAWN.strip().splitlines()):
        for name, steps, plain, guided in zip(*(rest[i::4] for i in range(4)), strict=True) if order == wanted else ():
            recipe = f"imagenet-{name}"
            goals = {(goal.figure, goal.at): goal.value for goal in RECIPES[recipe].goals}
            for w in range(7):
                at = f"{order}, {steps} steps, w = {w}"
                values = {FID: goals[FID, at], SCORE: goals[SCORE, at], IMAGES: float(guided if w else plain)}
                work, model = Pictures(recipe, order, int(steps)), f"{_PICTURED[name]}, {steps} steps"
                yield from (Line(model=model, work=work, measure=m, at=w, paper=v) for m, v in values.items())


# PGM, Tab. 2 (before, then after distillation) and Tab. 4
_TASKS = "lambada_openai arc_easy boolq hellaswag openbookqa piqa race social_iqa"
_ANSWERED = [
    ("MDLM", "owt-mdlm",
     "38.52 37.88 49.42 31.36 28.60 58.27 28.04 38.84", "41.34 33.80 48.59 30.75 28.80 57.73 27.94 38.79"),
    ("PGM 8/8", "owt-pgm-8-8",
     "46.98 40.40 53.49 33.20 26.60 58.92 26.89 39.97", "47.22 37.42 51.50 31.62 25.80 59.03 30.62 39.61"),
    ("PGM 6/6 1024", "owt-pgm-6-6-1024",
     "41.39 39.98 49.82 34.27 25.40 59.19 27.37 40.28", "44.48 36.70 49.36 32.55 25.00 59.85 27.37 39.25"),
]  # fmt: skip
_MORE_TASKS = "lambada_openai arc_easy arc_challenge hellaswag mathqa piqa winogrande"
_ANSWERED_MORE = [
    ("MDLM", "owt-mdlm", "38.52 34.26 24.66 31.54 20.70 57.89 51.93"),
    ("PGM 8/8", "owt-pgm-8-8", "46.98 37.37 24.06 33.10 21.24 59.09 51.30"),
    ("PGM 6/6 1024", "owt-pgm-6-6-1024", "41.39 38.80 22.95 33.92 21.71 61.43 54.30"),
]


def _answers(tasks: str, rows: Sequence[tuple[str, ...]]) -> Iterator[Line]:
    for model, recipe, *stages in rows:
        for stage, numbers in enumerate(stages):
            work, name = Answers(recipe, distilled=stage == 1), f"{model}{', distilled' * stage}"
            for task, number in zip(tasks.split(), numbers.split(), strict=True):
                yield Line(model=name, work=work, measure=ACCURACY, at=task, paper=float(number))


def _curves() -> Iterator[Line]:
    for model, recipe, weights in (
        ("MDLM", "owt-mdlm", ""),
        ("MDLM complementary, bounded weights", "owt-mdlm-complementary", "bounded"),
        ("MDLM complementary, released weights", "owt-mdlm-complementary", "released"),
        ("PGM 8/8, bounded weights", "owt-pgm-8-8", "bounded"),
        ("PGM 8/8, released weights", "owt-pgm-8-8", "released"),
    ):
        for measure in (SPIKE, GRADIENT):
            yield Line(model=model, work=Curve(recipe, weights), measure=measure)


def _tables() -> Iterator[Table]:
    rows = [recipe.name for recipe in RECIPES.values() if recipe.source.startswith("PGM, Tab. 5")]
    long = [name for name in rows if not name.endswith("-200k")]
    samples, distilled, halton = tuple(_samples()), tuple(_distilled()), tuple(_drawn("halton"))
    norm = "Accuracy without length normalisation; the paper does not say which it has, and its two tables differ."
    latency = "The paper's latencies of one picture: `maskless bench sample --table images`."
    main = "Speed with random weights; the paper does not state the steps on LM1B, 128 fits its latencies."
    yield Table(name="table-1", about="validation perplexity and throughput of text models", draw="losses",
                lines=(*_bounds(*long), *_main_speeds()), note=main)  # fmt: skip
    yield Table(name="table-2", about="downstream tasks, before and after distillation",
                lines=tuple(_answers(_TASKS, _ANSWERED)), note=norm)  # fmt: skip
    yield Table(name="table-3", about="speed of training", lines=tuple(_speeds("paper-training")))
    yield Table(name="table-4", about="more downstream tasks",
                lines=tuple(_answers(_MORE_TASKS, _ANSWERED_MORE)), note=norm)  # fmt: skip
    yield Table(name="table-5", about="validation perplexity of all variants", draw="losses",
                lines=tuple(_bounds(*rows)))  # fmt: skip
    yield Table(name="table-6", about="quality and speed of samples on OpenWebText", lines=samples)
    yield Table(name="table-7", about="the same after distillation", lines=distilled)
    yield Table(name="table-8", about="ImageNet, confidence sampler", lines=tuple(_drawn("confidence")), note=latency)
    yield Table(name="table-9", about="ImageNet, Halton sampler", lines=halton, note=latency)
    yield Table(name="table-10", about="throughput at length 4096", lines=tuple(_speeds("paper-context-4096")))
    quality = [line for line in halton if line.measure != SCORE and "14/10" not in line.model]
    written = [line for line in samples if line.measure != ENTROPY and "non-uniform" not in line.model]
    after = [line for line in distilled if line.model.startswith(("MDLM", "PGM 6/6")) and line.model.endswith("FP32")]
    yield Table(name="figure-1", about="quality against throughput: FID, and generative perplexity", draw="quality",
                lines=(*quality, *written), note="A point of FID has the guidance with the lowest one.")  # fmt: skip
    yield Table(name="figure-4", about="generative perplexity against throughput after distillation", draw="quality",
                lines=tuple(line for line in after if line.measure != ENTROPY))  # fmt: skip
    yield Table(name="figure-5", about="Halton and random orders on a grid", draw="orders",
                note="The confidence order is that of a model: `maskless generate MODEL --gif`.")  # fmt: skip
    yield Table(name="figure-6", about="training losses, with and without bounded weights, against steps and time",
                draw="losses", lines=tuple(_curves()))  # fmt: skip


DRAWN_BY_HAND = {"figure-2": "masked against partition models", "figure-3": "the Partition Transformer"}
TABLES = {found.name: found for found in _tables()}
