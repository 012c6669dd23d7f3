"""The tables hold the paper's numbers, and a plan's commands are ones that can be given by hand."""

import itertools
import re
from pathlib import Path

import pytest
from typer.main import get_command

from command_inputs import photos
from maskless.bench.tables import FIGURES
from maskless.cli import app
from maskless.codec.text import byte_codec
from maskless.data.prepare import prepare
from maskless.paper import ACCURACY, PERPLEXITY, TABLES, TOKENS, Texts, table
from maskless.recipes import RECIPES
from maskless.reproduce.jobs import SCALES, Options, TablePlan
from maskless.reproduce.plan import PIECE, plan, sort_out
from toy_text import write

DOCUMENT = Path(__file__).parents[2] / "docs" / "reproduce.md"
COMMANDS = get_command(app)
PLAIN = {"--recipe", "--data", "--out", "--resume", "--accumulate"}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    """A text and a folder of pictures, told apart."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "my.txt").write_text("some words\n" * 50)
    photos(folder / "photos", shape=(40, 40))
    found = sort_out([str(folder / "photos"), str(folder / "my.txt")])
    assert found == {"pictures": str(folder / "photos"), "text": str(folder / "my.txt")}
    return found


def made(name: str, scale: str, given: dict[str, str], **more) -> TablePlan:
    texts = {} if scale == "paper" else {"text": given["text"]}
    request = Options(scale=SCALES[scale], out=Path("out"), pictures=given["pictures"], codec="vq.pt", **texts, **more)
    return plan(table(name), request)


def test_tables_have_as_many_numbers_as_the_papers():
    counts = {name: len(found.lines) for name, found in TABLES.items() if name.startswith("table")}
    sizes = (7 + 5, 6 * 8, 5 * 2, 3 * 7, 21, 5 * 6 * 3, 8 * 6 * 3, 6 * 7 * 3, 6 * 7 * 3, 3 * 4)
    assert counts == {f"table-{i}": size for i, size in enumerate(sizes, 1)}
    assert all(line.paper is not None for name in counts for line in TABLES[name].lines)


def test_what_stands_in_two_tables_is_the_same():
    every = {(line.work, line.at, line.measure): line.paper for line in TABLES["table-5"].lines}
    for line in TABLES["table-1"].lines:
        if line.measure == PERPLEXITY:
            assert every[line.work, None, PERPLEXITY] == line.paper == RECIPES[line.work.recipe].goals[0].value
    lambada = {line.model: line.paper for line in TABLES["table-2"].lines if line.at == "lambada_openai"}
    again = {line.model: line.paper for line in TABLES["table-4"].lines if line.at == "lambada_openai"}
    assert again.items() <= lambada.items()
    for figure, *names in (("figure-1", "table-6", "table-9"), ("figure-4", "table-7")):
        assert set(TABLES[figure].lines) < {line for name in names for line in TABLES[name].lines}


def test_speeds_are_those_of_the_benchmarks():
    short = [line for line in TABLES["table-6"].lines if line.measure == TOKENS]
    assert {line.paper for line in short} <= {figure.value for figure in FIGURES.values()}
    assert next(line.paper for line in short if line.model == "PGM 8/8") == 21_120.99
    main = {line.model: line.paper for line in TABLES["table-1"].lines if line.measure == TOKENS}
    at_128 = {line.model: line.paper for line in short if line.at == 128}
    assert {main[f"OWT, {model}"] for model in ("MDLM", "PGM 8/8", "PGM 6/6 1024")} <= set(at_128.values())


@pytest.mark.parametrize("scale", SCALES)
def test_every_command_of_every_plan_parses_and_a_name_means_one_command(scale, given):
    words: dict[str, tuple[str, ...]] = {}
    for name in TABLES:
        seen: set[str] = set()
        for step in made(name, scale, given).jobs.values():
            assert set(step.needs) <= seen  # which come before it
            seen.add(step.name)
            assert words.setdefault(step.name, step.words) == step.words
            if step.program == ("maskless",):
                command = COMMANDS.commands[step.words[0]]
                deeper = 2 if step.words[0] == "bench" else 1
                command = command.commands[step.words[1]] if deeper == 2 else command
                command.make_context(step.words[0], list(step.words[deeper:]))
    assert len(words) > 50


def test_small_steps_decide_as_many_tokens_as_the_papers(given):
    for entry in made("table-6", "small", given).entries:
        assert entry.at * 1024 == entry.line.at * 256


def test_prepared_text_brings_its_own_length(given, tmp_path):
    data = prepare([write(tmp_path / "toy.txt", 200, seed=0)], tmp_path / "data", codec=byte_codec(), length=64)
    this = made("table-6", "small", given | {"text": str(data)})
    assert not any(step.words[0] == "prepare" for step in this.jobs.values())
    assert {entry.at for entry in this.entries} == {2, 4, 8, 16, 32, 64}
    assert "data (OpenWebText), length 64 (1,024), vocabulary 257 (50,257)" in this.entries[0].differs


def test_small_runs_that_are_the_same_are_trained_once(given):
    trained = [step for step in made("table-5", "small", given).jobs if step.startswith("train-")]
    assert len(trained) == 11 + 5  # networks after 200k steps, and after 1M
    full = [step for step in made("table-5", "paper", given).jobs if step.startswith("train-")]
    assert len(full) == 21


def test_what_differs_is_what_the_commands_say(given):
    this = made("table-5", "small", given)
    for entry in this.entries:
        evaluated = this.jobs[entry.job]
        (trained,) = (this.jobs[need] for need in evaluated.needs)
        options = dict(itertools.pairwise(trained.words))
        recipe = RECIPES[entry.line.work.recipe]
        for option in ("width", "steps", "batch"):
            old = (recipe.network | recipe.train)[option]
            assert f"{option} {int(options['--' + option]):,} ({old:,})" in entry.differs
        assert "my.txt" in entry.differs


def test_a_fid_names_its_network_and_its_reference(given):
    """Where they are not those of the paper, which has torch-fidelity's and the validation pictures."""
    network, reference = "features of feat.pt (Inception-v3)", "FID against the training pictures (validation pictures)"
    seen = ("--features", "my/feat.pt", "--feature-input", "pixels")
    for name, scale, features, said in (
        ("table-9", "toy", seen, (network, reference)),
        ("table-9", "small", (), (reference,)),
        ("table-8", "small", ("--features", "torch-fidelity"), (reference,)),
        ("table-8", "paper", seen, (network,)),
        ("table-9", "paper", (), ()),
    ):
        this, split = made(name, scale, given, features=features), ":valid" if scale == "paper" else ":train"
        for entry in this.entries:
            parts = entry.differs.split("; ")
            assert [part for part in (network, reference) if part in parts] == list(said)
            assert ("features" in entry.differs) == (network in said)
            assert given["pictures"] + split in this.jobs[entry.job].words


def test_each_sampler_of_pictures_has_the_counts_that_were_released_with_it(given):
    for name, counts in (("table-8", {"arccos-after-one"}), ("table-9", set())):
        for step in made(name, "paper", given).jobs.values():
            if step.name.startswith("drawn-"):
                assert {b for a, b in itertools.pairwise(step.words) if a == "--counts"} == counts


def test_a_distillation_costs_its_steps_and_the_teachers_passes(given):
    costs = made("table-7", "paper", given).costs
    distilled = {name.removeprefix("distill-"): cost for name, cost in costs.items() if cost.passes}
    whole = 5 * 10_000 * 128  # rounds, steps, batch
    assert {name: cost.sequences for name, cost in distilled.items()} == {
        "owt-mdlm": whole,
        "owt-pgm-6-6-1024": whole // 2,  # one of the two groups that are trained
        "owt-pgm-8-8": whole // 2,
    }
    for name, cost in distilled.items():
        assert (cost.case, cost.passes) == (costs[f"train-{name}"].case, 2)
    assert not any(cost.passes for cost in made("table-6", "paper", given).costs.values())


@pytest.mark.parametrize(("processes", "pieces"), [(1, "4"), (2, "2"), (8, "1")])
def test_the_papers_lessons_come_in_pieces_of_32_that_fit(given, processes, pieces):
    steps = made("table-7", "paper", given, processes=processes).jobs.values()
    asked = [dict(itertools.pairwise(step.words)) for step in steps if step.words[0] == "distill"]
    assert [words["--accumulate"] for words in asked] == [pieces] * 3


@pytest.mark.parametrize("processes", [1, 8, 16])
def test_the_papers_runs_are_its_recipes_in_pieces_that_fit(given, processes):
    this = made("table-5", "paper", given, processes=processes)
    for name, cost in this.costs.items():
        step, case = this.jobs[name], cost.case
        assert step.words[0] == "train"
        assert {word for word in step.words if word.startswith("--")} == PLAIN
        recipe, pieces = RECIPES[step.words[2]], int(step.words[-1])
        assert recipe.train["batch"] % (pieces * processes) == 0
        assert recipe.train["batch"] // (pieces * processes) * recipe.length <= PIECE
        assert cost.sequences == recipe.train["batch"] * recipe.train["steps"]
        assert (case.width, case.length) == (recipe.network["width"], recipe.length)
        assert (step.command[0] == "torchrun") == (processes > 1)
    assert not any(entry.differs for entry in this.entries)


def test_rows_that_cannot_be_say_why(given):
    bf16 = [entry for entry in made("table-7", "small", given).entries if "BF16" in entry.line.model]
    assert len(bf16) == 4 * 6 * 3
    assert all(entry.job is None and "float32 only" in entry.why_not for entry in bf16)
    long = [entry for entry in made("table-10", "small", given).entries if entry.why_not]
    assert {entry.line.at for entry in long} == {1024, 4096}
    half = plan(table("figure-1"), Options(scale=SCALES["small"], out=Path("out"), text=given["text"]))
    for entry in half.entries:
        assert (entry.job is None) == ("no pictures" in entry.why_not) == (not isinstance(entry.line.work, Texts))


@pytest.mark.parametrize(
    ("name", "scale", "says"),
    [
        ("table-5", "small", "no text: expected --data FILE (text) or DIR (prepared)"),
        ("table-9", "small", "no pictures: expected --data DIR"),
        ("figure-2", "small", "figure-2 is a drawing (masked against partition models)"),
        ("table-8", "paper", "no codec: expected --codec FILE, the released vq_ds8_c2i.pt"),
    ],
)
def test_what_is_missing_is_one_line(name, scale, says, given):
    pictures = given["pictures"] if scale == "paper" else None
    with pytest.raises(ValueError, match=re.escape(says)):
        plan(table(name), Options(scale=SCALES[scale], out=Path("out"), pictures=pictures))


def test_the_paper_has_pictures_of_256_pixels_as_they_are_and_its_own_number_of_samples(given):
    plans = [made("table-8", scale, given).jobs.values() for scale in ("paper", "small")]
    (prepared,), (own,) = ([step.words for step in steps if "prepare" in step.words] for steps in plans)
    assert prepared[prepared.index("--size") + 1] == "256"
    assert "--flips" not in prepared
    assert "--flips" in own
    steps = made("table-4", "paper", given).jobs.values()
    answers = [word for step in steps for word in step.words if "form=joint" in word]
    assert answers
    assert all(word.endswith("samples=1024") for word in answers)


def test_two_texts_are_refused(given):
    with pytest.raises(ValueError, match="are both text: expected one of a kind"):
        sort_out([given["text"], given["text"]])


def test_tasks_are_those_that_the_harness_is_told():
    harness = pytest.importorskip("maskless.evaluate.harness")
    asked = {line.at for found in TABLES.values() for line in found.lines if line.measure == ACCURACY}
    assert asked == set(harness.PAPER.split(","))


def test_the_document_names_every_table():
    assert set(TABLES) <= set(re.findall(r"`((?:table|figure)-\d+)`", DOCUMENT.read_text()))
