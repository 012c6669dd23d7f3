"""Rounds of distillation as a folder: stopped anywhere they go on, each teaches the next, and mistakes are named."""

import dataclasses
import io
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from run_folders import kept, spoiled_gradients, weights

import maskless
from command_inputs import photos
from in_process import one_line
from maskless.checkpoint import NETWORKS, Model
from maskless.codec.vq import PixelCodec
from maskless.data.image_prepare import prepare_images
from maskless.data.prepare import prepare
from maskless.data.tokens import open_tokens
from maskless.nn import autocast
from maskless.nn.causal import CausalConfig, CausalTransformer
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.problems import dense
from maskless.train import distill_run, state
from maskless.train.config import MODELS, TrainConfig
from maskless.train.distill import Stride, Teacher, lessons, one_group, teaching, two_groups
from maskless.train.distill_loss import LOSSES
from maskless.train.loop import take_steps
from maskless.train.plan import image_network_config, network_config
from maskless.train.run import Run, RunConfig
from tiny_networks import shaken

BOTH = pytest.mark.parametrize("groups", ["one", "two"])


def made(folder: Path, data, kind: str = "pgm", **sizes) -> Path:
    """A model of random weights for the data, the same each time: with others rounding may be magnified."""
    torch.manual_seed(0)
    config = network_config(kind, data.codec(), data.length, **{"width": 32, "layers": 2, "dropout": 0.2} | sizes)
    model = Model(NETWORKS[MODELS[kind][0]][1](config), data.codec(), data.layout)
    torch.manual_seed(3)
    shaken(model, 0.2).save_pretrained(folder)
    return folder


TRAIN = {"steps": 4, "batch": 4, "log_every": 1, "save_every": 2, "evaluate_every": 0, "sample_every": 0, "ema": 0.5}


def rounds(folder: Path, model: Path, data, *, resume: bool = False, train: dict | None = None, **how) -> Path:
    make = distill_run.resumed if resume else distill_run.begin
    settings = TRAIN | {"tracker": "none"} | (train or {})
    how = {"rounds": 2, "teacher_steps": 8} | how
    config = make(folder, distill_run.DistillRequest(source=str(model), data=data.folder, train=settings, how=how))
    distill_run.distill(folder, config, Console(file=io.StringIO()))
    return folder


def test_a_distillation_stopped_anywhere_ends_as_one_never_stopped(data, losses, tmp_path, monkeypatch):
    model = made(tmp_path / "model", data)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    rounds(straight, model, data)
    for owner, name, calls in (
        (Run, "log", 1),  # before the first state
        (Run, "log", 3),  # after it
        (Run, "save_model", 1),  # the last state of the first round is there, its model is not
        (distill_run, "_note", 1),  # all of the first round is there, but nobody wrote it down
        (Run, "log", 4),  # in the second round
    ):
        whole, left = getattr(owner, name), itertools.count(1)

        def stopping(*given, whole=whole, left=left, calls=calls, **named):
            if next(left) == calls:
                raise KeyboardInterrupt
            return whole(*given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopping)
            with pytest.raises(KeyboardInterrupt):
                rounds(stopped, model, data, resume=stopped.exists())
    rounds(stopped, model, data, resume=True)
    for name in ("round-1", "round-2"):
        assert list(losses(straight / name)) == [1, 2, 3, 4]
        assert losses(stopped / name) == losses(straight / name)
        assert weights(stopped / name) == weights(straight / name)
    assert weights(straight) == weights(straight / "round-2") != weights(straight / "round-1")
    assert maskless.load(stopped).network(dense(*torch.zeros(3, 1, 1).long())).shape == (1, 300)


def test_a_round_begins_with_the_averages_of_the_one_before(data, tmp_path):
    folder = rounds(tmp_path / "out", made(tmp_path / "model", data), data)
    last = torch.load(state.saved(folder / "round-1" / "states")[-1], weights_only=True)
    config = distill_run.DistillConfig.read(folder)
    network = dataclasses.asdict(maskless.load(folder).config)
    common = {"data": config.data, "network": network, "train": config.train, "distill": config}
    second = distill_run.Round(folder / "round-2", distill_run.RoundConfig(**common, number=2))
    fresh = second.build()
    for parts in (fresh.parameters(), second.teacher.network.parameters()):
        assert all(one.equal(average) for one, average in zip(parts, last["averages"], strict=True))
    assert not all(last["weights"][name].equal(value) for name, value in fresh.state_dict().items())
    assert second.stride == Stride(share=0.5, ratio=2)
    assert second.how == {"steps": 2}


def test_a_round_that_diverges_leaves_its_last_good_state(data, tmp_path):
    teacher = made(tmp_path / "teacher", data)
    given = {"steps": 4, "batch": 4, "log_every": 9, "save_every": 1, "keep": 1, "tracker": "none"}
    how = {"rounds": 1, "teacher_steps": 4}
    asked = distill_run.DistillRequest(source=str(teacher), data=data.folder, train=given, how=how)
    config = distill_run.begin(tmp_path / "out", asked)
    with (
        spoiled_gradients(3),
        pytest.raises(ValueError, match=r"the gradient is nan at step 3: --resume goes on from step-00000002.pt"),
    ):
        distill_run.distill(tmp_path / "out", config, Console(file=io.StringIO()))
    assert kept(tmp_path / "out" / "round-1") == ["step-00000002.pt"]
    assert state.finite(Model.from_pretrained(tmp_path / "out" / "round-1" / "model").parameters())
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(("kind", "groups"), [("pgm", "two"), ("mdlm", "one")])
def test_a_student_that_has_as_many_steps_as_its_teacher_has_nothing_to_learn(data, kind, groups, losses, tmp_path):
    model = made(tmp_path / "model", data, kind, dropout=0.0)
    for ratio in (1, 2):
        rounds(tmp_path / str(ratio), model, data, groups=groups, rounds=1, ratio=ratio, train={"learning_rate": 1e-9})
    assert [loss for loss, _, _ in losses(tmp_path / "1" / "round-1").values()] == pytest.approx([0] * 4, abs=1e-5)
    assert max(loss for loss, _, _ in losses(tmp_path / "2" / "round-1").values()) > 1e-3


def test_only_the_student_learns(data, tmp_path):
    teacher = Teacher(maskless.load(made(tmp_path / "model", data), device="cpu").network)
    student = maskless.load(tmp_path / "model", device="cpu").network
    held = [p.clone() for p in teacher.network.parameters()]
    config = TrainConfig(**TRAIN | {"learning_rate": 0.01, "warmup": 0})
    work = teaching(teacher, LOSSES["tv"], data.split("train"), config, Stride(share=0.25, ratio=2), "two")
    optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.0)
    assert len(list(take_steps(student, optimizer, work, config, Accelerator()))) == 4
    assert all(p.grad is None and p.equal(was) for p, was in zip(teacher.network.parameters(), held, strict=True))
    assert not any(p.equal(was) for p, was in zip(student.parameters(), held, strict=True))
    assert student.training
    assert not teacher.network.training


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("kind", ["pgm", "mdlm"])
def test_a_step_never_waits_for_the_gpu(data, kind, groups, tmp_path):
    teacher, student = (maskless.load(made(tmp_path / "m", data, kind), device="cuda").network for _ in range(2))
    config = TrainConfig(**TRAIN | {"steps": 6, "compile": False})
    rows, stride = data.split("train"), Stride(share=0.25, ratio=2)
    work = teaching(Teacher(teacher), LOSSES["tv"], rows, config, stride, groups, pinned=True)
    optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.0, fused=True)
    try:
        for step in take_steps(student, optimizer, work, config, Accelerator()):
            if step.step == 2:
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@BOTH
def test_a_batch_of_32_times_1024_tokens_of_gpt2_fits_in_40_gib(groups):
    config = PartitionConfig(vocab=50257, length=1024)
    teacher, student = (PartitionTransformer(config).cuda() for _ in range(2))
    rows = torch.randint(50257, (32, 1024)), *torch.rand(3, 32, 1024).double()
    build, stride = {"one": one_group, "two": two_groups}[groups], Stride(share=2 / 128, ratio=2)
    lesson = build(rows[0], rows[1][:, 0], *rows[2:], torch.ones(32, 1024).bool(), stride)
    torch.cuda.reset_peak_memory_stats()
    taught = Teacher(teacher)
    with autocast(torch.device("cuda")):
        loss = taught.loss(LOSSES["kl-backward"], student.train(), taught(lesson))
    loss.backward()
    assert torch.cuda.max_memory_allocated() < 40 * 2**30


@BOTH
def test_processes_share_out_the_lessons_of_one(data, groups):
    rows, stride = data.split("train"), Stride(share=0.8, ratio=2)  # no step without a target
    pad = int(rows.rows([0]).mode().values)
    common = {"pad": pad, "step": 3}
    [whole], count = lessons(rows, TrainConfig(batch=8, seed=5), stride, groups, **common)
    halves = TrainConfig(batch=8, seed=5, accumulate=2)
    shares = [lessons(rows, halves, stride, groups, **common, world=2, rank=rank) for rank in range(2)]
    assert {each for _, each in shares} == {count} == {int(whole.weights.sum())}
    parts = [lesson for pieces, _ in shares for lesson in pieces]
    assert torch.cat([part.board for part in parts]).equal(whole.board)
    assert torch.cat([part.weights for part in parts]).equal(whole.weights)
    for number in range(2):
        asks = [part.asks[number] for part in parts]
        assert torch.cat([ask.draws for ask in asks]).equal(whole.asks[number].draws)
        assert torch.cat([ask.problems.targets for ask in asks]).equal(whole.asks[number].problems.targets)


def test_two_processes_have_the_losses_of_one(start_two, data, losses, tmp_path):
    model, alone, two = made(tmp_path / "model", data, dropout=0.0), tmp_path / "one", tmp_path / "two"
    rounds(alone, model, data, train={"learning_rate": 1e-6})  # so that rounding makes no difference
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TRAIN.items() if name != "steps"]
    how = ("--tracker", "none", "--rounds", 2, "--teacher-steps", 8, "--steps-per-round", 4, "--lr", 1e-6, *options)
    both = start_two("maskless", "distill", model, "--data", data.folder, "--out", two, *how)
    assert [process.wait() for process in both] == [0, 0], both[0].stderr
    for name in ("round-1", "round-2"):
        assert list(losses(two / name)) == [1, 2, 3, 4]
        for step, expected in losses(alone / name).items():
            assert losses(two / name)[step] == pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Of 3 x 3 tokens."""
    folder = photos(tmp_path_factory.mktemp("pictures") / "all", count=8, shape=(3, 3))
    return prepare_images([folder], folder / "data", PixelCodec(4), size=3)


@pytest.mark.parametrize(("kind", "groups"), [("pgm", "one"), ("pgm", "two"), ("maskgit", "one")])
def test_models_of_pictures_are_distilled_with_their_labels(pictures, kind, groups, losses, tmp_path):
    config = image_network_config(kind, pictures, width=32, layers=2)
    torch.manual_seed(3)
    network = shaken(NETWORKS[MODELS[kind][0]][1](config), 0.2)
    Model(network, pictures.codec(), "image", pictures.classes).save_pretrained(tmp_path / "model")
    folder = rounds(tmp_path / "out", tmp_path / "model", pictures, groups=groups)
    assert [len(losses(folder / name)) for name in ("round-1", "round-2")] == [4, 4]
    assert (folder / "round-1" / "samples.png").exists()
    assert maskless.load(folder).classes == ("cat", "dog")
    [lesson], _ = lessons(pictures.split("train"), TrainConfig(batch=16), Stride(share=0.5, ratio=2), groups, 0)
    assert set(lesson.problems.labels.tolist()) <= {0, 1, 2}
    assert (lesson.problems.targets > 0).all()  # BOS is given


# The command

SHORT = ("--steps-per-round", 2, "--batch", 4, "--tracker", "none")


def test_from_a_model_to_its_students(data, tmp_path, command):
    model, to = made(tmp_path / "model", data), tmp_path / "out"
    how = ("--rounds", 2, "--teacher-steps", 8, "--loss", "tv", "--groups", "one", *SHORT)
    told = json.loads(command("distill", model, "--data", data.folder, "--out", to, *how, "--json").out)
    assert [(each["round"], each["sampling_steps"], each["steps"]) for each in told] == [(1, 4, 2), (2, 2, 2)]
    shown = command("distill", "--out", to, "--resume", "--rounds", 3)
    assert shown.code == 0
    assert f"students: {to}/round-1 to round-3   try: maskless generate {to} --steps 1\n" in shown.out
    assert "round 3 of 3, 1 steps" in shown.err
    assert "round 2 of" not in shown.err
    settings = [json.loads((to / f"round-{i}" / "run.json").read_text())["train"] for i in (1, 2, 3)]
    assert len({each.pop("seed") for each in settings}) == 3, "each round has draws of its own"
    assert settings[0] == settings[1] == settings[2]
    assert weights(to) == weights(to / "round-3")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--loss", "mse"), "unknown loss 'mse': expected one of kl-backward, kl-forward, tv"),
        (("--groups", "three"), "unknown groups 'three': expected one of one, two"),
        (("--rounds", 0), "rounds 0 is out of range: expected 1 or more"),
        (("--rounds", 4, "--teacher-steps", 8), "4 rounds divide the steps by 16: expected at least as many teacher"),
        (("--teacher-steps", 17), "teacher_steps 17 is out of range: expected 1 to 16"),
        (("--steps-per-round", 0), "steps 0 is out of range: expected more than 0"),
        (("--batch", 3, "--accumulate", 2), "batch 3 does not split over 1 process(es) x 2 piece(s)"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(data, tmp_path, command, wrong, says):
    model, to = made(tmp_path / "model", data), tmp_path / "out"
    assert one_line(command("distill", model, "--data", data.folder, "--out", to, *wrong)).startswith(says)
    assert not to.exists()


def test_a_model_that_does_not_fit_is_refused(text, data, pictures, tmp_path, command):
    model, out = made(tmp_path / "model", data), ("--out", tmp_path / "out")
    Model(CausalTransformer(CausalConfig(vocab=300, length=16, width=16, heads=2, layers=1))).save_pretrained(
        tmp_path / "ar"
    )
    longer = open_tokens(prepare([text], tmp_path / "longer", vocab=300, length=32))
    other = open_tokens(prepare([text], tmp_path / "other", vocab=280, length=16))
    for given, says in (
        ((), "what to distill, and on what? expected MODEL and --data DIR (a prepared folder)"),
        ((tmp_path / "ar", "--data", data.folder), "is an AR model, which decides a token in each step"),
        ((model, "--data", pictures.folder), "holds pictures,"),
        ((model, "--data", longer.folder), "has length 32,"),
        ((model, "--data", other.folder), "has another vocabulary"),
        ((model, "--data", tmp_path), "not a prepared folder"),
    ):
        assert says in one_line(command("distill", *given, *out))
    assert not (tmp_path / "out").exists()


def test_a_distillation_goes_on_as_it_began(data, tmp_path, command):
    model = made(tmp_path / "model", data)
    folder = rounds(tmp_path / "out", model, data, rounds=1)
    out = ("--out", folder)
    for given, says in (
        ((model, "--data", data.folder, *out), "holds a distillation already: resume it with --resume"),
        ((*out, "--resume", "--loss", "tv"), "loss is kl-backward in"),
        ((*out, "--resume", "--lr", 1), "learning_rate is 0.0003 in"),
        ((tmp_path / "other", *out, "--resume"), "source is"),
    ):
        assert says in one_line(command("distill", *given))
    with pytest.raises(ValueError, match="is a round of a distillation"):
        RunConfig.read(folder / "round-1")


def test_the_error_of_one_sequence_is_null_in_the_file(tmp_path):
    distill_run._note(tmp_path, [distill_run.RoundSummary(1, 8.0, 3, 0.5, 90.0, math.nan)])
    assert json.loads((tmp_path / "rounds.json").read_text())[0]["perplexity_error"] is None
    assert math.isnan(distill_run._results(tmp_path)[0].perplexity_error)
