"""A distillation as a folder: distill.json, round-0 (the model it began with), a run in round-1, round-2, ..., model/.

Each round is a run like any other, with its own states and metrics; it begins with the averaged weights of the round
before, which are also its teacher. Killed at any moment, the distillation resumes where it was.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from maskless.api import load
from maskless.checkpoint import Model, digest
from maskless.codec.text import TextCodec
from maskless.codec.vq import ImageCodec
from maskless.data.image_tokens import PreparedImages
from maskless.data.tokens import Prepared
from maskless.files import json_text, write_aside
from maskless.objective import mixed_seed
from maskless.train.config import TrainConfig, check_names, check_ranges
from maskless.train.data import found_again, open_data, same_data
from maskless.train.distill import ARCCOS, GROUPS, UNIFORM, Stride, Teacher, teaching
from maskless.train.distill_loss import LOSSES
from maskless.train.folder import changed, read_config, write_config
from maskless.train.interruption import StoppedError
from maskless.train.loop import Progress, own_share, take_steps
from maskless.train.processes import check_processes, processes
from maskless.train.run import Run, RunConfig, complete

CONFIG, RESULTS = "distill.json", "rounds.json"
KINDS = {"partition": "pgm", "masked": "mdlm", "maskgit": "maskgit"}  # what `TrainConfig.model` calls a network


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Everything that determines a distillation; stands in its distill.json. Defaults are the paper's."""

    source: str  # the model as it was named; its weights are in round-0
    data: str  # a prepared folder
    train: TrainConfig  # of each round
    teacher_steps: int  # sampling steps of the first teacher
    rounds: int = 3
    ratio: int = 2  # of the teacher's steps to the student's, in each round
    loss: str = "kl-backward"
    groups: str = "two"
    fingerprint: str | None = None  # as in `RunConfig`

    def __post_init__(self) -> None:
        check_names(loss=(self.loss, LOSSES), groups=(self.groups, GROUPS))
        check_ranges(self, "1 or more", "rounds", "teacher_steps", "ratio")
        if self.ratio**self.rounds > self.teacher_steps:
            raise ValueError(
                f"{self.rounds} rounds divide the steps by {self.ratio**self.rounds}: "
                f"expected at least as many teacher steps, not {self.teacher_steps}"
            )

    def student_steps(self, number: int) -> float:
        """The sampling steps that the student of a round is made for."""
        return self.teacher_steps / self.ratio**number

    def write(self, folder: Path) -> None:
        write_config(folder / CONFIG, dataclasses.asdict(self))

    @staticmethod
    def read(folder: Path) -> DistillConfig:
        return read_config(
            folder / CONFIG,
            "the configuration of a distillation",
            lambda fields: DistillConfig(**fields | {"train": TrainConfig(**fields["train"])}),
        )


@dataclass(frozen=True, kw_only=True)
class RoundConfig(RunConfig):
    """A run that learns from a teacher."""

    distill: DistillConfig
    number: int  # 1, 2, ...


@dataclass(frozen=True)
class RoundSummary:
    """How a round ended."""

    round: int
    sampling_steps: float
    steps: int
    seconds: float
    perplexity: float  # the validation bound of the student
    perplexity_error: float  # nan: of one sequence


class Round(Run):
    """A round in progress."""

    config: RoundConfig

    def build(self) -> nn.Module:
        teacher = _teacher_of(self.folder.parent, self.config.number)
        data, pictures = self.data, isinstance(self.data, PreparedImages)
        special = (data.mask, data.bos) if isinstance(data, PreparedImages) else ()
        never = tuple(i for i in special if i < teacher.config.vocab)
        student = type(teacher.network)(teacher.config)
        student.load_state_dict(teacher.network.state_dict())
        self.teacher = Teacher(teacher.network.to(self.accelerator.device), never)
        share = 1 / self.config.distill.student_steps(self.config.number)
        self.stride = Stride(share=share, ratio=self.config.distill.ratio, pace=ARCCOS if pictures else UNIFORM)
        unknown = data.length - int(teacher.layout != "packed")  # a BOS is given
        self.how = {"steps": min(unknown, max(1, round(1 / share)))}
        return student

    def steps(self) -> Iterator[Progress]:
        distill, at = self.config.distill, self.accelerator
        rows, common = self.rows(), (self.settings, self.stride, distill.groups)
        work = teaching(self.teacher, LOSSES[distill.loss], rows, *common, pad=self.data.pad, **own_share(at))
        return take_steps(self.network, self.optimizer, work, self.settings, at, **self.at)

    @cached_property
    def operations(self) -> None:
        """Not counted: the teacher's differ from step to step."""
        return None

    def end(self) -> None:
        """Close the trackers; the processes stay together for the rounds that follow."""
        for tracker in self.accelerator.trackers:
            tracker.finish()


@dataclass(frozen=True, kw_only=True)
class DistillRequest:
    """What a user asked for; None means: as it comes out."""

    source: str | None = None
    data: Path | None = None
    tokenizer: str | None = None
    how: dict[str, Any] = field(default_factory=dict)  # keywords of `DistillConfig`
    train: dict[str, Any] = field(default_factory=dict)  # keywords of `TrainConfig`


def begin(folder: Path, request: DistillRequest) -> DistillConfig:
    """Put the model in round-0 and the configuration beside it; what is not given follows from the model."""
    source = request.source
    if source is None or request.data is None:
        raise ValueError("what to distill, and on what? expected MODEL and --data DIR (a prepared folder)")
    if (folder / CONFIG).exists():
        raise StoppedError(f"{folder} holds a distillation already: resume it with --resume, or name another --out")
    if (folder / "run.json").exists():
        raise ValueError(f"{folder} holds a training run: name another --out")
    model = load(source, tokenizer=request.tokenizer, device="cpu")
    if model.kind not in KINDS:
        raise ValueError(f"{source} is an AR model, which decides a token in each step: expected pgm, mdlm or maskgit")
    prepared = open_data(request.data)
    _check_fit(source, model, prepared)
    settings = _settings(model.kind, isinstance(prepared, PreparedImages), request.train)
    check_processes(settings, processes())
    derived: dict[str, Any] = {
        "source": source,
        "data": str(prepared.folder.resolve()),
        "teacher_steps": prepared.length - int(model.layout != "packed"),
        "groups": "two" if model.kind == "partition" else "one",
    }
    config = DistillConfig(train=settings, **derived | request.how)
    if config.teacher_steps > prepared.length:
        raise ValueError(f"teacher_steps {config.teacher_steps} is out of range: expected 1 to {prepared.length}")
    processes().wait_for_everyone()  # all have seen that the folder is free
    if processes().is_main_process:
        model.save_pretrained(folder / "round-0")
        config.write(folder)  # last: what stands beside it is whole
    processes().wait_for_everyone()
    return config


def resumed(folder: Path, request: DistillRequest) -> DistillConfig:
    """The configuration of a resumed distillation, with more rounds or another end of each if they are named."""
    config = DistillConfig.read(folder)
    own = dataclasses.asdict(config) | dataclasses.asdict(config.train)
    place = config.data
    if request.data is not None:
        place = found_again(config.data, request.data, config.fingerprint, folder)
    source = {} if request.source is None else {"source": request.source}
    given = source | request.how | request.train
    new = changed(folder, own, given, also=("rounds",), what="a distillation")
    settings = dataclasses.replace(config.train, **new)
    return dataclasses.replace(config, data=place, train=settings, rounds=request.how.get("rounds", config.rounds))


def finished(folder: Path, config: DistillConfig) -> list[RoundSummary] | None:
    """The rounds of a distillation that has all of them; None: something is left to do."""
    done = _results(folder)
    return done if len(done) >= config.rounds and (folder / "model" / "config.json").is_file() else None


def distill(folder: Path, config: DistillConfig, console: Console) -> list[RoundSummary]:
    """Go through the rounds that are not done yet, showing progress. The newest student is also in model/."""
    done = _results(folder)
    if len(done) < config.rounds:
        known = same_data(open_data(config.data), config.fingerprint, folder)
        config = dataclasses.replace(config, fingerprint=known)
    if processes().is_main_process:
        config.write(folder)
    for number in range(len(done) + 1, config.rounds + 1):
        steps = config.student_steps(number)
        settings = dataclasses.replace(config.train, seed=mixed_seed(config.train.seed, number))
        data: dict[str, Any] = {"data": config.data, "fingerprint": config.fingerprint}
        with console.status("setting up ..."):
            network = dataclasses.asdict(_teacher_of(folder, number).config)
            run = RoundConfig(**data, network=network, train=settings, distill=config, number=number)
            this = Round(folder / f"round-{number}", run)
        ended = complete(this, console, name=f"round {number} of {config.rounds}, {steps:g} steps")
        found = ended.likelihood
        done.append(RoundSummary(number, steps, ended.steps, ended.seconds, found.perplexity, found.perplexity_error))
        if processes().is_main_process:
            _teacher_of(folder, number + 1).save_pretrained(folder / "model")
            _note(folder, done)
        processes().wait_for_everyone()
    processes().destroy_process_group()
    return done


def _note(folder: Path, done: list[RoundSummary]) -> None:
    """Write down which rounds are done."""
    text = json_text([dataclasses.asdict(each) for each in done], indent=2) + "\n"
    write_aside(folder / RESULTS, lambda path: path.write_text(text))


def _teacher_of(folder: Path, number: int) -> Model:
    """The model of the round before, with its averaged weights."""
    return load(folder / f"round-{number - 1}", device="cpu")


def _results(folder: Path) -> list[RoundSummary]:
    """The rounds that are done."""
    path = folder / RESULTS
    done = [RoundSummary(**fields) for fields in json.loads(path.read_text())] if path.exists() else []
    unknown = {"perplexity_error": math.nan}  # null in JSON
    return [dataclasses.replace(each, **unknown) if each.perplexity_error is None else each for each in done]


def _settings(kind: str, pictures: bool, given: dict[str, Any]) -> TrainConfig:
    steps = given.get("steps", 10_000)
    derived: dict[str, Any] = {
        "model": KINDS[kind],
        "steps": 10_000_000 if given.get("minutes") and "steps" not in given else steps,
        "batch": 128,
        "learning_rate": 3e-4,
        "warmup": None if given.get("minutes") else min(2_500, max(10, steps // 20)),
        "sample_every": None,
    }
    if pictures and kind == "partition":
        derived["weights"] = "arccos"
    return TrainConfig(**derived | given)


def _check_fit(source: str, model: Model, data: Prepared | PreparedImages) -> None:
    """Whether the data has the model's tokens and length."""
    pictures = isinstance(data, PreparedImages)
    if pictures != (model.layout == "image"):
        kinds = ("pictures", "text") if pictures else ("text", "pictures")
        raise ValueError(f"{data.folder} holds {kinds[0]}, {source} is a model of {kinds[1]}")
    if model.config.length != data.length:
        raise ValueError(f"the data in {data.folder} has length {data.length}, {source} {model.config.length}")
    if isinstance(data, PreparedImages):
        _check_pictures(source, model, data)
    elif isinstance(model.codec, TextCodec):
        if data.codec().tokenizer.get_vocab() != model.codec.tokenizer.get_vocab():
            raise ValueError(
                f"the data in {data.folder} has another vocabulary: prepare it with the tokenizer of {source}"
            )
    elif data.vocab > model.config.vocab:
        raise ValueError(f"the data in {data.folder} has {data.vocab} ids, {source} {model.config.vocab}")


def _check_pictures(source: str, model: Model, data: PreparedImages) -> None:
    """Whether codes and labels mean to the model what they mean in the data.

    A released model has neither a codec nor names of its classes: only the numbers of both are compared.
    """
    if data.codes > model.config.vocab:
        raise ValueError(f"the pictures in {data.folder} have {data.codes} codes, {source} {model.config.vocab} ids")
    if isinstance(model.codec, ImageCodec) and _codec_facts(data.codec()) != _codec_facts(model.codec):
        raise ValueError(f"the pictures in {data.folder} have another codec: prepare them with the codec of {source}")
    count = getattr(model.config, "classes", None) or 0
    if count > 1 and not model.classes:  # of one without a name only "no class" was trained, as MaskGIT needs it
        if len(data.classes) != count:
            raise ValueError(f"the pictures in {data.folder} have {len(data.classes)} classes, {source} {count}")
        return
    for number, (own, its) in enumerate(zip_longest(data.classes, model.classes)):
        if own != its:
            raise ValueError(
                f"class {number} of the pictures in {data.folder} is {own or 'missing'}, of {source} "
                f"{its or 'missing'}: expected the same classes in the same order"
            )


def _codec_facts(codec: ImageCodec) -> tuple[object, ...]:
    return type(codec), codec.codes, codec.channels, digest(codec)
