"""The paper's tables and figures by name, line by line, and the tables of what we want to reach ourselves.

A latency of text is batch x length / throughput in the paper (but for two rows of Tab. 7 that are exchanged), so only
the throughput stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from maskless.how import check_name
from maskless.paper.line import (
    ACCURACY,
    BACKWARD,
    DATASETS,
    ENTROPY,
    FID,
    FORWARD,
    GEN_PPL,
    GRADIENT,
    IMAGES,
    MEMORY,
    NETWORKS,
    PERPLEXITY,
    SCORE,
    SECONDS,
    SEQUENCES,
    SPIKE,
    START_UP,
    TOKENS,
    Bound,
    Curve,
    Downstream,
    Line,
    NetworkSpeed,
    Pictures,
    Table,
    Texts,
    set_and_network,
    sized,
    title,
)

DRAWN_BY_HAND = {"figure-2": "masked against partition models", "figure-3": "the Partition Transformer"}


def table(name: str) -> Table:
    if name in DRAWN_BY_HAND:
        raise ValueError(f"{name} is a drawing ({DRAWN_BY_HAND[name]}): there is nothing to measure")
    check_name("table", name, TABLES)
    return TABLES[name]


def _rows(block: str) -> Iterator[list[str]]:
    return map(str.split, block.strip().splitlines())


# Perplexity after 200k steps, and after 1M.  Tab. 1 and 5
_PERPLEXITIES = """
lm1b-mdlm                34.29 27.67
lm1b-mdlm-complementary  30.87 25.72
lm1b-pgm-8-4             32.83 -
lm1b-pgm-10-2            33.55 -
lm1b-pgm-4-8             32.84 -
lm1b-pgm-6-6             32.69 26.80
lm1b-pgm-6-6-logsumexp   32.70 -
lm1b-pgm-6-6-mean        33.89 -
owt-mdlm                 25.35 23.07
owt-mdlm-complementary   25.32 22.98
owt-pgm-6-6              26.96 -
owt-pgm-8-8              25.10 22.61
owt-pgm-10-6             25.19 -
owt-pgm-6-6-1024         23.75 21.43
"""


def _bounds() -> Iterator[Line]:
    for recipe, *values in _rows(_PERPLEXITIES):
        for suffix, steps, value in zip(("-200k", ""), ("200k", "1M"), values, strict=True):
            if value != "-":
                model = f"{set_and_network(recipe)[0].upper()}, {title(recipe)}, {steps} steps"
                yield Line(model=model, work=Bound(recipe + suffix), measure=PERPLEXITY, paper=float(value))


# Gen-PPL and entropy after 32, 64, ..., 1024 steps.  Tab. 6
_STEPS = (32, 64, 128, 256, 512, 1024)
_SAMPLES = """
owt-mdlm          mdlm     192.31 5.73  142.58 5.69  122.89 5.67  113.96 5.66  109.05 5.64  106.75 5.64
owt-pgm-8-8       uniform  189.02 5.73  143.79 5.69  122.21 5.66  112.48 5.65  108.76 5.64  107.03 5.63
owt-pgm-8-8       mdlm     194.09 5.73  143.60 5.69  124.38 5.67  116.85 5.66  111.11 5.64  108.24 5.63
owt-pgm-6-6-1024  uniform  185.16 5.73  138.87 5.70  116.95 5.67  108.51 5.65  101.94 5.63  99.64  5.62
owt-pgm-6-6-1024  mdlm     191.30 5.74  138.67 5.69  118.17 5.67  108.93 5.65  105.41 5.64  102.93 5.62
"""
# The same after five rounds of distillation; the precision of the loss, top-p.  Tab. 7
_DISTILLED = """
owt-mdlm          BF16 -    66.26 5.49   53.98 5.46  48.02 5.44  45.86 5.42  44.21 5.40  43.19 5.38
owt-mdlm          FP32 -    61.65 5.46   50.65 5.43  45.06 5.40  41.70 5.37  40.63 5.36  39.50 5.32
owt-pgm-6-6-1024  BF16 -    91.61 5.56   72.73 5.52  63.83 5.49  58.74 5.47  58.77 5.47  56.47 5.46
owt-pgm-6-6-1024  BF16 0.9  68.33 5.50   53.88 5.45  46.99 5.42  43.22 5.40  42.79 5.39  40.99 5.38
owt-pgm-6-6-1024  FP32 -    84.97 5.52   67.60 5.49  60.06 5.47  55.97 5.45  54.13 5.44  52.77 5.44
owt-pgm-6-6-1024  FP32 0.9  63.46 5.45   49.94 5.41  43.84 5.39  40.76 5.36  39.46 5.36  38.81 5.35
owt-pgm-8-8       BF16 -    102.64 5.54  82.93 5.50  73.19 5.48  70.30 5.47  68.07 5.46  65.87 5.44
owt-pgm-8-8       FP32 -    87.64 5.51   70.47 5.48  62.66 5.46  59.38 5.45  57.57 5.44  56.12 5.44
"""
# Tokens per second in as many steps, by network, counts and top-p.  Tab. 6 and 7
_WRITTEN = {
    ("owt-mdlm", "mdlm", None): (4_077.08, 2_070.67, 1_043.22, 523.90, 262.26, 131.42),
    ("owt-pgm-8-8", "uniform", None): (21_120.99, 10_914.91, 5_585.57, 2_814.99, 1_425.89, 714.71),
    ("owt-pgm-8-8", "mdlm", None): (15_764.09, 8_405.14, 4_419.77, 2_223.63, 1_163.79, 599.97),
    ("owt-pgm-6-6-1024", "uniform", None): (20_569.99, 10_805.31, 5_518.09, 2_782.78, 1_408.88, 707.52),
    ("owt-pgm-6-6-1024", "mdlm", None): (15_415.56, 8_318.72, 4_311.80, 2_207.71, 1_147.17, 590.37),
    ("owt-pgm-6-6-1024", "uniform", 0.9): (18_866.12, 10_307.16, 5_375.20, 2_742.74, 1_386.79, 699.80),
}
FP32_ONLY = "our distillation has its loss in float32 only"


def _written(model: str, work: Texts, numbers: list[str], why_not: str = "") -> Iterator[Line]:
    speeds = _WRITTEN[work.recipe, work.counts, work.top_p]
    for K, quality, entropy, speed in zip(_STEPS, numbers[::2], numbers[1::2], speeds, strict=True):
        for measure, value in ((GEN_PPL, float(quality)), (ENTROPY, float(entropy)), (TOKENS, speed)):
            yield Line(model=model, work=work, measure=measure, at=K, paper=value, why_not=why_not)


def _samples() -> Iterator[Line]:
    for recipe, counts, *numbers in _rows(_SAMPLES):
        uneven = ", non-uniform" if counts == "mdlm" and recipe != "owt-mdlm" else ""
        yield from _written(title(recipe) + uneven, Texts(recipe, counts), numbers)


def _distilled() -> Iterator[Line]:
    for recipe, precision, nucleus, *numbers in _rows(_DISTILLED):
        top_p = None if nucleus == "-" else float(nucleus)
        work = Texts(recipe, "mdlm" if recipe == "owt-mdlm" else "uniform", top_p, distilled=True)
        model = f"{title(recipe)}{f', nucleus {top_p}' if top_p else ''}, loss in {precision}"
        yield from _written(model, work, numbers, FP32_ONLY if precision == "BF16" else "")


# Images per second with the guidance 0, and with any other; then FID and Inception Score with 0, 1, ..., 6.
_DRAWN = {
    "confidence": """
maskgit   32  2.05 1.05   14.30 82.41  7.80 151.62  6.78 208.92  7.37 255.69  7.46 289.93  9.61 250.86  21.68 149.61
maskgit   64  1.03 0.52   15.62 79.23  9.40 140.48  8.06 195.35  8.19 239.89  7.61 267.26  11.44 202.92  26.41 113.63
pgm-12-12 32  6.86 3.76   18.77 67.22  8.96 135.03  6.67 201.66  7.09 255.43  8.30 290.18  9.59 307.52  10.84 313.27
pgm-12-12 64  3.52 1.90   19.45 64.44  10.08 124.90  7.35 188.77  7.39 238.31  8.13 276.55  9.18 297.44  10.38 302.29
pgm-14-10 32  7.09 3.90   21.97 60.07  11.24 121.39  8.05 183.20  7.76 232.62  8.47 263.73  9.39 288.60  10.40 291.46
pgm-14-10 64  3.63 1.97   22.74 56.77  12.32 112.98  8.80 171.11  8.11 219.33  8.44 253.10  9.12 270.16  9.90 279.00
""",  # Tab. 8
    "halton": """
maskgit   32  2.02 1.05   25.72 57.70  5.35 267.49  12.82 365.36  17.24 408.30  15.65 365.97  25.33 182.14  48.97 74.74
maskgit   64  1.03 0.52   18.61 69.68  6.76 283.96  14.97 372.74  18.30 410.60  16.18 312.75  32.69 126.69  60.12 51.40
pgm-12-12 32  13.44 7.93  22.59 66.32  10.21 134.22  6.04 203.28  5.54 263.53  6.38 311.53  7.58 345.18  8.83 372.07
pgm-12-12 64  7.17 4.12   16.19 79.26  6.67 151.44  4.56 218.98  4.98 276.16  6.47 322.53  7.95 352.56  9.47 379.39
pgm-14-10 32  12.70 7.37  25.42 62.11  11.57 128.22  6.60 196.56  5.55 253.76  6.00 301.66  7.04 334.29  8.16 365.56
pgm-14-10 64  6.69 3.80   18.03 75.40  7.77 144.26  4.76 212.39  4.85 268.55  5.88 309.88  7.23 342.40  8.63 366.57
""",  # Tab. 9
}


def _drawn(order: str) -> Iterator[Line]:
    for network, steps, plain, guided, *numbers in _rows(_DRAWN[order]):
        work = Pictures(f"imagenet-{network}", order, int(steps))
        for w, (fid, score) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            for measure, value in ((FID, fid), (SCORE, score), (IMAGES, guided if w else plain)):
                model = f"{title(work.recipe)}, {steps} steps"
                yield Line(model=model, work=work, measure=measure, at=w, paper=float(value))


# Accuracies, of Tab. 2 before and after distillation.
_ANSWERED = {
    "table-2": """
task              lambada_openai arc_easy boolq hellaswag openbookqa piqa race social_iqa
owt-mdlm          38.52 37.88 49.42 31.36 28.60 58.27 28.04 38.84  41.34 33.80 48.59 30.75 28.80 57.73 27.94 38.79
owt-pgm-8-8       46.98 40.40 53.49 33.20 26.60 58.92 26.89 39.97  47.22 37.42 51.50 31.62 25.80 59.03 30.62 39.61
owt-pgm-6-6-1024  41.39 39.98 49.82 34.27 25.40 59.19 27.37 40.28  44.48 36.70 49.36 32.55 25.00 59.85 27.37 39.25
""",
    "table-4": """
task              lambada_openai arc_easy arc_challenge hellaswag mathqa piqa winogrande
owt-mdlm          38.52 34.26 24.66 31.54 20.70 57.89 51.93
owt-pgm-8-8       46.98 37.37 24.06 33.10 21.24 59.09 51.30
owt-pgm-6-6-1024  41.39 38.80 22.95 33.92 21.71 61.43 54.30
""",
}


def _answered(table: str) -> Iterator[Line]:
    (_, *tasks), *rows = _rows(_ANSWERED[table])
    for recipe, *numbers in rows:
        for i, number in enumerate(numbers):
            after, task = i // len(tasks), tasks[i % len(tasks)]
            work, model = Downstream(recipe, distilled=after == 1), title(recipe) + ", distilled" * after
            yield Line(model=model, work=work, measure=ACCURACY, at=task, paper=float(number))


# Sequences per second of a forward pass, and of a forward and backward pass.  Tab. 3
_TRAINED = """
lm1b-mdlm         1978.87 714.80
lm1b-pgm-6-6      1966.60 794.42
owt-mdlm          233.28 80.86
owt-pgm-8-8       188.07 68.04
owt-pgm-6-6-1024  176.47 62.85
"""
# Tokens per second in 64, 256, 1024 and 4096 steps. The batch is not stated; 32 as in the script that made it.  Tab. 10
_LONG = """
owt-mdlm          1912.16 483.53 121.25 30.45
owt-pgm-8-8       8203.82 2216.91 697.36 128.99
owt-pgm-6-6-1024  8175.69 2146.60 706.65 129.01
"""


def _timed(block: str, measure: str, ats: Sequence[int | str], **how: Any) -> Iterator[Line]:
    for recipe, *values in _rows(block):
        data, network = set_and_network(recipe)
        model, sizes = NETWORKS[network]
        name = f"{sized(model, **sizes)}, length {how.get('length', DATASETS[data].length)}"
        work = NetworkSpeed(recipe=recipe, batch=64 if data == "lm1b" else 32, **how)
        for at, value in zip(ats, values, strict=True):
            yield Line(model=name, work=work, measure=measure, at=at, paper=float(value))


def _main_speeds() -> Iterator[Line]:
    """Of Tab. 1, which does not say in how many steps; 128, by what the rows on OpenWebText take."""
    values = {"lm1b-mdlm": 1_081.57, "lm1b-pgm-6-6": 1_930.93}
    for (recipe, *_), speeds in _WRITTEN.items():
        values.setdefault(recipe, speeds[_STEPS.index(128)])  # the first of a network are with even counts
    for recipe, value in values.items():
        model = f"{set_and_network(recipe)[0].upper()}, {title(recipe)}"
        yield Line(model=model, work=NetworkSpeed(recipe=recipe), measure=TOKENS, at=128, paper=value)


def _curves() -> Iterator[Line]:
    """Fig. 6, which has no numbers: how far the losses and the gradients leap."""
    leaping = product(("owt-mdlm-complementary", "owt-pgm-8-8"), ("bounded", "released"))
    for recipe, weights in (("owt-mdlm", ""), *leaping):
        model = title(recipe) + (f", {weights} weights" if weights else "")
        for measure in (SPIKE, GRADIENT):
            yield Line(model=model, work=Curve(recipe, weights), measure=measure)


def _tables() -> Iterator[Table]:
    bounds = tuple(_bounds())
    long = tuple(line for line in bounds if line.model.endswith("1M steps"))
    samples, distilled, halton = tuple(_samples()), tuple(_distilled()), tuple(_drawn("halton"))
    norm = "Accuracy without length normalisation; the paper does not say which it has, and its two tables differ."
    latency = "The paper's latencies of one picture: `maskless bench sample --table images`."
    main = "Speed with random weights; the paper does not state the steps on LM1B, 128 fits its latencies."
    yield Table(name="table-1", about="validation perplexity and throughput of text models", draw="losses",
                lines=(*long, *_main_speeds()), note=main)  # fmt: skip
    yield Table(name="table-2", about="downstream tasks, before and after distillation",
                lines=tuple(_answered("table-2")), note=norm)  # fmt: skip
    trained = _timed(_TRAINED, SEQUENCES, (FORWARD, BACKWARD), trains=True)
    yield Table(name="table-3", about="speed of training", lines=tuple(trained))
    yield Table(name="table-4", about="more downstream tasks", lines=tuple(_answered("table-4")), note=norm)
    yield Table(name="table-5", about="validation perplexity of all variants", draw="losses", lines=bounds)
    yield Table(name="table-6", about="quality and speed of samples on OpenWebText", lines=samples)
    yield Table(name="table-7", about="the same after distillation", lines=distilled)
    yield Table(name="table-8", about="ImageNet, confidence sampler",
                lines=tuple(_drawn("confidence")), note=latency)  # fmt: skip
    yield Table(name="table-9", about="ImageNet, Halton sampler", lines=halton, note=latency)
    longer = _timed(_LONG, TOKENS, (64, 256, 1024, 4096), length=4096)
    yield Table(name="table-10", about="throughput at length 4096", lines=tuple(longer))
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


TABLES = {found.name: found for found in _tables()}


def _line(work: NetworkSpeed, at: int | str, measure: str, released: float | None = None, **more: Any) -> Line:
    return Line(model=title(work.recipe), work=work, measure=measure, at=at, released=released, **more)


# On one H200: the released code as its timing scripts run it, and what we want to reach.
_MDLM, _PGM = NetworkSpeed(recipe="owt-mdlm"), NetworkSpeed(recipe="owt-pgm-8-8")
_ORDERED, _WIDE = replace(_PGM, context="ordered"), replace(_PGM, recipe="owt-pgm-6-6-1024")
_TRAIN_MDLM, _TRAIN_PGM, _TRAIN_WIDE = (replace(work, trains=True) for work in (_MDLM, _PGM, _WIDE))
_TRAIN_SMALL = replace(_TRAIN_PGM, recipe="owt-pgm-6-6")
_DRAW, _MASKGIT = NetworkSpeed(recipe="imagenet-pgm-12-12"), NetworkSpeed(recipe="imagenet-maskgit")
_DRAW_ORDERED = replace(_DRAW, context="ordered")

TARGETS = (
    # The first case of a process: what is compiled for it serves the others, so its start is the slowest.
    _line(_PGM, 128, START_UP, at_least=10, aim=3),
    _line(_PGM, 128, TOKENS, 9_735.0, at_least=40_000, aim=56_000),
    _line(_PGM, 32, TOKENS, 31_945.0, at_least=140_000, aim=200_000),
    _line(_WIDE, 128, TOKENS, at_least=30_000, aim=42_000),
    _line(_ORDERED, 128, TOKENS, at_least=250_000, aim=600_000),
    _line(_ORDERED, 32, TOKENS, at_least=500_000, aim=1_200_000),
    _line(replace(_ORDERED, batch=1), 128, SECONDS, at_least=0.10, aim=0.04),
    _line(replace(_PGM, batch=1), 128, SECONDS, 3.09, at_least=0.25, aim=0.12),
    _line(_TRAIN_SMALL, BACKWARD, SEQUENCES, 204.0, at_least=480, aim=600),
    _line(_TRAIN_SMALL, BACKWARD, MEMORY, 31.0, at_least=16, aim=10),
    _line(_TRAIN_PGM, BACKWARD, SEQUENCES, 165.0, at_least=400, aim=500),
    _line(_TRAIN_WIDE, BACKWARD, SEQUENCES, 153.0, at_least=350, aim=430),
)
IMAGE_TARGETS = (
    _line(_DRAW, 32, IMAGES, 16.3, at_least=40, aim=60),
    _line(_DRAW_ORDERED, 32, IMAGES, at_least=120, aim=250),
    _line(_MASKGIT, 32, IMAGES, 4.06),
    _line(replace(_DRAW, batch=1), 32, SECONDS, 1.49, at_least=0.15, aim=0.08),
    _line(replace(_DRAW_ORDERED, batch=1), 32, SECONDS),
    _line(replace(_MASKGIT, batch=1), 32, SECONDS, 1.20),
)
RIVAL_FP32 = _line(replace(_MASKGIT, precision="fp32"), 32, IMAGES, 0.84)  # as the paper sets it against PGM in bf16
BESIDE = (  # what others reached, and we have no target for
    _line(replace(_DRAW, batch=1), 32, SECONDS, paper=1.03),  # in seconds, where Tab. 9 says milliseconds
    _line(replace(_MASKGIT, batch=1), 32, SECONDS, paper=1.21),
    _line(_MDLM, 32, TOKENS, 8_761.0),
    _line(_MDLM, 128, TOKENS, 2_241.0),
    _line(replace(_MDLM, batch=1), 128, SECONDS, 3.05),
    _line(_DRAW, 64, IMAGES, 7.7),
    _line(replace(_DRAW, guidance=0.0), 32, IMAGES, 19.7),
    _line(replace(_MASKGIT, guidance=0.0), 32, IMAGES, 7.51),
    RIVAL_FP32,
    _line(_TRAIN_MDLM, BACKWARD, SEQUENCES, 168.0),
    _line(_TRAIN_MDLM, BACKWARD, MEMORY, 35.0),
    _line(_TRAIN_PGM, BACKWARD, MEMORY, 38.0),
    _line(_TRAIN_WIDE, BACKWARD, MEMORY, 38.0),
)
