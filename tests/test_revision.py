"""Revision: every decided token is judged without seeing itself, the least likely go, what is given stays."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from maskless import fill, generate
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.logits import row_keys, uniforms
from maskless.problems import Problems
from maskless.revision import FIRST, LAST, cooled, likelihoods, steps_of, to_revise

B, L, V = 3, 12, 5


class Majority(nn.Module):
    """A language of one repeated token: it answers with what most of the context is, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.asked: list[Problems] = []

    def forward(self, problems: Problems) -> Tensor:
        self.asked.append(problems)
        owner = problems.offsets.owner
        counts = torch.zeros(len(problems), V).index_put((owner, problems.tokens), torch.ones(len(owner)), True)
        return 10.0 * counts[problems.target_offsets.owner]


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, those that are given, those that were decided; some places of the second row are neither."""
    tokens = torch.tensor([[1] * L, [2] * L, [3] * L])
    known, wanted = torch.zeros(B, L, dtype=torch.bool), torch.ones(B, L, dtype=torch.bool)
    known[0, 2], known[1, :4] = True, True
    wanted[:, :][known] = False
    wanted[1, 9:] = False
    return tokens, known, wanted


def test_each_token_is_judged_by_the_given_ones_and_the_other_half_and_never_by_itself():
    network, (tokens, known, wanted) = Majority(), rows()
    likelihoods(network, tokens, known, wanted, row_keys(0, torch.arange(B)))
    (problems,) = network.asked
    context, target = torch.zeros(2, 2 * B, L, dtype=torch.long)
    context.index_put_((problems.offsets.owner, problems.positions), torch.tensor(1), accumulate=True)
    target.index_put_((problems.target_offsets.owner, problems.targets), torch.tensor(1), accumulate=True)
    assert int(context.max()) == int(target.max()) == 1
    assert torch.equal(context + target, (known | wanted).long().repeat(2, 1))
    assert torch.equal(context * known.repeat(2, 1), known.long().repeat(2, 1))
    assert torch.equal(target[:B] + target[B:], wanted.long())  # each once, in one of the two problems of its row
    assert (target[:B].sum(1) - target[B:].sum(1)).abs().max() <= 1
    assert torch.equal(problems.tokens, tokens.repeat(2, 1)[problems.offsets.owner, problems.positions])


def test_it_is_the_log_probability_that_the_network_gives(network):
    tokens = torch.randint(10, (B, 8), generator=torch.Generator().manual_seed(0))
    known = torch.arange(8).expand(B, 8) < 2
    noted = []
    hook = network.register_forward_hook(lambda module, args, answer: noted.append(args[0]))
    found = likelihoods(network, tokens, known, ~known, row_keys(0, torch.arange(B)))
    hook.remove()
    (problems,), expected = noted, torch.zeros(B, 8, dtype=torch.float64)
    logs = network(problems).log_softmax(-1).double()
    for log, row, position in zip(logs, problems.target_offsets.owner.tolist(), problems.targets, strict=True):
        expected[row % B, position] = log[tokens[row % B, position]]
    torch.testing.assert_close(found[~known], expected[~known], atol=1e-5, rtol=0)
    assert (found[known] == torch.inf).all()


@pytest.mark.parametrize("number", range(3))
def test_the_least_likely_go_and_their_share_falls(number):
    network, (tokens, known, wanted) = Majority(), rows()
    strange = torch.zeros(B, L, dtype=torch.bool)
    strange[0, 5] = strange[1, 6] = strange[2, 0] = True
    tokens[strange] = 4
    gone = to_revise(network, tokens, known, wanted, row_keys(0, torch.arange(B)), number=number, rounds=3)
    share = (FIRST, (FIRST + LAST) / 2, LAST)[number]
    assert gone.sum(1).tolist() == [math.ceil(share * n) for n in wanted.sum(1).tolist()]
    assert (gone & strange).sum() == 3
    assert not (gone & ~wanted).any()


def test_what_sampling_draws_says_nothing_about_the_halves_and_their_order():
    """A round draws with the keys that have split its tokens."""
    network, keys, wanted = Majority(), row_keys(0, torch.arange(400)), torch.ones(400, L, dtype=torch.bool)
    likelihoods(network, torch.zeros(400, L, dtype=torch.long), ~wanted, wanted, keys)
    half = network.asked[0].positions.view(2, 400, L // 2)[0]  # of each row, the one that is shown first
    for purpose in range(4):
        u = uniforms(keys[:, None], torch.arange(L), purpose).gather(1, half)
        assert abs(float(u.mean()) - 1 / 2) < 4 * math.sqrt(1 / 12 / u.numel())
        assert abs(float((u[:, 0] - u[:, -1]).mean())) < 4 * math.sqrt(1 / 6 / len(u))


def model(tiny, kind: str = "ordered") -> Model:
    return Model(tiny(kind, scale=0.25, vocab=257, length=24), byte_codec())


def test_what_is_given_stays_and_steps_and_order_tell_what_came_last(tiny):
    for kind in ("ordered", "position", "masked"):
        seen = []
        text = fill(model(tiny, kind), "ab[8]cd[9]", steps=5, seed=1, revise=3, on_step=seen.append)
        assert text.tokens[:2] == [97, 98]
        assert text.tokens[10:12] == [99, 100]
        gaps = [i for i, step in enumerate(text.steps) if step >= 0]
        assert sorted(text.order) == gaps == [*range(2, 10), *range(12, 21)]
        last = {
            int(p): (step.number, int(t)) for step in seen for p, t in zip(step.positions, step.tokens, strict=True)
        }
        assert {p: (text.steps[p], text.tokens[p]) for p in gaps} == last
        assert [step.number for step in seen] == list(range(len(seen)))
        assert [text.steps[p] for p in text.order] == sorted(text.steps[p] for p in text.order)
        assert len(seen) == 5 + sum(steps_of(5, 3))


def test_a_text_does_not_depend_on_those_beside_it(tiny):
    one = model(tiny)
    assert generate(one, 3, length=20, seed=2, revise=2)[0] == generate(one, 1, length=20, seed=2, revise=2)[0]
    for steps in (None, 1, 9):
        texts, how = ["a[9]", "ab[17]cdef"], {"seed": 2, "revise": 3, "steps": steps}
        assert fill(one, texts, **how) == [fill(one, text, **how) for text in texts]


def test_no_round_leaves_the_draft_and_a_round_changes_it(tiny):
    one = model(tiny)
    drafts, revised = (generate(one, 4, length=20, seed=3, revise=rounds) for rounds in (0, 4))
    assert drafts == generate(one, 4, length=20, seed=3)
    assert drafts != revised


def test_a_round_draws_anew(tiny):
    """Of a network that finds all tokens equally likely: the same one comes back by chance alone."""
    one, seen, drawn = model(tiny), [], {}
    for parameter in one.network.parameters():
        parameter.detach().zero_()
    generate(one, 8, steps=4, seed=1, revise=4, on_step=seen.append)
    for step in seen[: -steps_of(4, 4)[-1]]:  # the last round takes the most likely
        for row, position, token in zip(step.rows.tolist(), step.positions.tolist(), step.tokens.tolist(), strict=True):
            drawn.setdefault((row, position), []).append(token)
    pairs = [a == b for tokens in drawn.values() for a, b in itertools.combinations(tokens, 2)]
    assert len(pairs) > 100
    assert sum(pairs) < 0.05 * len(pairs)  # of 257 tokens


def test_the_last_round_takes_the_most_likely(tiny):
    """One round: what it decides again in a single step is the mode, given all the others."""
    one = model(tiny, "position")
    text = fill(one, "ab[16]", steps=1, seed=1, revise=1)
    again = [p for p in text.order if text.steps[p] == 1]
    assert len(again) == math.ceil(16 * FIRST)
    assert cooled(0.8, 0, 1) == cooled(0.8, 3, 4) == 0
    assert cooled(0.8, 0, 4) == pytest.approx(0.6)
    tokens = torch.tensor([text.tokens])
    places = torch.tensor([[p for p in range(18) if p not in again]])
    logits = one.predict(tokens.gather(1, places), places, targets=torch.tensor([again]))
    assert logits[0].argmax(-1).tolist() == [text.tokens[p] for p in again]


@pytest.mark.gpu
def test_on_a_gpu_tokens_are_as_likely(tiny):
    tokens = torch.randint(10, (B, 8), generator=torch.Generator().manual_seed(0))
    known = torch.arange(8).expand(B, 8) < 2
    given = tokens, known, ~known, row_keys(0, torch.arange(B))
    here, there = (likelihoods(tiny("ordered").to(device), *given) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)
    texts = generate(model(tiny).to("cuda"), 2, length=20, seed=2, revise=2)
    assert [len(text.order) for text in texts] == [20, 20]
