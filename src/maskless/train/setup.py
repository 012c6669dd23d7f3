"""From what a user asked for to a run's configuration: what was not said comes from a recipe or from the text."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from maskless.codec.text import byte_codec, codec
from maskless.data.image_tokens import holds_images, open_images
from maskless.data.sources import read
from maskless.data.tokens import Prepared, open_tokens
from maskless.data.unpack import PACKED_SUFFIXES
from maskless.files import locked
from maskless.mixture import IMAGE_DEFAULT, TEXT_DEFAULT, Mixture
from maskless.train.config import TrainConfig
from maskless.train.data import found_again
from maskless.train.folder import changed
from maskless.train.interruption import StoppedError
from maskless.train.plan import Sizes, image_network_config, network_config, plan
from maskless.train.processes import check_processes, processes
from maskless.train.run import RunConfig

CHARACTERS_PER_PACKED_BYTE = 3.5  # of text in .gz, .xz and .zst files


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
    if request.vocab is not None and request.tokenizer is not None:
        raise ValueError("--tokenizer and --vocab exclude each other: take a tokenizer, or train one")
    if (folder / "run.json").exists():
        raise StoppedError(f"{folder} holds a run already: resume it with --resume, or name another --out")
    if request.data is not None and (request.vocab, request.tokenizer, request.length) != (None, None, None):
        raise ValueError("--vocab, --tokenizer and --length go with --text: prepared data has its own")
    device, image = torch.device(processes().device), request.data is not None and holds_images(request.data)
    sizes = plan(_characters(request), device, request.train.get("minutes"))
    settings = _settings(request, sizes)
    check_processes(settings, processes())
    network = {"width": sizes.width, "layers": sizes.layers} | request.network
    if settings.objective == "chain":
        near = (1 if image else 2) if device.type == "cpu" else 0  # where it was measured
        network = {"context": "ordered", "swap": "gated", "neighbours": near} | network
        for name, needs in (("context", "ordered"), ("queries", "position")):
            if network.get(name, needs) != needs:
                raise ValueError(f"{name} {network[name]!r} with a chain: expected {needs!r}, or --objective partition")
    if image:
        assert request.data is not None
        images = open_images(request.data)
        if settings.model == "pgm":
            network = {"rope": "2d"} | network
        config = image_network_config(settings.model, images, **network)
        if settings.orders:
            Mixture.parse(settings.orders, image=True).families(images.length - 1, images.grid)  # regions that fit
        if settings.model == "pgm" and settings.weights != "arccos":
            raise ValueError(f"weights {settings.weights!r} are for text: expected arccos, since these are pictures")
        return RunConfig(data=str(images.folder.resolve()), network=dataclasses.asdict(config), train=settings)
    if settings.model == "maskgit" or settings.weights == "arccos":
        raise ValueError("maskgit and the arccos weights are for pictures: this is text")
    network_config(settings.model, byte_codec(), sizes.length, **network)  # a mistake shows before the work begins
    data = _from_text(folder, request, sizes, prepare) if request.data is None else open_tokens(request.data)
    return RunConfig(
        data=str(data.folder.resolve()),
        network=dataclasses.asdict(network_config(settings.model, data.codec(), data.length, **network)),
        train=settings,
    )


def _characters(request: Request) -> int:
    """About how long the text is."""
    if request.data is not None and holds_images(request.data):
        return int(open_images(request.data).splits["train"].tokens * CHARACTERS_PER_PACKED_BYTE)
    if request.data is not None:
        return open_tokens(request.data).splits["train"].bytes
    corpus = read(request.text or [])  # names a missing or empty file before anything is made
    packed = any(name.endswith(PACKED_SUFFIXES) for name in corpus.names)
    return int(corpus.total * (CHARACTERS_PER_PACKED_BYTE if packed else 1))


def _settings(request: Request, sizes: Sizes) -> TrainConfig:
    steps = request.train.get("steps", sizes.steps)
    derived = {
        "steps": steps,
        "batch": sizes.batch,
        "learning_rate": sizes.learning_rate,
        "warmup": None if request.train.get("minutes") else min(2_500, max(10, steps // 20)),
        "decay": "cosine",
        "sample_every": None,
    }
    image = request.data is not None and holds_images(request.data)
    if request.train.get("model", "pgm") == "pgm":
        derived["weights"] = "arccos" if image else "bounded"
        derived |= _objective(request, image)
    return TrainConfig(**derived | request.train)


def _objective(request: Request, image: bool) -> dict[str, str]:
    """The objective of a PGM that was not asked for: a chain, unless what was asked for belongs to two groups."""
    given, asked = request.train, request.train.get("objective")
    kinds = {"context": "ordered", "queries": "position"} | request.network
    of_two = image or "weights" in given or (kinds["context"], kinds["queries"]) != ("ordered", "position")
    if asked == "partition" or (asked is None and of_two and "orders" not in given):
        return {"objective": "partition"}
    if "weights" in given:
        raise ValueError(f"weights {given['weights']!r} belong to two groups: a chain weighs every token alike")
    orders = given.get("orders") or (IMAGE_DEFAULT if image else TEXT_DEFAULT)
    return {"objective": "chain", "orders": str(Mixture.parse(orders, image=image))}


# What a run, a codec's run or a distillation puts in its folder before its first step.
MADE = ("run.json", "metrics.jsonl", "tensorboard", "data", ".data.parts", "distill.json", "round-0", "round-1")


@contextmanager
def run_folder(folder: Path, *, together: bool = True) -> Iterator[None]:
    """A folder for one run at a time; after an error before the first loss, what a new run made in it is gone again.

    What was there before stays, and a run that was there is left as it is. So is one that met a full disk: it goes on
    as it began when there is room. together: whether the processes that a launcher started share the run.
    """
    with _alone(folder) if together else locked(folder), _nothing_left(folder):
        yield


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The first of the processes that train together has the lock; where it gets none, all of them say why."""
    with ExitStack() as stack:
        refused: Exception | None = None
        if processes().is_main_process:
            try:
                stack.enter_context(locked(folder))
            except (ValueError, OSError) as error:
                refused = error
        refused = broadcast_object_list([refused])[0]
        if refused is not None:
            raise refused
        yield


@contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    before = set(os.listdir(folder) if folder.is_dir() else [])
    try:
        yield
    except OSError:
        raise
    except Exception:
        losses = (folder / "metrics.jsonl", folder / "round-1" / "metrics.jsonl")
        begun = any(path.is_file() and path.stat().st_size for path in losses)
        if processes().is_main_process and not begun and not before & {"run.json", "distill.json"}:
            for path in (folder / name for name in MADE if name not in before):
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def resumed(folder: Path, request: Request) -> RunConfig:
    """The configuration of a resumed run, with a new end or other milestones if the request names them."""
    config = RunConfig.read(folder)
    network = {"layers": config.network.get("encoder", 0) + config.network.get("decoder", 0)} | config.network
    own = dataclasses.asdict(config.train) | {k: v for k, v in network.items() if k in request.network}
    if request.text is not None:
        text, other = (", ".join(names) for names in (open_tokens(config.data).sources, read(request.text).names))
        if other != text:
            raise ValueError(f"the text is {text} in {folder}, not {other}: a run goes on as it began")
    data = found_again(config.data, request.data, config.fingerprint, folder)
    if request.length not in (None, config.network["length"]):
        raise ValueError(f"length is {config.network['length']} in {folder}, not {request.length}")
    given = request.network | request.train
    if unknown := [name for name in given if name not in own]:
        raise ValueError(f"{unknown[0]} is no setting of the {config.train.model} in {folder}: leave it out")
    new = changed(folder, own, given)
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, **new))


def _from_text(folder: Path, request: Request, sizes: Sizes, prepare: Prepare) -> Prepared:
    """Tokens of the text; what an earlier try left, whole or in parts, is made again."""
    own = None if request.tokenizer is None else codec(request.tokenizer)
    vocab = sizes.vocab if request.vocab is None and own is None else request.vocab
    if vocab is None and own is None:
        own = byte_codec()
    with processes().main_process_first():
        if processes().is_main_process:
            for part in folder.glob(".data.*"):
                shutil.rmtree(part)
            length = sizes.length if request.length is None else request.length
            try:
                prepare(request.text, folder / "data", codec=own, vocab=vocab, length=length, overwrite=True)
            except BaseException:
                with suppress(OSError):  # a mistake leaves no empty folder behind
                    folder.rmdir()
                raise
    return open_tokens(folder / "data")
