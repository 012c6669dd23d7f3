"""The validation bound: exact where it can be, its error honest, and padding out of it."""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maskless import objective
from maskless.codec.text import TextCodec
from maskless.data.prepare import prepare
from maskless.data.tokens import Prepared, TokenRows, open_tokens
from maskless.evaluate.likelihood import Likelihood, likelihood
from maskless.problems import Problems, dense
from objective_tasks import loss
from toy_text import write

V = 300


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Prepared:
    folder = tmp_path_factory.mktemp("likelihood")
    return open_tokens(prepare([write(folder / "toy.txt", 4000, seed=1)], folder / "data", vocab=V, length=16))


@pytest.fixture(scope="module")
def rows(data) -> TokenRows:
    return data.split("train")


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Prepared:
    """Documents of very different lengths, each in a row of its own."""
    folder = tmp_path_factory.mktemp("padded")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue"]))
    lines = ['{"text": "' + "red blue blue " * (n % 5) + 'red"}' for n in range(80)]
    (folder / "colours.jsonl").write_text("\n".join(lines))
    codec = TextCodec.load(folder / "vocab.txt")
    out = prepare([folder / "colours.jsonl"], folder / "data", codec=codec, length=16, layout="padded", valid=0.25)
    return open_tokens(out)


@pytest.fixture(scope="module")
def varied(tiny) -> nn.Module:
    """A network whose costs differ between tokens and between contexts."""
    return tiny("position", scale=0.3, vocab=V, length=16)


@pytest.fixture(scope="module")
def causal(tiny) -> nn.Module:
    return tiny("causal", scale=0.3, vocab=V, length=16)


def fixed(logits: Tensor) -> Callable[[Problems], Tensor]:
    """A network that answers everything with the same logits."""
    return lambda problems: logits.expand(len(problems.targets), -1)


def every(rows: TokenRows, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))


class Part(TokenRows):
    """Some of the rows; remembers those it was asked for."""

    def __init__(self, rows: TokenRows, numbers: Sequence[int]):
        self.all, self.numbers, self.length = rows, np.array(numbers), rows.length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, numbers: np.ndarray) -> Tensor:
        self.asked += numbers.tolist()
        return self.all.rows(self.numbers[numbers])


# Exact


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_a_uniform_model_costs_log_v_and_has_no_error(rows, batch):
    measured = likelihood(fixed(torch.zeros(V)), rows, sequences=50, samples=3, batch=batch)
    assert measured.nats == pytest.approx(math.log(V), rel=1e-6)
    assert measured.error == pytest.approx(0, abs=1e-6)
    assert measured.perplexity == pytest.approx(V, rel=1e-5)
    assert (measured.sequences, measured.tokens) == (50, 50 * 16)


def test_a_causal_model_has_exactly_its_likelihood(rows, causal):
    tokens = rows.rows(every(rows, 40))
    places = torch.arange(16)
    costs = []
    with torch.no_grad():
        for row in tokens:
            each = []
            for i, token in enumerate(row):
                known = dense(row[None, :i], places[None, :i], places[None, i : i + 1], None, None)
                each.append(-causal(known).log_softmax(-1)[0, token].double())
            costs.append(torch.stack(each).sum())
    costs = torch.stack(costs) / 16
    for paper in (False, True):
        measured = likelihood(causal, rows, sequences=40, batch=11, paper=paper)
        assert measured.nats == pytest.approx(float(costs.mean()), rel=1e-5)
        assert measured.error == pytest.approx(float(costs.std()) / math.sqrt(40), rel=1e-4)


def test_the_sequences_are_spread_evenly_over_the_split(rows, causal):
    part, done = Part(rows, range(len(rows))), []
    likelihood(causal, part, sequences=9, batch=4, on_batch=done.append)
    assert done == [4, 4, 1]
    numbers = torch.tensor(part.asked)
    assert numbers[[0, -1]].tolist() == [0, len(rows) - 1]
    assert numbers.diff().double().std() < 1
    assert likelihood(causal, rows, sequences=10**9, batch=512).sequences == len(rows)


def test_the_same_seed_gives_the_same_number_and_another_seed_another(rows, varied):
    for paper in (False, True):
        one, two, other = (likelihood(varied, rows, sequences=20, seed=s, paper=paper).nats for s in (3, 3, 4))
        assert one == two != other


# Padding


def test_padding_does_not_count(padded):
    rows, vocab, pad = padded.split("train"), padded.vocab, padded.pad
    tokens = rows.rows(range(len(rows)))
    real = int((tokens != pad).sum())
    assert real < tokens.numel()
    uniform = likelihood(fixed(torch.zeros(vocab)), rows, samples=4, pad=pad)
    assert uniform.tokens == real
    hating = torch.zeros(vocab)
    hating[pad] = -50.0  # to predict padding costs a fortune
    for paper in (False, True):
        measured = likelihood(fixed(hating), rows, samples=64, pad=pad, paper=paper)
        assert measured.nats < 1.5 * math.log(vocab - 1)
        assert likelihood(fixed(hating), rows, samples=64, paper=paper).nats > 10


def test_the_bound_of_padded_rows_is_the_mean_over_real_tokens(padded, tiny):
    rows, pad = padded.split("train"), padded.pad
    causal = tiny("causal", scale=0.3, vocab=padded.vocab, length=16)
    tokens = rows.rows(range(len(rows)))
    real = tokens != pad
    with torch.no_grad():
        task = objective.causal(tokens, tokens, tokens, real)
        expected = float(loss(causal, task)) / int(real.sum())
    assert likelihood(causal, rows, pad=pad).nats == pytest.approx(expected, rel=1e-5)
    assert likelihood(causal, rows).nats != pytest.approx(expected, rel=1e-2)


# Estimated


def test_the_two_estimators_agree_within_their_errors(rows, varied):
    ours = likelihood(varied, rows, sequences=2000, samples=4, batch=256)
    papers = likelihood(varied, rows, sequences=2000, paper=True, batch=256)
    assert ours.error < papers.error < 0.15
    assert abs(ours.nats - papers.nats) < 4 * math.hypot(ours.error, papers.error)


@pytest.mark.parametrize("paper", [False, True])
def test_the_standard_error_is_the_spread_over_seeds_and_sequences(rows, varied, paper):
    """Groups of sequences that share nothing: their means differ as much as the errors say.

    The paper's times are stratified over a batch, which the error does not know of: there, a batch is one sequence.
    """
    dealt = torch.randperm(len(rows) // 20 * 20, generator=torch.Generator().manual_seed(0)).view(-1, 20)
    groups = [Part(rows, group) for group in dealt.tolist()]
    found = [
        likelihood(varied, group, samples=1, seed=1000 * n, batch=1 if paper else 20, paper=paper)
        for n, group in enumerate(groups[: 60 if paper else 160])
    ]
    nats = torch.tensor([one.nats for one in found], dtype=torch.float64)
    said = torch.tensor([one.error for one in found], dtype=torch.float64).square().mean().sqrt()
    spread = nats.std()
    assert 0.75 < float(said / spread) < 1.33


def test_more_splits_of_each_sequence_narrow_the_noise(rows, varied):
    how = [{"sequences": 32, "seed": 10_000 * s} for s in range(24)]
    nats = torch.tensor([[likelihood(varied, rows, samples=n, **each).nats for each in how] for n in (1, 8)])
    assert nats.std(1)[1] < nats.std(1)[0] / 2


# Numbers


def test_perplexity_bits_and_errors_follow_from_nats():
    measured = Likelihood(nats=2.0, error=0.1, sequences=3, tokens=48)
    assert measured.perplexity == pytest.approx(math.e**2)
    assert measured.perplexity_error == pytest.approx(0.1 * math.e**2)
    assert measured.bits_per_byte(4.0) == pytest.approx(2 / math.log(2) / 4)
    assert measured.as_dict() == dataclasses.asdict(measured) | {
        "perplexity": measured.perplexity,
        "perplexity_error": measured.perplexity_error,
    }
    assert math.isfinite(Likelihood(nats=1e6, error=0.0, sequences=1, tokens=1).perplexity)


def test_two_evaluations_at_a_time_leave_the_compiler_as_it_was(rows):
    """The one that began first ends first."""
    begun, both, ended = threading.Event(), threading.Event(), threading.Event()

    def costly(come: threading.Event, wait: threading.Event) -> Callable[[Problems], Tensor]:
        def network(problems: Problems) -> Tensor:
            come.set()
            assert wait.wait(60)
            return torch.zeros(len(problems.targets), V)

        return network

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(likelihood, costly(begun, both), rows, sequences=2)
        assert begun.wait(60)
        second = threads.submit(likelihood, costly(both, ended), rows, sequences=2)
        first.result(60)
        ended.set()
        assert second.result(60) == first.result()
    assert torch._dynamo.eval_frame._stance.stance == "default"
