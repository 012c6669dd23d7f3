"""What a run is trained with: the settings, and the names that they may have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from maskless.seeds import check_seed

# What `--model` names: the network that is built and the task it is trained on; that of pgm depends on the objective.
MODELS = {
    "pgm": ("partition", "pgm"),
    "mdlm": ("masked", "mdlm"),
    "mdlm-complementary": ("masked", "pgm"),
    "ar": ("causal", "causal"),
    "maskgit": ("maskgit", "maskgit"),
}
TEXT_MODELS = ("pgm", "mdlm", "mdlm-complementary", "ar")
IMAGE_MODELS = ("pgm", "maskgit")
PGM_OBJECTIVES = ("chain", "partition")
WEIGHTS = {"bounded": "pgm", "released": "pgm-released", "exact": "pgm-exact", "arccos": "pgm-arccos"}
DECAYS = ("constant", "cosine")
INITIALS = ("open", "released")
TRACKERS = ("none", *sorted(LOGGER_TYPE_TO_CLASS))
RAGGED = ("mdlm", "maskgit")  # tasks whose targets vary in number


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults are the paper's where it has them (PGM, Sec. 5.1)."""

    model: str = "pgm"  # pgm, mdlm, mdlm-complementary, ar; maskgit for pictures
    objective: str = "partition"  # of pgm: two groups, or a chain (every token from those before it in some order)
    orders: str = ""  # of a chain: the mixture of orders, such as random=25,strands=50,gaps=25
    weights: str = "bounded"  # of two groups: bounded, released (unbounded), exact (by group size), arccos (pictures)
    steps: int = 1_000_000
    minutes: float | None = None  # stop after this long (evaluating and saving not counted), if before the last step
    batch: int = 512  # sequences of an optimiser step, over all processes
    accumulate: int = 1  # each process takes its share in this many pieces
    learning_rate: float = 3e-4
    initial: str = "open"  # first weights: open gates (blocks.py), or as the released networks start
    warmup: int = 2_500
    decay: str = "constant"
    clip: float = 1.0
    ema: float = 0.9999
    label_dropout: float = 0.1  # of pictures: the share of labels that are hidden, for guidance
    seed: int = 0
    compile: bool | None = None  # by default on CUDA
    fsdp: bool = False  # shard the weights over processes
    evaluate_every: int | None = None  # steps; None: every 1,000 and at each tenth of the run; 0: only at the end
    sample_every: int | None = 0
    save_every: int | None = None
    log_every: int = 10
    keep: int = 2  # training states that stay on disk
    tracker: str = "tensorboard"  # or any other that Accelerate knows (wandb, mlflow, ...), or none

    def __post_init__(self) -> None:
        for what, name, known in (
            ("model", self.model, MODELS),
            ("objective", self.objective, PGM_OBJECTIVES),
            ("weights", self.weights, WEIGHTS),
            ("decay", self.decay, DECAYS),
            ("initial", self.initial, INITIALS),
            ("tracker", self.tracker, TRACKERS),
        ):
            if name not in known:
                raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}")
        if (self.objective == "chain") != bool(self.orders) or (self.orders and self.model != "pgm"):
            raise ValueError(
                f"objective {self.objective!r} of {self.model} with orders {self.orders!r}: orders belong to a chain"
            )
        for name in ("steps", "batch", "accumulate", "log_every", "keep", "learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: expected more than 0")
        check_seed(self.seed)
        for name in ("warmup", "evaluate_every", "sample_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} {value} is out of range: expected 0 or more")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes {self.minutes} is out of range: expected more than 0")
        for name in ("ema", "label_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: expected at least 0 and less than 1")

    @property
    def task(self) -> str:
        """What is trained on: "chain", or a name in `objective.OBJECTIVES`."""
        task = "chain" if self.objective == "chain" else MODELS[self.model][1]
        return WEIGHTS[self.weights] if task == "pgm" else task


def learning_rate(config: TrainConfig, step: int, share: float) -> float:
    """Linear warm-up, then constant or a cosine to zero at the end of the run."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    fall = 1.0 if config.decay == "constant" else 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate * warm * fall
