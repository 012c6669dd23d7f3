"""What a training run will need, before it starts: memory of a GPU, tokens in a second, days, sizes of checkpoints.

Operations are counted (flops.py) as the training loop would do them. How long they take comes from one profiled case:
each kind of kernel takes as much longer as there is more work of its kind, and as the GPU is slower at it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from maskless import flops
from maskless.bench.case import Case, DrawCase, TrainCase
from maskless.checkpoint import NETWORKS
from maskless.gpus import CPU, GB, GPU, GPUS
from maskless.how import check_positive
from maskless.objective import noise
from maskless.paper import DATASETS
from maskless.recipes import RECIPES, Recipe, recipe
from maskless.train.config import TrainConfig
from maskless.train.tasks import objective_of

# Measured on one H200: the kernels of a forward and backward pass of PGM 6/6 on 32 sequences of 1,024 tokens, seconds.
# (docs/results.md, "Where the time of a step of PGM 6/6 goes", now; the clock: 502 sequences a second in "Training".)
PROFILED = TrainCase(layers=12, encoder=6)
ON = GPUS["h200"]
KERNELS = {"products": 0.0338, "attention": 0.0112, "elementwise": 0.0132, "loss": 0.0036}
CLOCK = 32 / 502
COPY = 4.2e12  # bytes/s of a copy on that card
# Bytes for each number that a layer reads: of the peaks in the same tables, less 8 bytes of each parameter (itself and
# its gradient), 37.4 to 39.6 in six cases. On a CPU, of the memory that four processes took: 96 to 155.
ACTIVATION, ACTIVATION_CPU = 38.0, 115.0
STREAM, STREAM_CPU = 2, 4  # bytes of a number between layers, which is all that checkpointed ones keep
MODULATED = 2.25  # with labels each token has its own modulations: fitted to five runs (docs/scale.md)
WEIGHT, GRADIENT, MOMENTS, AVERAGE = 4, 4, 8, 4  # bytes of a parameter
GATHERED = 2  # as FSDP gathers it
UPDATE = 52  # bytes of a parameter that clipping, Adam and the averages read and write
USABLE = 0.93  # of a GPU's memory; the rest is CUDA's own, and lost between blocks
TOGETHER = 8  # GPUs of a machine
NETWORK = 50 * GB  # bytes/s to other machines for each GPU of one: 400 Gbit/s
CLASSES = {"imagenet": 1000, "cifar10": 10, "pictures64": 40}
SEQUENCES = 32  # that are counted


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What work takes, in seconds for each unit of it."""

    products: float  # an operation
    moved: float  # a byte that products read or write, which they do meanwhile
    attention: float  # an operation
    elementwise: float  # a number that a layer reads
    loss: float  # a logit
    layer: float  # beside them: a layer of a pass
    update: float  # a parameter


# Of one thread of an EPYC, fitted to eight runs on text (docs/scale.md); its products of 1024 x 512 x 1024 had 121e9
# operations a second.
PEAK_CPU = 121e9
RATES_CPU = Rates(
    products=10.05e-12, moved=0.0, attention=10.35e-12, elementwise=18.3e-9, loss=5.77e-9, layer=0.0, update=2e-9
)


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
    """What one sequence takes, forward and backward: operations, bytes, and numbers that layers read."""

    products: float  # but for those of the head
    head: float
    moved: float
    attention: float
    elementwise: float  # numbers that layers read, in a forward pass
    modulated: float  # how many times as long each takes
    loss: float  # logits
    layers: int

    @property
    def operations(self) -> float:
        return self.products + self.head + self.attention


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run needs on so many GPUs. Sizes in bytes, times in seconds."""

    parameters: int
    steps: int
    tokens: int  # of all steps
    accumulate: int  # pieces that each process takes its share in
    checkpointing: bool  # of activations
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
        raise ValueError(
            f"objective {fields['objective']!r} is for text: {name or 'a network with classes'} draws pictures"
        )
    case: Case = DrawCase(**fields) if "classes" in fields else TrainCase(**fields)
    if tokens is not None:
        steps = math.ceil(tokens / (case.batch * case.config.length))
    drawing = TrainConfig(model=case.model, batch=case.batch, weights="arccos", steps=steps)
    settings = replace(case.settings, steps=steps) if isinstance(case, TrainCase) else drawing
    return PlannedRun(case=case, settings=settings)


def _unnamed(given: dict[str, Any]) -> dict[str, Any]:
    """The objective that `maskless train` would take."""
    chain = (
        "classes" not in given and given.get("model", "pgm") == "pgm" and given.get("context", "ordered") == "ordered"
    )
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


@lru_cache
def work_of(run: PlannedRun, *, padded: bool = False) -> Work:
    """Counted in the first batch of a run, or in as many sequences of it as settle the mean.

    padded: attention is over problems as long as the longest, as torch has it on a CPU.
    """
    config, n, L = run.case.config, min(run.settings.batch, SEQUENCES), run.tokens
    tokens = torch.zeros(n, L, dtype=torch.long)
    counted = torch.ones(n, L, dtype=torch.bool)
    if isinstance(run.case, DrawCase):
        counted[:, 0] = False  # the BOS
    problems = objective_of(run.settings)(tokens, *noise(n, L, seed=0, step=0), counted).problems
    passes, targets = 1 + flops.BACKWARD, problems.target_offsets.total
    attention, head = flops.training_attention(config, problems), 2 * targets * config.width * config.vocab
    numbers = flops.training_vectors(config, problems) * config.width / n
    return Work(
        products=passes * (flops.training(config, problems) - attention - head) / n,
        head=passes * head / n,
        moved=passes * numbers * 16 * 2,  # the matrices of a layer read and write 16 widths, of 2 bytes
        attention=passes * (flops.padded_attention(config, problems) if padded else attention) / n,
        elementwise=numbers,
        modulated=MODULATED if isinstance(run.case, DrawCase) else 1.0,
        loss=targets * config.vocab / n,
        layers=run.case.layers,
    )


@lru_cache
def measured() -> Rates:
    """The rates of the H200, from the profiled case: 751e12 operations a second, as the largest product alone had."""
    n, work = PROFILED.batch, work_of(PlannedRun(case=PROFILED, settings=PROFILED.settings))
    return Rates(
        products=math.sqrt(KERNELS["products"] ** 2 - (n * work.moved / COPY) ** 2) / (n * (work.products + work.head)),
        moved=1 / COPY,
        attention=KERNELS["attention"] / (n * work.attention),
        elementwise=KERNELS["elementwise"] / (n * work.elementwise),
        loss=KERNELS["loss"] / (n * work.loss),
        layer=(CLOCK - sum(KERNELS.values())) / work.layers,
        update=UPDATE / COPY,
    )


def rates(gpu: GPU) -> Rates:
    """Of a GPU: as those that were measured, slower by the peak or by the bandwidth; of a CPU all by the peak."""
    if isinstance(gpu, CPU):
        return Rates(**{name: rate * PEAK_CPU / gpu.peak for name, rate in vars(RATES_CPU).items()})
    slower = dict.fromkeys(("products", "attention"), ON.peak / gpu.peak)
    slower |= dict.fromkeys(("moved", "elementwise", "loss", "update"), ON.bandwidth / gpu.bandwidth)
    return Rates(**{name: rate * slower.get(name, 1.0) for name, rate in vars(measured()).items()})


def seconds_of(run: PlannedRun, gpu: GPU, sequences: int, *, checkpointing: bool = False) -> float:
    """Of a forward and backward pass over so many sequences."""
    work, rate = work_of(run, padded=isinstance(gpu, CPU)), rates(gpu)
    beside = work.attention * rate.attention + work.elementwise * work.modulated * rate.elementwise

    def products(operations: float) -> float:  # narrow ones are bound by bytes
        return math.hypot(operations * rate.products, work.moved * rate.moved)

    forward = (products(work.products) + beside) / (1 + flops.BACKWARD) if checkpointing else 0.0
    each = products(work.products + work.head) + beside + forward + work.loss * rate.loss
    return sequences * each + work.layers * rate.layer


def activations_of(run: PlannedRun, gpu: GPU, sequences: int, *, checkpointing: bool = False) -> float:
    """Bytes kept for the backward pass over so many sequences."""
    work, cpu = work_of(run), isinstance(gpu, CPU)
    each = ACTIVATION_CPU if cpu else ACTIVATION
    if checkpointing:  # one layer is computed again at a time, and GroupSwap is not checkpointed
        each = min(each, (STREAM_CPU if cpu else STREAM) + 2 * each / work.layers)
    return sequences * work.elementwise * each


def budget(run: PlannedRun, gpu: GPU, gpus: int = 1, *, checkpointing: bool = False) -> Budget:
    """What a run needs on so many GPUs of a kind, with the fewest pieces that fit, sharded where the state is large.

    checkpointing: of activations, in any case; it is taken too where nothing else fits, or where it is faster by a
    tenth: fewer pieces gather sharded weights less often.
    """
    check_positive(gpus=gpus)
    if isinstance(gpu, CPU) and gpus > 1:
        raise ValueError(f"gpus {gpus} of a CPU: expected 1")
    share, rest = divmod(run.settings.batch, gpus)
    if rest or not share:
        raise ValueError(f"batch {run.settings.batch} does not split over {gpus} GPUs: expected a multiple of {gpus}")
    again = _budget(run, gpu, gpus, share, checkpointing=True)
    if checkpointing:
        return again
    plain = _budget(run, gpu, gpus, share, checkpointing=False)
    better = again.fits and (not plain.fits or again.step < 0.9 * plain.step)
    return again if better else plain


def _budget(run: PlannedRun, gpu: GPU, gpus: int, share: int, *, checkpointing: bool) -> Budget:
    work, n, usable = work_of(run), run.parameters, USABLE * gpu.memory
    whole = n * (WEIGHT + GRADIENT + MOMENTS + AVERAGE)
    fsdp = gpus > 1 and whole > usable / 2
    state = whole / gpus + _gathered(run) if fsdp else float(whole)
    splits = [pieces for pieces in range(1, share + 1) if share % pieces == 0]
    sizes = {p: activations_of(run, gpu, share // p, checkpointing=checkpointing) for p in splits}
    pieces = next((pieces for pieces, size in sizes.items() if state + size <= usable), share)
    passes = pieces * seconds_of(run, gpu, share // pieces, checkpointing=checkpointing)
    sent = n * (2 * pieces * GATHERED + GRADIENT if fsdp else 2 * GRADIENT)  # gathered in both passes; reduced once
    speed = gpu.link if gpus <= TOGETHER else min(gpu.link, TOGETHER * NETWORK)  # what one GPU got, it hands on
    communication = 0.0 if gpus == 1 else sent / speed
    step = max(passes, communication) + n * rates(gpu).update / (gpus if fsdp else 1)
    tokens = run.settings.batch * run.tokens
    return Budget(
        parameters=n,
        steps=run.settings.steps,
        tokens=tokens * run.settings.steps,
        accumulate=pieces,
        checkpointing=checkpointing,
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
    return (2 * 12 * config.width**2 + 2 * config.vocab * config.width) * (GATHERED + GRADIENT)
