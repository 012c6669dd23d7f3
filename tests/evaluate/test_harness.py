"""The harness: lm-eval runs local tasks from end to end, and what it asks for is answered without it too."""

import json
import re
import shutil
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import maskless
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec, train_bpe
from maskless.evaluate import harness, options
from maskless.evaluate.harness import Scorer
from maskless.nn.blocks import open_gates
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.objective import noise, pgm_exact
from maskless.problems import dense
from objective_tasks import loss

needs_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'maskless[lm-eval]'"
)
EATS = {"cat": "fish", "dog": "meat", "cow": "hay", "hen": "corn", "pig": "mash", "fox": "eggs"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small model that has read who eats what."""
    said = [f"the {animal} eats {food} ." for animal, food in EATS.items()]
    codec = train_bpe(said * 20, 300)
    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 2, "encoder": 1, "decoder": 1, "condition": 8, "dropout": 0.0, "swap": "residual"}
    network = PartitionTransformer(PartitionConfig(vocab=codec.vocab, length=12, **sizes))
    open_gates(network)
    pairs = torch.tensor(
        [[*codec.encode(one), codec.eos, *codec.encode(two), codec.eos] for one in said for two in said]
    )
    optimiser = torch.optim.Adam(network.parameters(), lr=8e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0.02, 220)
    for step in range(220):
        rows = pairs[torch.randint(0, len(pairs), (24,))]
        task = pgm_exact(rows, *noise(*rows.shape, seed=0, step=step), torch.ones_like(rows, dtype=torch.bool))
        optimiser.zero_grad()
        (loss(network, task) / rows.numel()).backward()
        optimiser.step()
        decay.step()
    Model(network, codec).save_pretrained(folder := tmp_path_factory.mktemp("eater"))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Local tasks: questions with options, last words, whole texts, and continuations."""
    folder = tmp_path_factory.mktemp("tasks")
    asked = []
    for i, (animal, food) in enumerate(EATS.items()):
        others = [other for other in EATS.values() if other != food][:3]
        asked.append(
            {"animal": animal, "choices": [*others[: i % 4], food, *others[i % 4 :]], "answer": i % 4, "food": food}
        )
    (folder / "eats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "eats.jsonl")}}}
    common |= {"test_split": "test", "doc_to_text": "the {{animal}} eats"}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    word = {"output_type": "loglikelihood", "doc_to_target": " {{food}}"}
    free = {"output_type": "generate_until", "doc_to_target": "{{food}}"}
    free |= {"generation_kwargs": {"until": [" ."], "max_gen_toks": 6}}
    stripped = [{"function": "remove_whitespace"}, {"function": "take_first"}]
    free |= {"filter_list": [{"name": "stripped", "filter": stripped}]}
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": ""}
    rolling |= {"doc_to_target": "the {{animal}} eats {{food}} ."}
    accuracy = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    for name, task, metric in (
        ("eats_choice", choice, accuracy),
        ("eats_word", word, accuracy),
        ("eats_free", free, exact),
        ("eats_whole", rolling, {"metric": "bits_per_byte"}),
    ):
        (folder / f"{name}.yaml").write_text(json.dumps(common | task | {"task": name, "metric_list": [metric]}))
    return folder


@needs_lm_eval
def test_lm_eval_runs_local_tasks_and_a_trained_model_beats_chance(trained, tasks, tmp_path, monkeypatch, capsys):
    import lm_eval.tasks

    only_these = partial(lm_eval.tasks.TaskManager, include_defaults=False)  # reading 14,000 others takes long
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_these)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["harness"])
    words = ["--model_args", f"pretrained={trained},samples=16", "--include_path", str(tasks), "--device", "cpu"]
    words += ["--tasks", "eats_choice,eats_word,eats_free,eats_whole", "--batch_size", "4"]
    harness.main([*words, "--output_path", str(tmp_path / "out.json")])
    (written,) = tmp_path.rglob("*.json")
    results = json.loads(written.read_text())["results"]
    assert results["eats_choice"]["acc,none"] > 0.6  # chance is 0.25
    assert results["eats_word"]["acc,none"] > 0.6
    assert results["eats_free"]["exact_match,stripped"] > 0.6
    assert results["eats_whole"]["bits_per_byte,none"] < 1
    printed = capsys.readouterr().out
    assert "eats_choice" in printed
    assert "Metric" in printed  # the table has names of columns


@needs_lm_eval
def test_the_model_is_registered_once():
    from lm_eval.api.registry import get_model

    assert harness.register() is harness.register()
    assert get_model("maskless") is harness.register()


@needs_lm_eval
def test_the_tasks_of_the_paper_exist_in_lm_eval():
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks"
    families = ("lambada", "arc", "hellaswag", "mathqa", "piqa", "winogrande", "siqa", "openbookqa", "super_glue/boolq")
    files = [path.read_text() for family in (*families, "race") for path in (folder / family).glob("*.yaml")]
    known = {name for text in files for name in re.findall(r"^task: (\S+)", text, re.MULTILINE)}
    assert set(harness.PAPER.split(",")) - known == set()
    for words in (["--tasks", "paper", "-x"], ["--tasks=paper", "-x"]):
        assert harness._with_paper(words) == ["--tasks", harness.PAPER, "-x"]


@pytest.fixture
def run(monkeypatch, capsys):
    """run(words, evaluate): the one line that the harness ends with when lm-eval's own function is `evaluate`."""

    def call(words: list[str], evaluate: Callable[[], None] | None = None) -> str:
        if evaluate is not None:
            monkeypatch.setattr("lm_eval.__main__.cli_evaluate", evaluate)
        monkeypatch.setattr(sys, "argv", ["harness"])
        with pytest.raises(SystemExit) as ended:
            harness.main(words)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return call


def give_up(error: Exception) -> None:
    raise error


@needs_lm_eval
def test_a_mistake_is_one_line(run):
    def fail() -> None:
        assert sys.argv == ["lm_eval", "--model_args", "pretrained=nowhere", "--model", "maskless"]
        maskless.load("nowhere")

    said = run(["--model_args", "pretrained=nowhere"], fail)
    assert said == "error: 'nowhere' is neither a model folder nor a hub id (owner/name)\n"


@needs_lm_eval
@pytest.mark.parametrize("kind", ["builtins.ConnectionError", "requests.Timeout", "httpx.ConnectError"])
def test_a_hub_that_cannot_be_reached_is_one_line(kind, run):
    module, _, name = kind.rpartition(".")
    error = getattr(pytest.importorskip(module), name)("Couldn't reach\nthe hub")
    assert run(["--tasks", "paper"], partial(give_up, error)) == "error: Couldn't reach the hub\n"
    with pytest.raises(RuntimeError, match="ours"):
        run(["--tasks", "paper"], partial(give_up, RuntimeError("ours")))


def test_a_missing_harness_is_one_line(monkeypatch, run):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert "pip install 'maskless[lm-eval]'" in run(["--tasks", "paper"])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"form": "guess"}, "unknown form 'guess': expected one of conditional, joint"),
        ({"greedy": "never"}, "unknown greedy 'never': expected one of one-by-one, at-once"),
        ({"samples": 0}, "samples 0 is out of range"),
        ({"batch": 0}, "batch_size 0 is out of range"),
        ({"block_steps": 0}, "block_steps 0 is out of range"),
        ({"samples": "x"}, "samples 'x': expected a whole number"),
        ({"seed": -1}, "seed -1 is out of range"),
    ],
)
def test_a_scorer_says_what_it_expected(how, says, tiny):
    with pytest.raises(ValueError, match=says):
        Scorer(Model(tiny("position", vocab=257), byte_codec()), **how)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "--model_args has none for pretrained: expected pretrained=MODEL, and of block, block_steps, form, "),
        ({"pretrained": "stories", "sample": 3}, "--model_args has sample: expected pretrained=MODEL"),
    ],
)
def test_arguments_that_no_scorer_has_are_named(given, says):
    with pytest.raises(ValueError, match=says):
        harness.HarnessModel(**given)


# What lm-eval asks for, without it


def test_continuations_stop_where_they_are_told_to(trained):
    scorer = Scorer(maskless.load(trained), block=3)
    encode = scorer.codec.encode
    prefixes = [encode("the cat eats"), encode("the dog")]
    most = 8
    one, two = scorer.continued(prefixes, ["."], most, temperature=0.0)
    assert "." not in one + two
    assert scorer.continued(prefixes[1:], ["."], most, temperature=0.0) == [two]
    (free,) = scorer.continued(prefixes[:1], [], most, temperature=0.0)
    assert len(encode(free)) <= most
    assert len(free) >= len(one)


def test_a_continuation_ends_with_its_document(tiny, monkeypatch):
    """Blocks of two tokens; the first prefix is followed by "ab", an EOS and more, the second has no end."""
    written = {1: [*b"ab", 256, *b"cd"], 2: [*b"efghi"]}

    def fill(model, rows, *, known, **how):
        asked.append(len(rows))
        tokens = rows.clone()
        for row, given in zip(tokens, known, strict=True):
            row[~given] = torch.tensor(written[int(row[0])])[int(given.sum()) - 1 :][: int((~given).sum())]
        return types.SimpleNamespace(tokens=tokens)

    asked: list[int] = []
    monkeypatch.setattr(harness.api, "fill", fill)
    scorer = Scorer(Model(tiny("position", vocab=257, length=8), byte_codec()), block=2)
    assert scorer.continued([[1], [2]], [], 5) == ["ab", "efghi"]
    assert asked == [2, 2, 1]  # the first one asks for no third block


def test_a_long_prefix_keeps_its_end(trained):
    scorer = Scorer(maskless.load(trained), samples=4)
    long = scorer.codec.encode("the hen eats corn . " * 20)
    target = scorer.codec.encode(" fish")
    (score, _), (cut, _) = scorer.score([(long, target), (long[-(12 - len(target)) :], target)])
    assert score == pytest.approx(cut, abs=1e-4)


def test_whole_documents_are_scored_in_stretches(tiny):
    model = Model(tiny("causal", vocab=257, length=8, scale=0.2), byte_codec())
    row = list(range(1, 20))
    expected = sum(options.conditional(model.network, [([], part)])[0] for part in (row[:8], row[8:16], row[16:]))
    assert Scorer(model).whole([row, []]) == [pytest.approx(expected), 0.0]


def test_wrapped_models_lead_with_bos_and_the_joint_form_ends_in_eos(tiny):
    network = tiny("position", vocab=257, length=8)
    model = Model(network, byte_codec(), "wrapped")
    ((score, _),) = Scorer(model, samples=4).score([([1, 2], [3])])
    assert score == pytest.approx(options.conditional(network, [([256, 1, 2], [3])])[0])
    ((score, _),) = Scorer(model, form="joint", samples=4).score([([1, 2], [3])])
    assert score == pytest.approx(options.joint(network, [([256, 1, 2], [3, 256])], samples=4)[0])
    with pytest.raises(ValueError, match="expected a text model with a tokenizer"):
        Scorer(Model(network))


def test_a_greedy_answer_is_given_one_by_one_or_at_once(tiny):
    network = tiny("position", vocab=257, length=4, scale=0.4)
    problems = dense(torch.arange(8)[:, None], torch.zeros(8, 1).long(), torch.tensor([[1, 2]] * 8))
    likeliest = network(problems).argmax(-1)
    requests = [([i], answer) for i, answer in enumerate(likeliest.view(8, 2).tolist())]
    right = {
        greedy: [found for _, found in Scorer(Model(network, byte_codec()), greedy=greedy, samples=1).score(requests)]
        for greedy in harness.GREEDY
    }
    assert right["at-once"] == [True] * 8 != right["one-by-one"]


def test_the_python_of_the_document_runs(trained, tmp_path, monkeypatch, capsys):
    document = Path(__file__).parents[2] / "docs" / "evaluation.md"
    (block,) = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    shutil.copytree(trained, tmp_path / "runs" / "my")
    lines = [json.dumps({"text": f"the {animal} eats {food}"}) for animal, food in EATS.items()]
    (tmp_path / "lambada_test.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    name, accuracy = capsys.readouterr().out.split()
    assert name == "accuracy"
    assert float(accuracy) > 0.6
