"""A hosted model: a network with its batcher, its codec, and the limits of what may be asked of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

from maskless import decide
from maskless.checkpoint import Model
from maskless.codec.text import TextCodec
from maskless.codec.vq import ImageCodec
from maskless.drafts import Drafts
from maskless.engine import Slots, slots_of
from maskless.how import How
from maskless.images import codec_of, grid_of
from maskless.nn.causal import CausalTransformer
from maskless.nn.partition import chains
from maskless.serve.batcher import Batcher
from maskless.serve.shares import FairShare

LOOPBACK = {"127.0.0.1", "localhost", "::1"}  # names of this machine
FILES = 256  # descriptors that connections leave free: for files, and for what is accepted before it is refused
NAMES = {"partition": "PGM", "masked": "MDLM", "causal": "AR", "maskgit": "MaskGIT"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request, and all of them together, may ask for."""

    length: int = 4096  # tokens of a text; never more than the model's context
    steps: int = 1024
    rows: int = 16  # texts of a request
    batch: int = 64  # rows that are computed together
    queue: int = 64  # requests that wait for a slot
    seconds: float = 60.0  # from a request's arrival to its end
    body: int = 1 << 20  # bytes of a request

    def __post_init__(self) -> None:
        for name in ("length", "steps", "rows", "batch", "queue", "body"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is out of range: expected 1 or more")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"timeout {self.seconds} is out of range: expected more than 0 seconds")

    @property
    def connections(self) -> int:
        """How many may be open at once. Seven of eight may have a request under way; the rest is told of it."""
        return min(8 * (self.queue + self.batch), _descriptors())


def _descriptors() -> int:
    """How many descriptors of this process connections may take."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are none
        return 1 << 20
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else max(1, most // 2, most - FILES)


class Host:
    """A model that answers requests under a name of its own."""

    def __init__(self, name: str, model: Model, limits: Limits, share: FairShare | None = None):
        self.name, self.model, self.limits, self.created = name, model.eval(), limits, int(time.time())
        if model.codec is None:
            raise ValueError(f"the model {name} has no tokenizer or codec: convert it with one first")
        backend = slots_of(model.network, int(model.config.length))
        batch = min(limits.batch, backend.room) if isinstance(backend, Slots) else limits.batch
        self.batcher = Batcher(name, backend, self.vocab, batch=batch, queue=limits.queue, share=share)

    @property
    def pictures(self) -> bool:
        return self.model.frame.grid is not None

    @property
    def vocab(self) -> int:
        return int(self.model.config.vocab)

    @property
    def causal(self) -> bool:
        return isinstance(self.model.network, CausalTransformer)

    @property
    def text(self) -> TextCodec:
        return self.model.text_codec

    @property
    def codec(self) -> ImageCodec:
        return codec_of(self.model)

    @property
    def lead(self) -> list[int]:
        """What every sequence of the model begins with."""
        return self.model.lead

    @property
    def length(self) -> int:
        """The longest sequence that may be asked for."""
        return min(int(self.model.config.length), self.limits.length)

    def described(self) -> dict[str, Any]:
        """What a client may know about the model."""
        config = self.model.config
        about: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "maskless",
            "kind": NAMES[self.model.kind],
            "modality": "pictures" if self.pictures else "text",
            "parameters": sum(p.numel() for p in self.model.network.parameters()),
            "max_steps": self.limits.steps,
            "defaults": self.model.defaults,
            "order": decide.settled(self.model, How(), self.length).order,
            "quality": self.model.quality,
        }
        if self.pictures:
            h, w = grid_of(self.model)
            size = {"grid": [h, w], "pixels": [h * self.codec.factor, w * self.codec.factor]}
            about |= size | {"classes": list(self.model.classes) or [str(i) for i in range(config.classes or 0)]}
        else:
            about |= {"max_length": self.length, "max_texts": self.limits.rows, "any_order": not self.causal}
            about |= {"orders": None if self.model.mixture is None else str(self.model.mixture)}
            about |= {"exact": chains(self.model.network)}
        return about

    def piece(self, token: int) -> str:
        """How a token looks between its neighbours: pieces side by side read as the text does."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else ""

    @cached_property
    def _pieces(self) -> list[str]:
        codec = self.text
        texts = ["" if i in codec.marks else codec.token_text(i) for i in range(codec.vocab)]
        if codec.byte_level:
            return texts
        return [text[2:] if text.startswith("##") else f" {text}" if text else "" for text in texts]

    def within(self, how: How, unknown: int) -> How:
        """What is not said, as the server allows it; and never more steps than unknown tokens."""
        most, how = self.limits.steps, how.with_defaults(self.model.defaults, unknown)
        if how.steps is not None and how.steps > most:
            raise ValueError(f"{how.steps} steps are more than the server allows: {most}")
        if self.causal:
            return replace(how, steps=None)
        if how.steps is None and how.strands is None:
            how = replace(how, steps=decide.settled(self.model, how, unknown).steps)
            return how if unknown <= most else replace(how, steps=min(how.steps or most, most))
        return how if how.steps is None else replace(how, steps=min(how.steps, unknown))

    def checked(self, drafts: Drafts) -> Drafts:
        """Drafts that take no more steps than the server allows."""
        if drafts.steps > self.limits.steps:
            first, revise, most = drafts.plan.steps, drafts.revise, self.limits.steps
            rounds = f" and revise {revise} make {drafts.steps}," if revise else " are"
            raise ValueError(f"{first} steps{rounds} more than the server allows: {most}")
        return drafts


def name_of(source: str, taken: set[str]) -> str:
    """A short name for a model: the last part of where it comes from, with a number where two would be alike."""
    path = Path(source)
    name = path.stem if path.is_file() else path.name or "model"
    numbered = (f"{name}-{number}" for number in count(2))
    return next(one for one in chain([name], numbered) if one not in taken)
