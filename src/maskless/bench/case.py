"""What is measured: a network of given sizes with random weights, and the work that it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from maskless.checkpoint import NETWORKS
from maskless.flops import Config
from maskless.how import check_name, check_positive
from maskless.nn.blocks import open_gates
from maskless.nn.causal import CausalConfig
from maskless.nn.masked import MaskedConfig
from maskless.nn.maskgit import MaskGITConfig
from maskless.nn.partition import CONTEXTS, PartitionConfig
from maskless.order import COUNTS
from maskless.train.config import IMAGE_MODELS, MODELS, PGM_OBJECTIVES, TEXT_MODELS, TrainConfig

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SAMPLED = ("pgm", "mdlm", "ar")  # complementary masks change how MDLM is trained, not how it samples
OF_PGM = ("context", "encoder", "refresh", "objective")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network and a batch. The defaults are the paper's PGM 8/8 on OpenWebText."""

    model: str = "pgm"
    context: str = "full"  # of pgm
    layers: int = 16  # in all
    encoder: int | None = None  # of pgm: how many of the layers; half by default
    width: int = 768
    vocab: int = 50_257
    length: int = 1024
    batch: int = 32
    precision: str = "bf16"

    known: ClassVar[Sequence[str]] = TEXT_MODELS
    rival: ClassVar[str] = "mdlm"  # the masked model that PGM is compared with

    def __post_init__(self) -> None:
        check_name("model", self.model, self.known)
        check_name("context", self.context, CONTEXTS)
        check_name("precision", self.precision, PRECISIONS)
        check_positive(**{name: getattr(self, name) for name in ("layers", "width", "vocab", "length", "batch")})
        if self.kind == "partition":
            encoder = self.layers // 2 if self.encoder is None else self.encoder
            if not 0 < encoder < self.layers:
                raise ValueError(f"encoder {encoder} of {self.layers} layers: expected 1 to {self.layers - 1}")
            object.__setattr__(self, "encoder", encoder)
        elif self.context != "full" or self.encoder is not None:
            raise ValueError(f"context and encoder belong to pgm: the model is {self.model}")
        _ = self.config  # raises for a width that does not split into heads

    @property
    def kind(self) -> str:
        return MODELS[self.model][0]

    @property
    def config(self) -> Config:
        """The network's configuration, with heads as training gives them."""
        sizes: dict[str, Any] = {"vocab": self.vocab, "length": self.length, "width": self.width, "heads": self.heads}
        if self.encoder is not None:
            decoder = self.layers - self.encoder
            return PartitionConfig(**sizes, encoder=self.encoder, decoder=decoder, context=self.context)
        if self.kind == "masked":
            return MaskedConfig(**sizes | {"vocab": self.vocab + 1}, mask=self.vocab, layers=self.layers)
        return CausalConfig(**sizes, layers=self.layers)

    @property
    def heads(self) -> int:
        return max(1, self.width // (64 if self.width >= 256 else 32))

    @property
    def name(self) -> str:
        """PGM 8/8 x768, MDLM 12 x768, MaskGIT 24 x1024, ..."""
        model, _, more = self.model.partition("-")
        depth = str(self.layers) if self.encoder is None else f"{self.encoder}/{self.layers - self.encoder}"
        said = ["MaskGIT" if model == "maskgit" else model.upper(), depth, f"x{self.width}"]
        return " ".join([*said, *["ordered"] * (self.context == "ordered"), *([more] if more else [])])

    def network(self, device: torch.device) -> nn.Module:
        """The network with random weights, gates open, so that nothing is trivially zero."""
        torch.manual_seed(0)
        network: nn.Module = NETWORKS[self.kind][1](self.config)
        open_gates(network)
        return network.to(device)


@dataclass(frozen=True, kw_only=True)
class SampleCase(Case):
    """Decide all of a batch of sequences, nothing known, in some steps."""

    known: ClassVar[Sequence[str]] = SAMPLED

    steps: int = 128
    counts: str = "uniform"
    refresh: int = 1  # of pgm with full context: encode everything every so many steps (more than 1 is approximate)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("counts", self.counts, COUNTS)
        check_positive(refresh=self.refresh)
        if not 1 <= self.steps <= self.length:
            raise ValueError(f"steps {self.steps} is out of range: expected 1 to {self.length}, the length")
        if self.model == "ar" and self.steps != self.length:
            raise ValueError(f"steps {self.steps} of ar: expected {self.length}, one step for each token")
        if self.refresh > 1 and (self.model, self.context) != ("pgm", "full"):
            raise ValueError(f"refresh {self.refresh} belongs to pgm with full context: this is {self.name}")

    @property
    def name(self) -> str:
        more = [self.counts + " counts"] * (self.counts != type(self).counts and self.model == "pgm")
        more += [f"refreshed every {self.refresh}"] * (self.refresh > 1)
        return ", ".join([super().name, *more])


@dataclass(frozen=True, kw_only=True)
class DrawCase(SampleCase):
    """Draw a batch of pictures by label, in the Halton order. The defaults are the paper's PGM 12/12 on ImageNet.

    A sequence is a BOS and `length` tokens of a square grid, of a codec with `vocab` codes; the codec is left out.
    """

    known: ClassVar[Sequence[str]] = IMAGE_MODELS
    rival: ClassVar[str] = "maskgit"

    layers: int = 24
    width: int = 1024
    vocab: int = 16_384
    steps: int = 32
    counts: str = "arccos"
    classes: int = 1000
    guidance: float = 2.0  # weight at the end of a ramp; 0: none

    @property
    def grid(self) -> tuple[int, int]:
        side = math.isqrt(self.length)
        if side * side != self.length:
            raise ValueError(f"length {self.length} is no square: expected a grid of as many rows as columns")
        return side, side

    @property
    def config(self) -> Config:
        """As the released networks have it: ids for a mask and a BOS after the codes, and a register."""
        sizes: dict[str, Any] = {"length": 1 + self.length, "width": self.width, "heads": self.heads}
        sizes |= {"classes": self.classes, "grid": self.grid}
        if self.encoder is None:
            return MaskGITConfig(**sizes, vocab=self.vocab + 1, mask=self.vocab, layers=self.layers)
        sizes |= {"vocab": self.vocab + 2, "never": self.vocab, "condition": self.width, "registers": True}
        decoder = self.layers - self.encoder
        return PartitionConfig(**sizes, encoder=self.encoder, decoder=decoder, context=self.context)


@dataclass(frozen=True, kw_only=True)
class TrainCase(Case):
    """Train on a batch of full sequences."""

    objective: str = "partition"  # of pgm; a chain has random orders, and an ordered context

    def __post_init__(self) -> None:
        check_name("objective", self.objective, PGM_OBJECTIVES)
        if self.objective == "chain":
            if self.model != "pgm":
                raise ValueError(f"objective 'chain' belongs to pgm: the model is {self.model}")
            object.__setattr__(self, "context", "ordered")
        super().__post_init__()

    @property
    def settings(self) -> TrainConfig:
        """As the training loop has it."""
        orders = "random=100" if self.objective == "chain" else ""
        return TrainConfig(model=self.model, objective=self.objective, orders=orders, batch=self.batch)

    @property
    def name(self) -> str:
        return super().name.replace(" ordered", " chain") if self.objective == "chain" else super().name


def sweep(
    kind: type[Case],
    sizes: dict[str, Any],
    *,
    against: list[str],
    lengths: list[int],
    batches: list[int],
    steps: list[int] | None,
) -> list[Case]:
    """Every combination of lengths, batches and (sampling) steps, for a model and its rivals of the same sizes.

    A causal network takes one step for each token, so as a rival it comes once for a length and a batch.
    """
    first = sizes.get("model", Case.model)
    for rival in against:
        check_name("rival", rival, [name for name in (SAMPLED if kind is SampleCase else TEXT_MODELS) if name != first])
    cases: list[Case] = []
    for model in dict.fromkeys([first, *against]):
        own = {name: value for name, value in sizes.items() if model == first or name not in OF_PGM}
        for length in lengths:
            at: list[dict[str, int]] = [{}]
            if kind is SampleCase:
                taken = [length] if model == "ar" and (model != first or steps is None) else steps or [SampleCase.steps]
                at = [{"steps": k} for k in taken]
            for batch in batches:
                cases += [kind(**own | {"model": model, "length": length, "batch": batch, **more}) for more in at]
    return cases
