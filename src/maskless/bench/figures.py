"""Figures that others reached, as constants with their source: the paper's, and its released code on one H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from maskless.bench.case import Case, Drawing, Sampling, Training
from maskless.bench.result import BACKWARD, FORWARD, SAMPLE, Result

PAPER, RELEASED = "paper", "released"
TESTED = "released code (github.com/jdeschena/pgm) as its timing scripts run it, one H200, torch 2.11, our measurement"
A100 = "one A100-SXM4-80GB"


@dataclass(frozen=True)
class Measure:
    """A number that is read off a result."""

    unit: str
    higher_is_better: bool

    def __call__(self, result: Result) -> float:
        value = {
            "tokens/s": result.tokens_per_second,
            "sequences/s": result.sequences_per_second,
            "images/s": result.sequences_per_second,
            "seconds": result.seconds,
            "seconds to start": result.start_up,
            "GiB": result.memory / 2**30,
        }[self.unit]
        assert value is not None, f"{result.part} has no {self.unit}"
        return value

    def times_better(self, ours: float, theirs: float) -> float:
        return ours / theirs if self.higher_is_better else theirs / ours


TOKENS, SEQUENCES, IMAGES = (Measure(unit, True) for unit in ("tokens/s", "sequences/s", "images/s"))
SECONDS, START_UP, MEMORY = (Measure(unit, False) for unit in ("seconds", "seconds to start", "GiB"))
SPEEDS = (TOKENS, SECONDS, SEQUENCES, IMAGES)

PGM_8_8 = Sampling(layers=16)
PGM_6_6_1024 = Sampling(layers=12, width=1024)
MDLM = Sampling(model="mdlm", layers=12, counts="mdlm")
PGM_12_12 = Drawing()
MASKGIT = Drawing(model="maskgit")
MASKGIT_FP32 = replace(MASKGIT, precision="fp32")  # as the paper sets it against PGM in bf16
TRAIN_PGM_8_8 = Training(layers=16)
TRAIN_PGM_6_6 = Training(layers=12)
TRAIN_PGM_6_6_1024 = Training(layers=12, width=1024)
TRAIN_MDLM = Training(model="mdlm", layers=12)
TRAIN_LM1B_PGM = Training(layers=12, length=128, batch=64, vocab=30_522)  # BERT's vocabulary
TRAIN_LM1B_MDLM = replace(TRAIN_LM1B_PGM, model="mdlm", encoder=None)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What somebody reached."""

    by: str  # PAPER or RELEASED
    case: Case
    part: str
    measure: Measure
    value: float
    source: str

    @property
    def tokens_per_second(self) -> float:
        tokens = self.case.batch * self.case.length
        if self.measure == SECONDS:
            return tokens / self.value
        return self.value if self.measure == TOKENS else self.value * self.case.length


def figure(by: str, case: Case, part: str, *measures: Measure) -> Figure | None:
    """The figure for this case in the first of these measures that there is one for."""
    found = (_FIGURES.get((by, _same_work(case), part, measure)) for measure in measures)
    return next((one for one in found if one is not None), None)


def speed(by: str, case: Case, part: str) -> Figure | None:
    """How fast somebody was in this case."""
    return figure(by, case, part, *SPEEDS)


def _same_work(case: Case) -> Case:
    """The case as the figures know it: in bf16, and MDLM with its own counts, which do not change what it costs."""
    case = replace(case, precision="bf16")
    return replace(case, counts="mdlm") if isinstance(case, Sampling) and case.model == "mdlm" else case


def _paper() -> list[Figure]:
    sampling: dict[Sampling, tuple[float, ...]] = {  # Tab. 6
        MDLM: (4_077.08, 2_070.67, 1_043.22, 523.90, 262.26, 131.42),
        PGM_8_8: (21_120.99, 10_914.91, 5_585.57, 2_814.99, 1_425.89, 714.71),
        replace(PGM_8_8, counts="mdlm"): (15_764.09, 8_405.14, 4_419.77, 2_223.63, 1_163.79, 599.97),
        PGM_6_6_1024: (20_569.99, 10_805.31, 5_518.09, 2_782.78, 1_408.88, 707.52),
        replace(PGM_6_6_1024, counts="mdlm"): (15_415.56, 8_318.72, 4_311.80, 2_207.71, 1_147.17, 590.37),
    }
    # Tab. 10. The batch is not stated; 32 as in the script that it was made with.
    long: dict[Sampling, tuple[float, ...]] = {
        replace(MDLM, length=4096): (1_912.16, 483.53, 121.25, 30.45),
        replace(PGM_8_8, length=4096): (8_203.82, 2_216.91, 697.36, 128.99),
        replace(PGM_6_6_1024, length=4096): (8_175.69, 2_146.60, 706.65, 129.01),
    }
    training = {  # Tab. 3
        TRAIN_LM1B_MDLM: (1_978.87, 714.80),
        TRAIN_LM1B_PGM: (1_966.60, 794.42),
        TRAIN_MDLM: (233.28, 80.86),
        TRAIN_PGM_8_8: (188.07, 68.04),
        TRAIN_PGM_6_6_1024: (176.47, 62.85),
    }
    pictures: list[tuple[Drawing, Measure, float]] = [  # Tab. 9, whose latencies are in seconds, not milliseconds
        (PGM_12_12, IMAGES, 7.93),
        (replace(PGM_12_12, batch=1), SECONDS, 1.03),
        (MASKGIT, IMAGES, 1.05),
        (replace(MASKGIT, batch=1), SECONDS, 1.21),
    ]
    figures = []
    for drawing, measure, value in pictures:
        source = "PGM, Tab. 9, pixels included"
        figures.append(Figure(by=PAPER, case=drawing, part=SAMPLE, measure=measure, value=value, source=source))
    for table, rows, at in (("6", sampling, (32, 64, 128, 256, 512, 1024)), ("10", long, (64, 256, 1024, 4096))):
        for case, values in rows.items():
            cases = [replace(case, steps=steps) for steps in at]
            figures += [_of_paper(table, *one) for one in zip(cases, [SAMPLE] * len(at), values, strict=True)]
    for trained, pair in training.items():
        figures += [_of_paper("3", trained, part, value) for part, value in zip((FORWARD, BACKWARD), pair, strict=True)]
    return figures


def _of_paper(table: str, case: Case, part: str, value: float) -> Figure:
    measure = TOKENS if part == SAMPLE else SEQUENCES
    source = f"PGM, Tab. {table}, {A100}"
    return Figure(by=PAPER, case=case, part=part, measure=measure, value=value, source=source)


def _released() -> list[Figure]:
    rows: list[tuple[Case, Measure, float]] = [
        (replace(MDLM, steps=32), TOKENS, 8_761.0),
        (replace(MDLM, steps=128), TOKENS, 2_241.0),
        (replace(PGM_8_8, steps=32), TOKENS, 31_945.0),
        (replace(PGM_8_8, steps=128), TOKENS, 9_735.0),
        (replace(MDLM, batch=1), SECONDS, 3.05),
        (replace(PGM_8_8, batch=1), SECONDS, 3.09),
        (PGM_12_12, IMAGES, 16.3),
        (replace(PGM_12_12, steps=64), IMAGES, 7.7),
        (replace(PGM_12_12, guidance=0.0), IMAGES, 19.7),
        (replace(PGM_12_12, batch=1), SECONDS, 1.49),
        (MASKGIT, IMAGES, 4.06),
        (replace(MASKGIT, guidance=0.0), IMAGES, 7.51),
        (replace(MASKGIT, batch=1), SECONDS, 1.20),
        (MASKGIT_FP32, IMAGES, 0.84),
        (TRAIN_MDLM, SEQUENCES, 168.0),
        (TRAIN_MDLM, MEMORY, 35.0),
        (TRAIN_PGM_6_6, SEQUENCES, 204.0),
        (TRAIN_PGM_6_6, MEMORY, 31.0),
        (TRAIN_PGM_8_8, SEQUENCES, 165.0),
        (TRAIN_PGM_8_8, MEMORY, 38.0),
        (TRAIN_PGM_6_6_1024, SEQUENCES, 153.0),
        (TRAIN_PGM_6_6_1024, MEMORY, 38.0),
    ]
    figures = []
    for case, measure, value in rows:
        part = SAMPLE if isinstance(case, Sampling) else BACKWARD
        source = f"{TESTED}, without the pixels" if isinstance(case, Drawing) else TESTED
        figures.append(Figure(by=RELEASED, case=case, part=part, measure=measure, value=value, source=source))
    return figures


FIGURES = _paper() + _released()
_FIGURES = {(one.by, one.case, one.part, one.measure): one for one in FIGURES}
