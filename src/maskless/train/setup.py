"""From what a user asked for to a run's configuration: what was not said comes from a recipe or from the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from maskless.codec.text import byte_codec, codec
from maskless.data.sources import read
from maskless.data.tokens import Prepared, open_tokens
from maskless.train.loop import TrainConfig
from maskless.train.plan import Plan, network_config, plan
from maskless.train.run import RunConfig

CHARACTERS_PER_PACKED_BYTE = 3.5  # of text in .gz, .xz and .zst files
PACKED = (".gz", ".xz", ".zst")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asked for; None means: as it comes out."""

    text: list[str] | None = None
    data: Path | None = None
    vocab: int | None = None
    tokenizer: str | None = None
    length: int | None = None
    network: dict[str, Any] = dataclasses.field(default_factory=dict)  # keywords of `network_config`
    train: dict[str, Any] = dataclasses.field(default_factory=dict)  # keywords of `TrainConfig`


Prepare = Callable[..., Prepared]


def configure(folder: Path, request: Request, prepare: Prepare) -> RunConfig:
    """A run's configuration. With a text, its tokens are made in the run's folder first, by one process for all."""
    if (request.text is None) == (request.data is None):
        raise ValueError("what to train on? expected either --text FILE or --data DIR (a prepared folder)")
    if (folder / "run.json").exists():
        raise ValueError(f"{folder} holds a run already: go on with --resume, or name another --out")
    if request.text is not None:
        data, sizes = _from_text(folder, request, request.text, prepare)
    else:
        if request.vocab or request.tokenizer or request.length:
            raise ValueError("--vocab, --tokenizer and --length go with --text: prepared data has its own")
        assert request.data is not None
        data = open_tokens(request.data)
        size = data.splits["train"].bytes
        sizes = plan(size, device(), request.train.get("minutes"))
    model = request.train.get("model", "pgm")
    network = {"width": sizes.width, "layers": sizes.layers} | request.network
    steps = request.train.get("steps", sizes.steps)
    derived = {
        "steps": steps,
        "batch": sizes.batch,
        "learning_rate": sizes.learning_rate,
        "warmup": 100 if request.train.get("minutes") else min(2_500, max(10, steps // 20)),
        "decay": "cosine",
        "evaluate_every": max(100, min(1_000, steps // 5)),
        "save_every": max(100, min(1_000, steps // 5)),
    }
    return RunConfig(
        data=str(data.folder),
        network=dataclasses.asdict(network_config(model, data.codec(), data.length, **network)),
        train=TrainConfig(**derived | request.train),
    )


def _from_text(folder: Path, request: Request, text: list[str], prepare: Prepare) -> tuple[Prepared, Plan]:
    corpus = read(text)  # names a missing or empty file before anything is made
    packed = any(name.endswith(PACKED) for name in corpus.names)
    characters = int(corpus.total * (CHARACTERS_PER_PACKED_BYTE if packed else 1))
    sizes = plan(characters, device(), request.train.get("minutes"))
    vocab = request.vocab or (None if request.tokenizer else sizes.vocab)
    own = codec(request.tokenizer) if request.tokenizer else (None if vocab else byte_codec())
    with PartialState().main_process_first():
        if not (folder / "data" / "index.json").exists():
            prepare(text, folder / "data", codec=own, vocab=vocab, length=request.length or sizes.length)
    return open_tokens(folder / "data"), sizes


def device() -> torch.device:
    """Where this process trains."""
    return torch.device(PartialState().device)
