"""Exact sampling has the distribution of one token a step, whatever the order, the filter and the size of a draft."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

import maskless
from maskless import sampling, speculation
from maskless.checkpoint import Model
from maskless.codec.text import byte_codec
from maskless.drafts import Drafts, Step
from maskless.draw import Guidance, Truncation, constant
from maskless.engine import Engine, Slots, backend_of, backends, kernels
from maskless.engine.kv_slots import KVSlots
from maskless.engine.rounds import RoundKind, Rounds
from maskless.logits import row_keys
from maskless.mixture import Mixture
from maskless.order import strands
from maskless.plans import Plan
from maskless.problems import dense
from maskless.sampling import Plain, run

V, L = 3, 4
FILTERS = {"plain": Truncation(), "cool nucleus": Truncation(temperature=0.7, top_p=0.8), "top-k": Truncation(top_k=2)}
FAMILIES = {"left": [0, 1, 2, 3], "shuffled": [2, 0, 3, 1], "strands": [0, 2, 1, 3]}


@pytest.fixture(scope="module")
def network(tiny):
    """Its tokens depend on each other."""
    return tiny("ordered", scale=0.2, vocab=V, never=None, length=6)


@pytest.fixture
def rounds(monkeypatch) -> list[int]:
    """How many rows each round had."""
    seen, one = [], Rounds.round
    monkeypatch.setattr(Rounds, "round", lambda self: (seen.append(self.kind.rows), one(self)))
    return seen


@torch.no_grad()
def law(network, order: list[int], filter: Truncation, known: dict[int, int] | None = None) -> dict[tuple, float]:
    """The probability of every sequence, by a token a step along the order, the known ones first."""
    found = {tuple((known or {}).items()): 1.0}
    for place in order:
        grown = {}
        for before, p in found.items():
            positions, tokens = (torch.tensor([[pair[i] for pair in before]], dtype=torch.long) for i in (0, 1))
            logits = network(dense(tokens.view(1, -1), positions.view(1, -1), torch.tensor([[place]])))
            chances = filter(logits.double(), torch.zeros(1), torch.zeros(1)).double().softmax(-1)[0].tolist()
            grown |= {(*before, (place, token)): p * chance for token, chance in enumerate(chances) if chance}
        found = grown
    return {tuple(token for _, token in sorted(pairs)): p for pairs, p in found.items()}


def exactly(network, order: list[int], rows: int, **how) -> tuple[Tensor, Drafts]:
    length = len(order)
    unknown, keys = torch.zeros(rows, length, dtype=torch.bool), row_keys(1, torch.arange(rows))
    way = Plan(torch.tensor(order).repeat(rows, 1), torch.arange(length + 1).repeat(rows, 1))
    drafts = Drafts(tokens=unknown.long(), plan=way, keys=keys, **how)
    run(drafts, Plain(network))
    return drafts.tokens, drafts


def goodness(tokens: Tensor, expected: dict[tuple, float], p_value) -> float:
    rows, possible = len(tokens), sorted(expected)
    index = {sequence: i for i, sequence in enumerate(possible)}
    assert all(tuple(row) in index for row in tokens.unique(dim=0).tolist()), "a sequence that cannot be"
    counts = torch.zeros(len(possible))
    for row, times in zip(*(x.tolist() for x in tokens.unique(dim=0, return_counts=True)), strict=True):
        counts[index[tuple(row)]] = times
    return p_value(counts, rows * torch.tensor([expected[one] for one in possible], dtype=torch.float64))


@pytest.mark.parametrize(("family", "draft"), [("shuffled", 2), *((family, 4) for family in FAMILIES)])
@pytest.mark.parametrize("name", FILTERS)
def test_every_sequence_is_as_likely_as_by_one_token_a_step(network, p_value, family, name, draft):
    order, filter = FAMILIES[family], FILTERS[name]
    tokens, drafts = exactly(network, order, 20_000, filter=filter, draft=draft)
    assert goodness(tokens, law(network, order, filter), p_value) > 1e-4
    assert drafts.tally.decided == 20_000 * L
    assert drafts.tally.accepted < drafts.tally.drafted  # something was refused, or this shows nothing


@pytest.mark.parametrize("broken", ["all are accepted", "drawn anew from q"])
def test_a_broken_rule_is_found_out(network, p_value, monkeypatch, broken):
    def wrong(drawn, p, q, *rest):
        if broken == "all are accepted":
            return whole(drawn, p, p, *rest)
        return whole(drawn, p, q - 1e3 * (q == q.amax(-1, keepdim=True)), *rest)

    whole = speculation.accept
    monkeypatch.setattr(sampling, "accept", wrong)
    tokens, _ = exactly(network, FAMILIES["left"], 20_000, draft=4)
    assert goodness(tokens, law(network, FAMILIES["left"], Truncation()), p_value) < 1e-6


def in_rounds(network, device: str, order: list[int], rows: int, **how) -> tuple[Tensor, Drafts]:
    """As `exactly` after a first token, in rounds of an engine that computes in float32; most rows wait their turn."""
    there, way = copy.deepcopy(network).to(device), [L, *order]
    tokens = torch.ones(rows, L + 1, dtype=torch.long)
    plan = Plan(torch.tensor(way).repeat(rows, 1), torch.arange(1, L + 2).repeat(rows, 1))
    drafts = Drafts(tokens=tokens, plan=plan, keys=row_keys(2, torch.arange(rows)), at_once=rows // 5, **how)
    run(drafts, Slots(there, KVSlots(Engine(there, precision=torch.float32), L + 1)))
    return drafts.tokens, drafts


@pytest.mark.parametrize(
    ("device", "family"), [("cpu", "left"), *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in FAMILIES)]
)
@pytest.mark.parametrize("name", ["plain", "cool nucleus"])
def test_in_rounds_every_sequence_is_as_likely_too(network, p_value, rounds, device, family, name):
    rows = 50_000 if device == "cuda" else 10_000
    order, filter = FAMILIES[family], FILTERS[name]
    tokens, drafts = in_rounds(network, device, order, rows, filter=filter, draft=4)
    assert goodness(tokens, law(network, order, filter, {L: 1}), p_value) > 1e-4
    assert drafts.tally.decided == rows * L
    assert max(rounds) == rows // 5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_rounds_a_broken_rule_is_found_out(network, p_value, monkeypatch, device):
    """A check that does not look at the drafted tokens accepts them all."""
    seen, product = [], kernels.logits_of
    monkeypatch.setattr(kernels, "logits_of", lambda *given: seen.append(product(*given)) or seen[-1])

    def blind(self):
        self.state.known += self.kind.draft - 1
        return seen[-1].view(self.kind.rows, self.kind.draft, -1)[:, 1:].flatten(0, 1)

    monkeypatch.setattr(Rounds, "_behind", blind)
    tokens, _ = in_rounds(network, device, FAMILIES["left"], 10_000, draft=4)
    assert goodness(tokens, law(network, FAMILIES["left"], Truncation(), {L: 1}), p_value) < 1e-6


def test_guided_samples_too(p_value, tiny):
    """The weight differs from token to token of a draft."""
    network = tiny("ordered", scale=0.2, vocab=V, never=None, length=6, classes=2, grid=(1, 5))
    guidance = Guidance(weight=1.5, dropped=2)
    order = [0, 3, 1, 2]
    way = Plan(torch.tensor([order]), torch.arange(1, L + 1)[None])  # the first is a BOS

    @torch.no_grad()
    def expected() -> dict[tuple, float]:
        found, weights = {((0, 0),): 1.0}, guidance.weights(way)[0]
        for number, place in enumerate(order[1:]):
            grown = {}
            for before, p in found.items():
                positions, tokens = (torch.tensor([[pair[i] for pair in before]]) for i in (0, 1))
                both = [
                    network(dense(tokens, positions, torch.tensor([[place]]), labels=torch.tensor([label])))[0].double()
                    for label in (1, 2)
                ]
                chances = (both[0] + weights[number] * (both[0] - both[1])).softmax(-1).tolist()
                grown |= {(*before, (place, token)): p * chance for token, chance in enumerate(chances)}
            found = grown
        return {tuple(token for _, token in sorted(pairs)): p for pairs, p in found.items()}

    rows = 20_000
    tokens, labels = torch.zeros(rows, L, dtype=torch.long), torch.ones(rows, dtype=torch.long)
    many, keys = Plan(way.order.repeat(rows, 1), way.ends.repeat(rows, 1)), row_keys(0, torch.arange(rows))
    drafts = Drafts(tokens=tokens, plan=many, keys=keys, labels=labels, guidance=guidance, draft=3)
    run(drafts, Plain(network))
    assert goodness(drafts.tokens, expected(), p_value) > 1e-4


def test_the_first_of_a_draft_is_always_accepted_and_rounds_never_exceed_tokens(network):
    seen = []
    rows, length = 500, 6
    unknown, keys = torch.zeros(rows, length, dtype=torch.bool), row_keys(1, torch.arange(rows))
    way = Plan(strands(2)((~unknown).long(), torch.zeros(rows, length)), torch.arange(length + 1).repeat(rows, 1))
    drafts = Drafts(tokens=unknown.long(), plan=way, keys=keys, draft=3)
    run(drafts, Plain(network), seen.append)
    assert drafts.tally.accepted >= drafts.tally.rounds
    assert int(drafts.taken.max()) <= length
    assert int(drafts.taken.sum()) == drafts.tally.rounds
    assert torch.equal(drafts.came.amax(1) + 1, drafts.taken)
    decided = torch.zeros(rows, length, dtype=torch.long)
    for step in seen:
        decided[step.rows, step.positions] += 1
    assert (decided == 1).all()


def test_what_a_check_refuses_is_told_with_the_step(network):
    order = FAMILIES["shuffled"]
    way = Plan(torch.tensor(order).repeat(64, 1), torch.arange(L + 1).repeat(64, 1))
    drafts = Drafts(tokens=torch.zeros(64, L, dtype=torch.long), plan=way, keys=row_keys(1, torch.arange(64)), draft=L)
    steps: list[Step] = []
    run(drafts, Plain(network), steps.append)
    assert sum(len(step.refused[0]) for step in steps) == drafts.tally.drafted - drafts.tally.accepted > 0
    replaced = 0
    for step in steps:
        columns = (x.tolist() for x in (step.rows, step.positions, step.tokens))
        decided = {(row, position): token for row, position, token in zip(*columns, strict=True)}
        for row, position, token in zip(*(x.tolist() for x in step.refused), strict=True):
            if (row, position) in decided:
                replaced += 1
                assert decided[row, position] != token
            else:  # all after the first refusal is dropped
                assert drafts.came[row, position] > step.number
    assert replaced == drafts.tally.decided - drafts.tally.accepted > 0


def test_accepted_tokens_are_as_many_as_the_marginals_predict(network, p_value):
    """Of two tokens the second is accepted with probability sum of min(p, q), averaged over the first."""
    rows = 20_000
    _, drafts = exactly(network, [0, 1], rows, draft=2)
    with torch.no_grad():
        nothing = torch.zeros(1, 0, dtype=torch.long)
        first, second = network(dense(nothing, nothing, torch.tensor([[0, 1]]))).double().softmax(-1)
        given = [network(dense(torch.tensor([[t]]), torch.tensor([[0]]), torch.tensor([[1]])))[0] for t in range(V)]
    accepted = sum(first[t] * torch.minimum(second, given[t].double().softmax(-1)).sum() for t in range(V))
    observed = torch.tensor([drafts.tally.accepted - rows, 2 * rows - drafts.tally.accepted])
    assert p_value(observed, rows * torch.stack([accepted, 1 - accepted])) > 1e-4
    kl = sum(first[t] * (second * (second.log() - given[t].double().log_softmax(-1))).sum() for t in range(V))
    assert drafts.tally.nats / rows == pytest.approx(float(kl), abs=0.02)


# The doors


@pytest.fixture(scope="module")
def model(tiny) -> Model:
    codec = byte_codec()
    network = tiny("ordered", scale=0.15, vocab=codec.vocab, length=24, width=32)
    return Model(network, codec, mixture=Mixture.parse("random=1,strands=2,gaps=1"))


@pytest.mark.parametrize("how", [{}, {"order": "random"}, {"strands": 4}, {"order": "left", "draft": 5}])
def test_texts_say_how_many_rounds_they_took(model, how):
    texts = maskless.generate(model, n=3, seed=1, exact=True, **how)
    for text in texts:
        assert text.rounds == max(text.steps) + 1 <= 24
        assert sorted(text.order) == list(range(24))
    alone = maskless.generate(model, n=1, seed=1, exact=True, **how)[0]
    assert (alone.tokens, alone.steps) == (texts[0].tokens, texts[0].steps)


def test_given_tokens_stay_and_spaces_are_kept(model):
    text = maskless.fill(model, "a dog [3] and [4].", exact=True, seed=2)
    assert text.startswith("a dog ")
    assert [t for t, step in zip(text.tokens, text.steps, strict=True) if step < 0] == list(b"a dog  and .")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"draft": 4}, "draft 4 goes with exact=True"),
        ({"exact": True, "draft": 0}, "draft 0 is out of range: expected 1 or more"),
        ({"exact": True, "steps": 4}, "exact sampling sets steps and counts itself"),
        ({"exact": True, "revise": 1}, "revise does not go with exact sampling"),
        ({"exact": True, "order": "confidence"}, "order confidence does not go with exact sampling"),
    ],
)
def test_what_exact_sampling_excludes_is_named(model, how, says):
    with pytest.raises(ValueError, match=says):
        maskless.generate(model, **how)


@pytest.mark.parametrize("kind", ["position", "masked", "causal"])
def test_a_network_that_answers_no_chains_is_refused(tiny, kind):
    other = Model(tiny(kind, vocab=257, length=24, width=32), byte_codec())
    with pytest.raises(ValueError, match="exact sampling checks tokens as a chain: expected"):
        maskless.generate(other, exact=True)


def test_schedules_of_a_draft_are_those_of_its_tokens():
    """Guidance and warmth belong to a token's own step, not to that of its draft."""
    way = Plan(torch.arange(4)[None], torch.arange(5)[None])
    nothing, keys = torch.zeros(1, 4, dtype=torch.long), row_keys(0, torch.arange(1))
    how = {"labels": nothing[:, 0], "guidance": Guidance(weight=3.0, dropped=1), "draft": 3}
    drafts = Drafts(tokens=nothing, plan=way, keys=keys, **how)
    ask = drafts.ask(torch.tensor([0]))
    assert ask.weights.tolist() == pytest.approx([0.0, 1.0, 2.0])
    assert constant(ask.weights).tolist() == [1.0, 1.0, 1.0]
    assert list(itertools.chain(ask.numbers.tolist())) == [0, 1, 2]


def landed(step) -> tuple:
    return step.number, *sorted(zip(step.rows.tolist(), step.positions.tolist(), step.tokens.tolist(), strict=True))


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("register", [False, True])
@pytest.mark.parametrize("name", ["plain", "cool nucleus"])
@pytest.mark.parametrize(("watched", "unused"), [(False, 0), (True, 0), (False, 3)])
def test_what_was_kept_gives_the_answers_of_the_network(
    tiny, monkeypatch, rounds, guided, register, name, watched, unused
):
    """Drafts and checks that encode new tokens only, in slots or in rounds, are those of the plain network."""
    monkeypatch.setattr(backends, "RoundKind", lambda rows, **kind: RoundKind(rows=rows + unused, **kind))
    classes = {"classes": 2, "grid": (1, 8), "registers": register} if guided or register else {}
    network = tiny("ordered", scale=0.4, vocab=7, never=None, length=9, width=32, **classes)
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.zeros(5, 1, dtype=torch.long), 1 + torch.rand(5, 8, generator=generator).argsort(1)], 1)
    starts = torch.tensor([1, 1, 3, 5, 8])  # rows at their own pace; the last has one token left
    ends = (starts[:, None] + torch.arange(9)).clamp_max(9)

    def drafts() -> Drafts:
        return Drafts(
            tokens=torch.randint(7, (5, 9), generator=torch.Generator().manual_seed(1)),
            plan=Plan(order.clone(), ends.clone()),
            keys=row_keys(3, torch.arange(5)),
            labels=torch.tensor([0, 1, 0, 1, 0]) if classes else None,
            guidance=Guidance(weight=2.0, dropped=2, schedule=constant) if guided else None,
            filter=FILTERS[name],
            never=(3,),
            draft=4,
        )

    mine, plain = drafts(), drafts()
    backend = backend_of(network, draft=4, length=9)
    assert isinstance(backend, Slots)
    seen = ([], [])
    run(mine, backend, seen[0].append if watched else None)
    run(plain, Plain(network), seen[1].append)
    assert rounds[:1] == ([] if guided else [5 + unused])
    assert not watched or list(map(landed, seen[0])) == list(map(landed, seen[1]))
    assert torch.equal(mine.tokens, plain.tokens)
    assert torch.equal(mine.came, plain.came)
    assert mine.tally.accepted == plain.tally.accepted < mine.tally.drafted
    torch.testing.assert_close(mine.chance, plain.chance, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_texts_that_wait_take_the_places_of_those_that_are_done(tiny, rounds):
    """No text depends on it, and there are fewer rounds than batch by batch."""
    network = tiny("ordered", scale=0.3, vocab=258, never=None, length=24, width=32)
    model = Model(network, byte_codec(), mixture=Mixture.parse("left=50,random=50"))

    def texts(n: int, **how) -> list[str]:
        return maskless.generate(model, n, exact=True, draft=8, order="random", **how)

    together = texts(24)
    rounds.clear()
    assert texts(24, batch=4) == together
    assert max(rounds) == 4
    in_turn = len(rounds)
    rounds.clear()
    assert [one for first in range(0, 24, 4) for one in texts(4, first=first)] == together
    assert in_turn < len(rounds)
