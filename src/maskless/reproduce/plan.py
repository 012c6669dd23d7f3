"""From a table to the commands that make it: prepare, train, distill, evaluate, measure; each one once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskless.bench.case import Case, SampleCase, TrainCase
from maskless.bench.tables import case_of
from maskless.data.image_tokens import holds_images
from maskless.data.images import looks_like_images, read_images
from maskless.data.tokens import INDEX, open_tokens
from maskless.evaluate.inception import TORCH_FIDELITY
from maskless.paper import DATASETS, Bound, Curve, Downstream, NetworkSpeed, Pictures, Table, Texts, Work
from maskless.recipes import RECIPES, Recipe
from maskless.reproduce.jobs import OPTIONS, Cost, MissingError, Options, TableEntry, TableJob, TablePlan

SHOWN = ("width", "layers", "steps", "batch", "learning_rate", "warmup", "initial")  # of a training, where they differ
SIZES = ("layers", "width", "vocab", "length", "batch")
CONFIDENT = "arccos-after-one"  # counts of the released confidence sampler; of the Halton one: arccos, the default
RATIO = 2  # of a teacher's steps to its student's
PIECE = 33_000  # tokens of a piece that a GPU takes at once in a full-size run
SHARED = ("train", "distill", "evaluate")  # what several processes do together


@dataclass(frozen=True)
class Data:
    """Prepared tokens: where they will be, and what must be done first."""

    folder: Path
    differs: str
    needs: tuple[str, ...] = ()
    length: int = 0
    most: int = 0  # steps


Answer = tuple[str, dict[Any, Any], str]  # a job; the paper's places along it and ours; what differs


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


def plan(table: Table, options: Options) -> TablePlan:
    """The jobs of a table, in order, and its entries. A row that cannot be is an entry that says why."""
    planner, ats = _Planner(options), dict[Work, dict[Any, None]]()
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
    entries = []
    for line in table.lines:
        answer = line.why_not or answers[line.work]
        if isinstance(answer, str):
            entries.append(TableEntry(line, why_not=answer))
        elif line.at not in answer[1]:
            entries.append(TableEntry(line, why_not=f"left out at this scale: {line.at} steps"))
        else:
            entries.append(TableEntry(line, answer[0], answer[1][line.at], answer[2]))
    return TablePlan(table, options, planner.jobs, entries)


class _Planner:
    """Jobs as they come up; the same one twice is there once."""

    def __init__(self, options: Options):
        self.options, self.scale, self.out = options, options.scale, options.out
        self.jobs: dict[str, TableJob] = {}

    def add(self, name: str, *words: object, needs: tuple[str, ...] = (), **more: Any) -> str:
        name = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
        given = tuple(str(word) for word in words)
        if given[0] in SHARED and self.options.processes > 1:
            more["program"] = ("torchrun", "--nproc-per-node", str(self.options.processes), "-m", "maskless")
        job = TableJob(name, given, needs, **more)
        assert self.jobs.setdefault(name, job) == job, f"two jobs are called {name}"
        return name

    def answer(self, work: Work, ats: list[Any]) -> Answer:
        """The job that answers for some work."""
        if isinstance(work, NetworkSpeed):
            return self.speed(work, ats)
        model, needed, data, differs = self.model(work)
        at, kept = {one: one for one in ats}, self.out / "points"
        match work:
            case Curve():
                return needed, at, differs
            case Downstream():
                return self.downstream(model, needed), at, differs + _given("questions of a task", self.scale.answers)
            case Bound():
                name, words = f"bound-{model.name}", (*_words(what="bound", data=data.folder), *self.scale.bound)
            case Texts(counts=counts, top_p=top_p):
                at, judge = {K: self.scale.steps(K, data.length, data.most) for K in ats}, self.options.judge
                name = f"texts-{model.name}-{counts}{'-nucleus' * (top_p is not None)}"
                how = _words(what="genppl", steps=_list(at.values()), counts=counts, top_p=top_p, judge=judge)
                words = (*how, *self.scale.texts, *_words(out=kept / f"{name}.json"))
                differs += _given("texts (1,024)", self.scale.texts)
                differs += f"; judge {Path(judge).name} (GPT-2 Large)" if judge else ""
            case Pictures(order=order, steps=K):
                name, fitting = f"drawn-{model.name}-{order}-{K}", CONFIDENT if order == "confidence" else None
                reference = f"{self.options.pictures}:{'valid' if self.scale.is_paper else 'train'}"
                how = _words(reference=reference, steps=K, order=order, counts=fitting, guidance=_list(ats), batch=32)
                words = (*how, *self.scale.drawn, *self.options.features, *_words(out=kept / f"{name}.json"))
                differs += self.compared()
        return self.add(name, "evaluate", model, *words, "--json", needs=(needed,)), at, differs

    def downstream(self, model: Path, needed: str) -> str:
        samples = ",samples=1024" if self.scale.is_paper else ""
        name, how = f"answers-{model.name}", f"pretrained={model},form=joint,greedy=at-once{samples}"  # as the paper
        words = ("--model_args", how, "--tasks", "paper", "--batch_size", 32, *self.scale.answers)
        program = ("python", "-m", "maskless.evaluate.harness")
        return self.add(name, *words, "--output_path", self.out / name, needs=(needed,), program=program)

    def compared(self) -> str:
        """What of a FID is not as in the paper: how many pictures, against which, and seen by what network."""
        given = self.options.features
        named = given[given.index("--features") + 1] if "--features" in given else TORCH_FIDELITY
        differs = _given("samples (50,000)", self.scale.drawn)
        differs += "" if self.scale.is_paper else "; FID against the training pictures (validation pictures)"
        return differs + ("" if named == TORCH_FIDELITY else f"; features of {Path(named).name} (Inception-v3)")

    def speed(self, work: NetworkSpeed, ats: list[Any]) -> Answer:
        paper, at = case_of(work, 1), {at: at for at in ats}
        case = self.scale.case(paper)
        if isinstance(case, SampleCase):
            most = self.scale.most_steps
            at = {K: max(1, K * case.length // paper.length) for K in ats if most is None or K <= most}
        words = bench_words(case, repeat=self.scale.repeat, steps=_list(at.values()))
        differs = _differences((size, getattr(case, size), getattr(paper, size)) for size in SIZES)
        return self.add(f"speed-{paper.name}-{paper.length}-{words[1]}", *words), at, differs

    def model(self, work: Bound | Texts | Pictures | Downstream | Curve) -> tuple[Path, str, Data, str]:
        """A trained model, or what is distilled from it."""
        model, trained, data, differs = self.trained(work.recipe, work.weights if isinstance(work, Curve) else "")
        if not isinstance(work, Texts | Downstream) or not work.distilled:
            return model, trained, data, differs
        to, how, cost = model.with_name(f"{model.name}-distilled"), self.scale.distill, self.jobs[trained].cost
        words = ["distill", model, "--data", data.folder, "--out", to, "--groups", "one", *how]
        if cost is not None:
            rounds, steps, batch = map(int, how[1::2])
            groups = 2 if cost.case.model == "pgm" else 1  # in a step of training; one is distilled
            words += ["--accumulate", max(1, batch // (self.options.processes * cost.case.batch))]
            cost = Cost(cost.case, rounds * steps * batch // groups, passes=RATIO)
        name = self.add(f"distill-{model.name}", *words, "--resume", "--json", needs=(trained,), cost=cost)
        return to, name, data, differs + ("" if self.scale.is_paper else f"; distill {' '.join(how)}")

    def trained(self, name: str, weights: str = "") -> tuple[Path, str, Data, str]:
        """A run of a recipe at this scale: its folder, its job, its data, and what differs.

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
        words += _words(**{OPTIONS.get(option, option): value for option, value in settings.items()})
        cost = None
        if self.scale.is_paper:
            piece = 2 ** ((PIECE // recipe.length).bit_length() - 1)
            words += ["--accumulate", max(1, recipe.train["batch"] // (self.options.processes * piece))]
            cost = Cost(_training(recipe, piece), recipe.train["steps"] * recipe.train["batch"])
        job = self.add(f"train-{folder.name}", *words, needs=data.needs, cost=cost)
        old = RECIPES[name].network | RECIPES[name].train
        sizes = _differences((OPTIONS.get(one, one), made[one], old[one]) for one in SHOWN)
        return folder, job, data, "; ".join(part for part in (data.differs, sizes) if part)

    def tokens(self, recipe: Recipe) -> Data:
        """Prepared text: of the paper's own set, or a folder that was given, or made of a text that was given."""
        key, given = recipe.name.split("-")[0], self.options.text
        if self.scale.is_paper:
            folder, length = self.out / "data" / key, recipe.length
            words = ("prepare", *recipe.prepare.split(), "--out", folder)
            job = self.add(f"prepare-{key}", *words, makes=folder / INDEX)
            return Data(folder, "", (job,), length, length - 1)  # a BOS is given
        if given is None:
            raise MissingError("no text: expected --data FILE (text) or DIR (prepared)")
        name, vocab, _ = DATASETS[key]
        if (Path(given) / INDEX).is_file():
            found = open_tokens(Path(given))
            pairs = [("length", found.length, recipe.length), ("vocabulary", found.vocab, vocab)]
            differs = _differences([("", found.folder.name, name), *pairs]).strip()
            return Data(found.folder, differs, (), found.length, found.length - (found.layout != "packed"))
        folder, length = self.out / "data" / "text", self.scale.length
        job = self.add("prepare-text", "prepare", given, *self.scale.prepare, "--out", folder, makes=folder / INDEX)
        differs = f"{Path(given).name} ({name}), {_differences([('length', length, recipe.length)])}, own vocabulary"
        return Data(folder, differs, (job,), length, length)

    def images(self) -> Data:
        """Tokens of pictures, by a codec that was given, or one that is trained on them."""
        given, codec, size = self.options.pictures, self.options.codec or self.scale.codec, self.scale.pixels
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
        job = self.add("prepare-pictures", *made, needs=needs, makes=folder / INDEX)
        differs = "" if self.scale.is_paper else f"{Path(given).name} (ImageNet), {size} pixels a side (256)"
        return Data(folder, differs, (job,))


def bench_words(case: Case, *, repeat: int, steps: str = "") -> tuple[str, ...]:
    """What `maskless bench` is told to measure a case."""
    sizes = {"model": case.model, "encoder": case.encoder, **{name: getattr(case, name) for name in SIZES}}
    kind = "train"
    if isinstance(case, SampleCase):
        kind, sizes = "sample", sizes | {"counts": case.counts, "steps": steps}
    return ("bench", kind, *_words(**sizes, repeat=repeat), "--json")


def _training(recipe: Recipe, piece: int) -> TrainCase:
    """What a step of a recipe costs, as `bench train` measures it; MaskGIT as the masked network of its size."""
    model = recipe.train["model"]
    sizes = {name: size for name, size in recipe.network.items() if name not in ("queries", "rope")}
    sizes |= {"vocab": DATASETS[recipe.name.split("-")[0]].vocab, "length": recipe.length, "batch": piece}
    return TrainCase(model="mdlm" if model == "maskgit" else model, **sizes)


def _words(**options: object) -> tuple[str, ...]:
    """top_p=0.9 -> --top-p 0.9; what is None is left out."""
    given = {f"--{name.replace('_', '-')}": str(value) for name, value in options.items() if value is not None}
    return tuple(word for pair in given.items() for word in pair)


def _given(what: str, words: tuple[str, ...]) -> str:
    """; 256 texts (1,024): where a scale has a number of its own."""
    return f"; {words[1]} {what}" if words else ""


def _list(values: Iterable[Any]) -> str:
    return ",".join(str(value) for value in dict.fromkeys(values))


def _differences(pairs: Iterable[tuple[str, Any, Any]]) -> str:
    """width 384 (768), ...: ours, and in brackets the paper's."""
    shown = [(name, *(f"{v:,}" if isinstance(v, int) else v for v in both)) for name, *both in pairs]
    return ", ".join(f"{name} {ours} ({paper})" for name, ours, paper in shown if ours != paper)
