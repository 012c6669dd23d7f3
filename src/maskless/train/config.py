"""What a run is trained with: the settings, and the names that they may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
# What may change when a run resumes; everything else is as it began.
CHANGEABLE = (
    *("steps", "minutes", "evaluate_every", "sample_every", "save_every", "log_every", "keep", "skip_spikes"),
    *("activation_checkpointing", "shard_size"),
)

RANGES: dict[str, Callable[[float], bool]] = {
    "more than 0": lambda value: value > 0,
    "0 or more": lambda value: value >= 0,
    "1 or more": lambda value: value >= 1,
    "0 to 1": lambda value: 0 <= value <= 1,
    "at least 0 and less than 1": lambda value: 0 <= value < 1,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every run has, of a network or of a codec: its end, its optimiser and its milestones."""

    steps: int
    minutes: float | None = None  # wall time of the whole run, if that is over before the last step
    batch: int
    learning_rate: float = 3e-4
    warmup: int | None  # steps; None: a twentieth of the run, 10 to 100 steps
    clip: float = 1.0
    ema: float
    seed: int = 0
    evaluate_every: int | None = None  # steps; None: every 1,000 and at each tenth of the run; 0: only at the end
    save_every: int | None = None
    log_every: int = 10
    keep: int = 2  # training states that stay on disk

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_ranges(self, "more than 0", "steps", "minutes", "batch", "learning_rate", "clip", "log_every", "keep")
        check_ranges(self, "0 or more", "warmup", "evaluate_every", "save_every")
        check_ranges(self, "at least 0 and less than 1", "ema")

    def rate(self, step: int, share: float) -> float:
        """Of learning: linear warm-up, then a cosine to zero at the end of the run, or constant."""
        if self.warmup is None:
            warm = max((step + 1) / 100, min((step + 1) / 10, 20 * share))
        else:
            warm = (step + 1) / max(1, self.warmup)
        return self.learning_rate * min(1.0, warm) * self.fallen(min(1.0, share))

    def fallen(self, share: float) -> float:
        """What is left of the rate after a share of the run."""
        return 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """How to train a network. The defaults are the paper's where it has them (PGM, Sec. 5.1)."""

    model: str = "pgm"  # pgm, mdlm, mdlm-complementary, ar; maskgit for pictures
    objective: str = "partition"  # of pgm: two groups, or a chain (every token from those before it in some order)
    orders: str = ""  # of a chain: the mixture of orders, such as random=25,strands=50,gaps=25
    weights: str = "bounded"  # of two groups: bounded, released (unbounded), exact (by group size), arccos (pictures)
    steps: int = 1_000_000
    batch: int = 512  # sequences of an optimiser step, over all processes
    accumulate: int = 1  # each process takes its share in this many pieces
    initial: str = "open"  # first weights: open gates (blocks.py), or as the released networks start
    warmup: int | None = 2_500
    decay: str = "constant"
    ema: float = 0.9999
    skip_spikes: float = 0.0  # leave out steps whose gradient norm is more than so many times its median; 0: none
    label_dropout: float = 0.1  # of pictures: the share of labels that are hidden, for guidance
    compile: bool | None = None  # by default on CUDA
    activation_checkpointing: bool = False  # layers keep their inputs alone, for a third more computing
    fsdp: bool = False  # shard the weights over processes
    shard_size: int | None = None  # of fsdp: over so many of them, each such group with all weights (HSDP); None: all
    sample_every: int | None = 0
    tracker: str = "tensorboard"  # or any other that Accelerate knows (wandb, mlflow, ...), or none

    def __post_init__(self) -> None:
        check_names(
            model=(self.model, MODELS),
            objective=(self.objective, PGM_OBJECTIVES),
            weights=(self.weights, WEIGHTS),
            decay=(self.decay, DECAYS),
            initial=(self.initial, INITIALS),
            tracker=(self.tracker, TRACKERS),
        )
        if (self.objective == "chain") != bool(self.orders) or (self.orders and self.model != "pgm"):
            raise ValueError(
                f"objective {self.objective!r} of {self.model} with orders {self.orders!r}: orders belong to a chain"
            )
        super().__post_init__()
        check_ranges(self, "more than 0", "accumulate", "shard_size")
        check_ranges(self, "0 or more", "sample_every", "skip_spikes")
        if self.shard_size is not None and not self.fsdp:
            raise ValueError(f"shard_size {self.shard_size} without fsdp: expected both, or neither")
        if 0 < self.skip_spikes <= 1:
            raise ValueError(f"skip_spikes {self.skip_spikes} is out of range: expected more than 1, or 0 for none")
        check_ranges(self, "at least 0 and less than 1", "label_dropout")

    @property
    def task(self) -> str:
        """What is trained on: "chain", or a name in `objective.OBJECTIVES`."""
        task = "chain" if self.objective == "chain" else MODELS[self.model][1]
        return WEIGHTS[self.weights] if task == "pgm" else task

    def fallen(self, share: float) -> float:
        return 1.0 if self.decay == "constant" else super().fallen(share)


def check_ranges(config: Any, expected: str, *names: str) -> None:
    """Raise a ValueError about a field that is not as `RANGES` has it; None is."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not RANGES[expected](value):
            raise ValueError(f"{name} {value} is out of range: expected {expected}")


def check_names(**given: tuple[str, Iterable[str]]) -> None:
    """Raise a ValueError about a name that is not among the known ones: loss=("mse", ("tv", ...))."""
    for what, (name, known) in given.items():
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}")
