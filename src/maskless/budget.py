"""What a training run will need, before it starts: memory of a GPU, tokens in a second, days, sizes of checkpoints.

Operations are counted (flops.py) as the training loop would do them. How long they take comes from one profiled case:
each kind of kernel takes as much longer as there is more work of its kind, and as the GPU is slower at it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from maskless import flops
from maskless.bench.case import Case, DrawCase, TrainCase
from maskless.checkpoint import NETWORKS
from maskless.gpus import GB, GPU, GPUS
from maskless.how import check_positive
from maskless.objective import noise
from maskless.paper.line import DATASETS
from maskless.recipes import RECIPES, Recipe, recipe
from maskless.train.config import TrainConfig
from maskless.train.tasks import objective_of

# Measured on one H200: the kernels of a forward and backward pass of PGM 6/6 on 32 sequences of 1,024 tokens, seconds.
# (docs/results.md, "Where the time of a step of PGM 6/6 goes", now; the clock: 502 sequences a second in "Training".)
PROFILED = TrainCase(layers=12, encoder=6)
ON = GPUS["h200"]
KERNELS = {"products": 0.0338, "attention": 0.0112, "elementwise": 0.0132, "loss": 0.0036}
CLOCK = 32 / 502
# Bytes for each number that a layer reads: of the peaks in the same tables, less 8 bytes of each parameter (itself and
# its gradient), 37.4 to 39.6 in six cases.
ACTIVATION = 38.0
COPY = 4.2e12  # bytes/s of a copy on that card
WEIGHT, GRADIENT, MOMENTS, AVERAGE = 4, 4, 8, 4  # bytes of a parameter
UPDATE = 52  # bytes of a parameter that clipping, Adam and the averages read and write
USABLE = 0.93  # of a GPU's memory; the rest is CUDA's own, and lost between blocks
TOGETHER = 8  # GPUs of a machine
NETWORK = 50 * GB  # bytes/s of a GPU to other machines: 400 Gbit/s
CLASSES = {"imagenet": 1000, "cifar10": 10, "pictures64": 40}
SEQUENCES = 32  # that are counted


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What is to be trained: a network, and a number of steps."""

    case: Case
    settings: TrainConfig

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return self.case.config.length

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            network = NETWORKS[self.case.kind][1](self.case.config)
        return sum(parameter.numel() for parameter in network.parameters())


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one sequence takes, forward and backward: operations, and numbers that are read."""

    products: float
    attention: float
    elementwise: float  # numbers that layers read, in a forward pass
    loss: float  # logits

    @property
    def operations(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run needs on so many GPUs. Sizes in bytes, times in seconds."""

    parameters: int
    steps: int
    tokens: int  # of all steps
    accumulate: int  # pieces that each process takes its share in
    fsdp: bool  # whether weights, moments and averages are sharded
    state: float  # on each GPU: weights, gradients, moments, averages
    activations: float  # on each GPU, of a piece
    usable: float  # of a GPU's memory
    step: float  # from one to the next
    communication: float  # of a step; what does not fit beside the passes is in `step`
    tokens_per_second: float
    mfu: float  # share of the vendor's peak
    checkpoint: int  # the state on disk
    model: int  # the averaged weights on disk

    @property
    def memory(self) -> float:
        return self.state + self.activations

    @property
    def fits(self) -> bool:
        return self.memory <= self.usable

    @property
    def seconds(self) -> float:
        return self.steps * self.step


def planned(name: str | None = None, *, tokens: float | None = None, **given: Any) -> PlannedRun:
    """A recipe's run, or one of given sizes, or a recipe with some of them changed.

    given: fields of `TrainCase`, and steps. tokens: of the whole run, instead of steps.
    """
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens {tokens} is out of range: expected more than 0")
    if tokens is not None and "steps" in given:
        raise ValueError("steps and tokens exclude each other: expected one of them")
    if name is None and tokens is None and "steps" not in given:
        raise ValueError("how long? expected a recipe, --steps or --tokens")
    fields = (_of_recipe(recipe(name)) if name else _unnamed(given)) | given
    steps = fields.pop("steps", None)
    if "classes" in fields and "objective" in fields:
        raise ValueError(f"objective {fields['objective']!r} is for text: {name} draws pictures")
    case: Case = DrawCase(**fields) if "classes" in fields else TrainCase(**fields)
    if tokens is not None:
        steps = math.ceil(tokens / (case.batch * case.config.length))
    drawing = TrainConfig(model=case.model, batch=case.batch, weights="arccos", steps=steps)
    settings = replace(case.settings, steps=steps) if isinstance(case, TrainCase) else drawing
    return PlannedRun(case=case, settings=settings)


def _unnamed(given: dict[str, Any]) -> dict[str, Any]:
    """The objective that `maskless train` would take."""
    chain = given.get("model", "pgm") == "pgm" and given.get("context", "ordered") == "ordered"
    return {"objective": "chain"} if chain else {}


def _of_recipe(found: Recipe) -> dict[str, Any]:
    data = found.name.split("-")[0]
    sizes = ("width", "layers", "encoder", "context")
    fields: dict[str, Any] = {name: found.network[name] for name in sizes if name in found.network}
    fields |= {name: found.train[name] for name in ("model", "batch", "steps")}
    vocab = re.search(r"--vocab (\d+)", found.prepare)
    if vocab:
        fields["vocab"] = int(vocab[1])
    elif data in DATASETS:
        fields["vocab"] = DATASETS[data].vocab
    else:
        fields["vocab"] = RECIPES[f"{data}-codec"].network["codes"]
    if data in CLASSES:
        return fields | {"length": found.length - 1, "classes": CLASSES[data]}  # less the BOS
    return fields | {"length": found.length}


def work_of(run: PlannedRun) -> Work:
    """Counted in the first batch of a run, or in as many sequences of it as settle the mean."""
    config, n, L = run.case.config, min(run.settings.batch, SEQUENCES), run.tokens
    tokens = torch.zeros(n, L, dtype=torch.long)
    counted = torch.ones(n, L, dtype=torch.bool)
    if isinstance(run.case, DrawCase):
        counted[:, 0] = False  # the BOS
    problems = objective_of(run.settings)(tokens, *noise(n, L, seed=0, step=0), counted).problems
    passes = 1 + flops.BACKWARD
    attention = flops.training_attention(config, problems)
    return Work(
        products=passes * (flops.training(config, problems) - attention) / n,
        attention=passes * attention / n,
        elementwise=flops.training_vectors(config, problems) * config.width / n,
        loss=problems.target_offsets.total * config.vocab / n,
    )


def seconds_of(work: Work, gpu: GPU) -> float:
    """Of a forward and backward pass over one sequence, in a batch that fills the GPU."""
    profiled = work_of(PlannedRun(case=PROFILED, settings=PROFILED.settings))
    slower = {"products": ON.peak / gpu.peak, "attention": ON.peak / gpu.peak}
    slower |= dict.fromkeys(("elementwise", "loss"), ON.bandwidth / gpu.bandwidth)
    kernels = sum(
        seconds / PROFILED.batch * getattr(work, kind) / getattr(profiled, kind) * slower[kind]
        for kind, seconds in KERNELS.items()
    )
    return kernels * CLOCK / sum(KERNELS.values())


def budget(run: PlannedRun, gpu: GPU, gpus: int = 1) -> Budget:
    """What a run needs on so many GPUs of a kind, with the fewest pieces that fit, sharded where the state is large.

    Communication runs at the vendor's speed, or at `NETWORK` between machines, and overlaps the passes: it takes time
    only where it is the longer of the two. This part is not measured: we had one GPU.
    """
    check_positive(gpus=gpus)
    share, rest = divmod(run.settings.batch, gpus)
    if rest or not share:
        raise ValueError(f"batch {run.settings.batch} does not split over {gpus} GPUs: expected a multiple of {gpus}")
    work, n, usable = work_of(run), run.parameters, USABLE * gpu.memory
    whole = n * (WEIGHT + GRADIENT + MOMENTS + AVERAGE)
    fsdp = gpus > 1 and whole > usable / 2
    state = whole / gpus + _gathered(run) if fsdp else float(whole)
    splits = [pieces for pieces in range(1, share + 1) if share % pieces == 0]
    sizes = {pieces: ACTIVATION * work.elementwise * share / pieces for pieces in splits}
    pieces = next((pieces for pieces, size in sizes.items() if state + size <= usable), share)
    passes = share * seconds_of(work, gpu)
    sent = n * ((2 * pieces + 1) * WEIGHT if fsdp else 2 * GRADIENT)  # gathered in both passes of a piece; reduced once
    communication = 0.0 if gpus == 1 else sent / (gpu.link if gpus <= TOGETHER else NETWORK)
    update = n * UPDATE / (gpus if fsdp else 1) / (COPY * gpu.bandwidth / ON.bandwidth)
    step = max(passes, communication) + update
    tokens = run.settings.batch * run.tokens
    return Budget(
        parameters=n,
        steps=run.settings.steps,
        tokens=tokens * run.settings.steps,
        accumulate=pieces,
        fsdp=fsdp,
        state=state,
        activations=sizes[pieces],
        usable=usable,
        step=step,
        communication=communication,
        tokens_per_second=tokens / step,
        mfu=share * work.operations / step / gpu.peak,
        checkpoint=n * (WEIGHT + MOMENTS + AVERAGE),
        model=n * AVERAGE,
    )


def _gathered(run: PlannedRun) -> int:
    """What sharded weights hold whole on each GPU at a time, with gradients: two layers, the embedding, the head."""
    config = run.case.config
    return (2 * 12 * config.width**2 + 2 * config.vocab * config.width) * (WEIGHT + GRADIENT)
