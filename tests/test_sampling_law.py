"""Samples have the law of the model, and causal ones are drawn from left to right."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from maskless import logits as lg
from maskless.draw import DRAW, Truncation
from maskless.logits import row_keys
from maskless.plans import plan_causal
from maskless.problems import dense
from maskless.sampling import sample
from sampling_runs import L, V, run


def laws_of_counts(counts: str, n: int, steps: int) -> dict[tuple[int, ...], float]:
    """How likely each sequence of counts is."""
    if counts == "uniform":
        return {tuple(n * (k + 1) // steps - n * k // steps for k in range(steps)): 1.0}
    laws: dict[tuple[int, ...], float] = {}
    for chosen in itertools.product(range(steps), repeat=n):  # each position picks its step
        key = tuple(chosen.count(k) for k in range(steps))
        laws[key] = laws.get(key, 0.0) + steps**-n
    return laws


@torch.no_grad()
def law_of_samples(network, vocab: int, n: int, steps: int, counts: str) -> Tensor:
    """The probability of every sequence, by running through all orders and counts.  -> (vocab,) * n"""
    known: dict[tuple, Tensor] = {}

    def probabilities(context: tuple[tuple[int, int], ...]) -> Tensor:
        if context not in known:
            places = torch.tensor([[p for p, _ in context]], dtype=torch.long).view(1, -1)
            tokens = torch.tensor([[x for _, x in context]], dtype=torch.long).view(1, -1)
            known[context] = network(dense(tokens, places, torch.arange(n)[None]))[:, :vocab].double().softmax(-1)
        return known[context]

    law = torch.zeros([vocab] * n, dtype=torch.float64)
    orders = list(itertools.permutations(range(n)))
    for sequence in itertools.product(range(vocab), repeat=n):
        for order in orders:
            for sizes, chance in laws_of_counts(counts, n, steps).items():
                p, start = chance / len(orders), 0
                for size in sizes:
                    each = probabilities(tuple((i, sequence[i]) for i in order[:start]))
                    p *= math.prod(float(each[i, sequence[i]]) for i in order[start : start + size])
                    start += size
                law[sequence] += p
    return law


@pytest.mark.parametrize("kind", ["position", "logsumexp", "ordered", "masked"])
@pytest.mark.parametrize(("steps", "counts"), [(1, "uniform"), (2, "uniform"), (3, "uniform"), (2, "mdlm")])
def test_samples_have_the_law_of_the_model(tiny, p_value, kind, steps, counts):
    vocab, n, rows = 3, 3, 20_000
    network = tiny(kind, scale=0.25, seed=4, vocab=vocab + (kind == "masked"), length=n)
    law = law_of_samples(network, vocab, n, steps, counts)
    assert float(law.sum()) == pytest.approx(1, abs=1e-6)
    tokens, unknown = torch.zeros(rows, n, dtype=torch.long), torch.zeros(rows, n, dtype=torch.bool)
    done, *_ = run(network, tokens, unknown, steps=steps, counts=counts)
    observed = (done @ torch.tensor([9, 3, 1])).bincount(minlength=27)
    assert p_value(observed, rows * law) > 1e-4
    if steps == 3:  # the test is sharp enough to tell that a step saw its context
        assert p_value(observed, rows * law_of_samples(network, vocab, n, 1, counts)) < 1e-6


def left_to_right(network, tokens: Tensor, known: Tensor, keys: Tensor) -> Tensor:
    tokens = tokens.clone()
    for position in range(tokens.shape[1]):
        context = torch.arange(position).expand(len(tokens), position)
        with torch.no_grad():
            logits = network(dense(tokens[:, :position], context, torch.full((len(tokens), 1), position)))
        drawn = lg.draw(logits, lg.uniforms(keys, torch.tensor(position), DRAW))
        tokens[:, position] = torch.where(known[:, position], tokens[:, position], drawn)
    return tokens


@pytest.mark.parametrize("prompts", [[0, 0, 0], [2, 2, 2], [0, 3, 5]])
def test_causal_sampling_goes_from_left_to_right_whatever_the_prompts(tiny, prompts):
    network, keys = tiny("causal", scale=0.2, length=L), row_keys(1, torch.arange(3))
    tokens = torch.randint(V, (3, L), generator=torch.Generator().manual_seed(0))
    known = torch.arange(L) < torch.tensor(prompts)[:, None]
    done = torch.where(known, tokens, 0)
    steps = list(sample(network, done, plan_causal(known, ~known), keys, filter=Truncation()))
    assert torch.equal(done, left_to_right(network, tokens, known, keys))
    seen = torch.zeros_like(tokens)
    for step in steps:
        seen[step.rows, step.positions] += 1
        assert torch.equal(done[step.rows, step.positions], step.tokens)
    assert torch.equal(seen, (~known).long())
    for row in range(3):
        alone = torch.where(known, tokens, 0)[row : row + 1]
        one = known[row : row + 1]
        list(sample(network, alone, plan_causal(one, ~one), keys[row : row + 1], filter=Truncation()))
        assert torch.equal(alone[0], done[row])
