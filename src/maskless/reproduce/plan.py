"""From a table to the commands that make it: prepare, train, distill, evaluate, measure; each one once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskless.bench.case import Case, Sampling, Training
from maskless.data.image_tokens import holds_images
from maskless.data.images import looks_like_images, read_images
from maskless.data.tokens import INDEX, open_tokens
from maskless.evaluate.inception import TORCH_FIDELITY
from maskless.recipes import RECIPES, Recipe
from maskless.reproduce.scale import OPTIONS, Scale
from maskless.reproduce.tables import Answers, Bound, Curve, Line, Pictures, Speed, Table, Texts, Work

SETS = {"lm1b": ("LM1B", 30_522), "owt": ("OpenWebText", 50_257), "imagenet": ("ImageNet", 16_384)}  # and vocabulary
SIZES = ("layers", "width", "vocab", "length", "batch")
CONFIDENT = "arccos-after-one"  # counts of the released confidence sampler; of the Halton one: arccos, the default
RATIO = 2  # of a teacher's steps to its student's
PIECE = 33_000  # tokens of a piece that a GPU takes at once in a full-size run
SHARED = ("train", "distill", "evaluate")  # what several processes do together


class MissingError(ValueError):
    """What stands in the way of a row."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asked for."""

    scale: Scale
    out: Path
    text: str | None = None
    pictures: str | None = None
    judge: str | None = None
    features: tuple[str, ...] = ()  # options that name a feature network
    codec: str | None = None
    processes: int = 1


@dataclass(frozen=True)
class Step:
    """A command, and what must be done before it."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    makes: Path | None = None  # a file that appears last, so that nothing is to do where it stands
    program: tuple[str, ...] = ("maskless",)

    @property
    def resumes(self) -> Path | None:
        """The folder with which it goes on, where it can."""
        return Path(self.words[self.words.index("--out") + 1]) if "--resume" in self.words else None

    @property
    def command(self) -> tuple[str, ...]:
        return (*self.program, *self.words)


@dataclass(frozen=True)
class Planned:
    """A line of a table with the step that answers it, or why there is none."""

    line: Line
    step: str | None = None
    at: int | str | None = None  # of ours
    differs: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Cost:
    """What a training or a distillation works through: a case to measure, and how often."""

    case: Training
    sequences: int
    passes: int = 0  # forward passes of a teacher for each step


@dataclass(frozen=True)
class Plan:
    """What a table takes."""

    table: Table
    request: Request
    steps: dict[str, Step]
    lines: list[Planned]
    costs: dict[str, Cost]  # of full-size trainings and distillations


@dataclass(frozen=True)
class Data:
    """Prepared tokens: where they will be, and what must be done first."""

    folder: Path
    differs: str
    needs: tuple[str, ...] = ()
    length: int = 0
    most: int = 0  # steps


Answer = tuple[str, dict[Any, Any], str]  # a step; the paper's places along it and ours; what differs


def sort_out(given: Iterable[str]) -> dict[str, str]:
    """Which of these data are text and which are pictures."""
    found: dict[str, str] = {}
    for path in given:
        if not path.startswith("hf:") and not Path(path).exists():
            raise ValueError(f"--data {path}: no such file or folder")
        if holds_images(path):
            raise ValueError(f"{path} holds tokens of pictures: expected the pictures, which a FID compares with")
        kind = "pictures" if not path.startswith("hf:") and looks_like_images([path]) else "text"
        if kind in found:
            raise ValueError(f"--data {found[kind]} and {path} are both {kind}: expected one of a kind")
        found[kind] = path
    return found


def plan(table: Table, request: Request) -> Plan:
    """The steps of a table, in order, and its lines. A row that cannot be is a line that says why."""
    planner, ats = _Planner(request), dict[Work, dict[Any, None]]()
    for line in table.lines:
        if not line.why_not:
            ats.setdefault(line.work, {})[line.at] = None
    answers: dict[Work, Answer | str] = {}
    for work, wanted in ats.items():
        try:
            answers[work] = planner.answer(work, list(wanted))
        except MissingError as error:
            answers[work] = str(error)
    if answers and all(isinstance(answer, str) for answer in answers.values()):
        raise ValueError(next(iter(answers.values())))
    lines = []
    for line in table.lines:
        answer = line.why_not or answers[line.work]
        if isinstance(answer, str):
            lines.append(Planned(line, why_not=answer))
        elif line.at not in answer[1]:
            lines.append(Planned(line, why_not=f"left out at this scale: {line.at} steps"))
        else:
            lines.append(Planned(line, answer[0], answer[1][line.at], answer[2]))
    return Plan(table, request, planner.steps, lines, planner.costs)


class _Planner:
    """Steps as they come up; the same one twice is there once."""

    def __init__(self, request: Request):
        self.request, self.scale, self.out = request, request.scale, request.out
        self.steps: dict[str, Step] = {}
        self.costs: dict[str, Cost] = {}

    def add(self, name: str, *words: object, needs: tuple[str, ...] = (), **more: Any) -> str:
        name = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
        given = tuple(str(word) for word in words)
        if given[0] in SHARED and self.request.processes > 1:
            more["program"] = ("torchrun", "--nproc-per-node", str(self.request.processes), "-m", "maskless")
        step = Step(name, given, needs, **more)
        assert self.steps.setdefault(name, step) == step, f"two steps are called {name}"
        return name

    def answer(self, work: Work, ats: list[Any]) -> Answer:
        """The step that answers for some work."""
        if isinstance(work, Speed):
            return self.speed(work, ats)
        if isinstance(work, Curve):
            _, trained, _, differs = self.trained(work.recipe, work.weights)
            return trained, {None: None}, differs
        model, needed, data, differs = self.model(work)
        if isinstance(work, Texts):
            step, at = self.texts(work, ats, model, data, needed)
            judged = f"; judge {Path(self.request.judge).name} (GPT-2 Large)" if self.request.judge else ""
            count = f"; {self.scale.texts[1]} texts (1,024)" if self.scale.texts else ""
            return step, at, differs + count + judged
        at = {one: one for one in ats}
        if isinstance(work, Bound):
            words = ("evaluate", model, "--what", "bound", "--data", data.folder, *self.scale.bound, "--json")
            return self.add(f"bound-{model.name}", *words, needs=(needed,)), at, differs
        if isinstance(work, Pictures):
            return self.drawn(work, ats, model, needed), at, differs + self.compared()
        samples = ",samples=1024" if self.scale.is_paper else ""
        name, how = f"answers-{model.name}", f"pretrained={model},form=joint,greedy=at-once{samples}"  # as the paper
        words = ("--model_args", how, "--tasks", "paper", "--batch_size", 32, *self.scale.answers)
        program = ("python", "-m", "maskless.evaluate.harness")
        added = self.add(name, *words, "--output_path", self.out / name, needs=(needed,), program=program)
        return added, at, differs + (f"; {self.scale.answers[1]} questions of a task" if self.scale.answers else "")

    def texts(self, work: Texts, ats: list[int], model: Path, data: Data, needed: str) -> tuple[str, dict[Any, Any]]:
        at = {K: self.scale.steps(K, data.length, data.most) for K in ats}
        top_p = () if work.top_p is None else ("--top-p", work.top_p)
        judge = () if self.request.judge is None else ("--judge", self.request.judge)
        name = f"texts-{model.name}-{work.counts}{'-nucleus' * bool(top_p)}"
        how = ("--steps", _list(at.values()), "--counts", work.counts, *top_p, *judge, *self.scale.texts)
        kept = ("--out", self.out / "points" / f"{name}.json", "--json")
        return self.add(name, "evaluate", model, "--what", "genppl", *how, *kept, needs=(needed,)), at

    def drawn(self, work: Pictures, ats: list[int], model: Path, needed: str) -> str:
        reference = f"{self.request.pictures}:{'valid' if self.scale.is_paper else 'train'}"
        name = f"drawn-{model.name}-{work.order}-{work.steps}"
        order = ("--order", work.order, *(("--counts", CONFIDENT) if work.order == "confidence" else ()))
        how = ("--steps", work.steps, *order, "--guidance", _list(ats), "--batch", 32, *self.scale.drawn)
        kept = (*self.request.features, "--out", self.out / "points" / f"{name}.json", "--json")
        return self.add(name, "evaluate", model, "--reference", reference, *how, *kept, needs=(needed,))

    def compared(self) -> str:
        """What of a FID is not as in the paper: how many pictures, against which, and seen by what network."""
        given = self.request.features
        named = given[given.index("--features") + 1] if "--features" in given else TORCH_FIDELITY
        differs = f"; {self.scale.drawn[1]} samples (50,000)" if self.scale.drawn else ""
        differs += "" if self.scale.is_paper else "; FID against the training pictures (validation pictures)"
        return differs + ("" if named == TORCH_FIDELITY else f"; features of {Path(named).name} (Inception-v3)")

    def speed(self, work: Speed, ats: list[Any]) -> Answer:
        case, at = self.scale.case(work.case), {at: at for at in ats}
        if isinstance(case, Sampling):
            most = self.scale.most_steps
            at = {K: max(1, K * case.length // work.case.length) for K in ats if most is None or K <= most}
        words = bench_words(case, repeat=self.scale.repeat, steps=_list(at.values()))
        differs = _differences((size, getattr(case, size), getattr(work.case, size)) for size in SIZES)
        return self.add(f"speed-{work.case.name}-{work.case.length}-{words[1]}", *words), at, differs

    def model(self, work: Bound | Texts | Pictures | Answers) -> tuple[Path, str, Data, str]:
        """A trained model, or what is distilled from it."""
        model, trained, data, differs = self.trained(work.recipe)
        if not isinstance(work, Texts | Answers) or not work.distilled:
            return model, trained, data, differs
        to = model.with_name(f"{model.name}-distilled")
        words, cost = (
            ["distill", model, "--data", data.folder, "--out", to, "--groups", "one", *self.scale.distill],
            None,
        )
        if self.scale.is_paper:
            case, (rounds, steps, batch) = self.costs[trained].case, map(int, self.scale.distill[1::2])
            groups = 2 if case.model == "pgm" else 1  # in a step of training; one is distilled
            cost = Cost(case, rounds * steps * batch // groups, passes=RATIO)
            words += ["--accumulate", max(1, batch // (self.request.processes * case.batch))]
        name = self.add(f"distill-{model.name}", *words, "--resume", "--json", needs=(trained,))
        if cost is not None:
            self.costs[name] = cost
        return to, name, data, differs + ("" if self.scale.is_paper else f"; distill {' '.join(self.scale.distill)}")

    def trained(self, name: str, weights: str = "") -> tuple[Path, str, Data, str]:
        """A run of a recipe at this scale: its folder, its step, its data, and what differs.

        Small recipes of two sets may be the same run: the first of them stands for all.
        """
        recipe, made = RECIPES[name], self.scale.made(RECIPES[name])
        if not self.scale.is_paper:
            alike = (one for one in RECIPES.values() if one.source == recipe.source)
            recipe = next(one for one in alike if self.scale.made(one) == made)
        data = self.images() if recipe.measure else self.tokens(RECIPES[name])
        settings = self.scale.settings(recipe)
        settings |= {"weights": weights} if weights and weights != recipe.train["weights"] else {}
        folder = self.out / "runs" / (recipe.name + ("-released-weights" if "weights" in settings else ""))
        words: list[object] = ["train", "--recipe", recipe.name, "--data", data.folder, "--out", folder, "--resume"]
        for option, value in settings.items():
            words += [f"--{OPTIONS.get(option, option)}", value]
        step = f"train-{folder.name}"
        if self.scale.is_paper:
            piece = 2 ** ((PIECE // recipe.length).bit_length() - 1)
            words += ["--accumulate", max(1, recipe.train["batch"] // (self.request.processes * piece))]
            self.costs[step] = Cost(_training(recipe, piece), recipe.train["steps"] * recipe.train["batch"])
        shown, old = (
            ("width", "layers", "steps", "batch", "learning_rate", "warmup", "initial"),
            RECIPES[name].network | RECIPES[name].train,
        )
        sizes = _differences((OPTIONS.get(one, one), made[one], old[one]) for one in shown)
        differs = "; ".join(part for part in (data.differs, sizes) if part)
        return folder, self.add(step, *words, needs=data.needs), data, differs

    def tokens(self, recipe: Recipe) -> Data:
        """Prepared text: of the paper's own set, or a folder that was given, or made of a text that was given."""
        key, given = recipe.name.split("-")[0], self.request.text
        if self.scale.is_paper:
            folder, length = self.out / "data" / key, recipe.length
            words = ("prepare", *recipe.prepare.split(), "--out", folder)
            step = self.add(f"prepare-{key}", *words, makes=folder / INDEX)
            return Data(folder, "", (step,), length, length - 1)  # a BOS is given
        if given is None:
            raise MissingError("no text: expected --data FILE (text) or DIR (prepared)")
        name, vocab = SETS[key]
        if (Path(given) / INDEX).is_file():
            found = open_tokens(Path(given))
            pairs = [("length", found.length, recipe.length), ("vocabulary", found.vocab, vocab)]
            differs = _differences([("", found.folder.name, name), *pairs]).strip()
            return Data(found.folder, differs, (), found.length, found.length - (found.layout != "packed"))
        folder, length = self.out / "data" / "text", self.scale.length
        step = self.add("prepare-text", "prepare", given, *self.scale.prepare, "--out", folder, makes=folder / INDEX)
        differs = f"{Path(given).name} ({name}), {_differences([('length', length, recipe.length)])}, own vocabulary"
        return Data(folder, differs, (step,), length, length)

    def images(self) -> Data:
        """Tokens of pictures, by a codec that was given, or one that is trained on them."""
        given, codec, size = self.request.pictures, self.request.codec or self.scale.codec, self.scale.pixels
        if given is None:
            raise MissingError("no pictures: expected --data DIR (a folder for each class)")
        if codec is None:
            raise MissingError("no codec: expected --codec FILE, the released vq_ds8_c2i.pt or your own")
        needs: tuple[str, ...] = ()
        flips: tuple[str, ...] = ("--flips",)
        if self.scale.is_paper:
            size, flips = 256, ()  # as the recipes of ImageNet are prepared
        if size is None:
            known = RECIPES["cifar10-codec" if read_images([given]).side() <= 32 else "pictures64-codec"]
            size = known.train["size"]
            if not codec:
                codec = str(self.out / "runs" / "codec")
                words = ("--recipe", known.name, "--images", given, "--out", codec, "--resume", "--json")
                needs = (self.add("train-codec", "train-codec", *words),)
        folder = self.out / "data" / "pictures"
        made = ("prepare", given, "--codec", codec, "--size", size, *flips, "--out", folder)
        step = self.add("prepare-pictures", *made, needs=needs, makes=folder / INDEX)
        differs = "" if self.scale.is_paper else f"{Path(given).name} (ImageNet), {size} pixels a side (256)"
        return Data(folder, differs, (step,))


def bench_words(case: Case, *, repeat: int, steps: str = "") -> tuple[str, ...]:
    """What `maskless bench` is told to measure a case."""
    words: list[object] = ["--model", case.model, *([] if case.encoder is None else ["--encoder", case.encoder])]
    for name in SIZES:
        words += [f"--{name}", getattr(case, name)]
    if isinstance(case, Sampling):
        words += ["--counts", case.counts, "--steps", steps]
    kind = "sample" if isinstance(case, Sampling) else "train"
    return tuple(str(word) for word in ("bench", kind, *words, "--repeat", repeat, "--json"))


def _training(recipe: Recipe, piece: int) -> Training:
    """What a step of a recipe costs, as `bench train` measures it; MaskGIT as the masked network of its size."""
    sizes = {name: recipe.network[name] for name in ("width", "layers", "encoder") if name in recipe.network}
    model = {"maskgit": "mdlm"}.get(recipe.train["model"], recipe.train["model"])
    return Training(model=model, vocab=SETS[recipe.name.split("-")[0]][1], length=recipe.length, batch=piece, **sizes)


def _list(values: Iterable[Any]) -> str:
    return ",".join(str(value) for value in dict.fromkeys(values))


def _differences(pairs: Iterable[tuple[str, Any, Any]]) -> str:
    """width 384 (768), ...: ours, and in brackets the paper's."""
    shown = [(name, *(f"{v:,}" if isinstance(v, int) else v for v in both)) for name, *both in pairs]
    return ", ".join(f"{name} {ours} ({paper})" for name, ours, paper in shown if ours != paper)
