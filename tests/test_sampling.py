"""Sampling: each step sees exactly what was decided before, and samples have the model's law."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from maskless import logits as lg
from maskless.logits import row_keys
from maskless.order import COUNTS, ORDERS, after_lead, halton
from maskless.problems import Problems, dense
from maskless.sampling import DRAW, Never, Plan, Step, Truncation, plan, plan_causal, sample, warmed

KINDS = ["position", "mean", "logsumexp", "ordered", "masked"]
WAYS = [(order, counts) for order in ORDERS for counts in COUNTS]
B, L, V = 4, 6, 10


def state(rows: int = B, length: int = L, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Random tokens and a random mask of known ones; row 0 knows nothing, row 1 all but one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (rows, length), generator=generator)
    known = torch.rand(rows, length, generator=generator) < 0.4
    known[0] = False
    if rows > 1:
        known[1] = torch.arange(length) != 2
    return tokens, known


def run(
    network, tokens, known, *, wanted=None, steps=1, order="random", counts="uniform", seed=0, keys=None, filter=None
):
    """What `sample` made of a copy of the tokens, and its steps."""
    tokens = tokens.clone()
    keys = row_keys(seed, torch.arange(len(tokens))) if keys is None else keys
    wanted = ~known if wanted is None else wanted
    planned = plan(known, wanted, keys, steps=steps, order=ORDERS[order], counts=COUNTS[counts])
    return tokens, list(sample(network, tokens, planned, keys, filter=filter or Truncation()))


def certain(answers: Tensor, vocab: int) -> Tensor:
    """Logits that leave no doubt."""
    return torch.full((len(answers), vocab), -torch.inf).scatter(1, answers[:, None], 0.0)


def says_its_position(problems: Problems) -> Tensor:
    return certain(problems.targets, L)


def says_how_much_it_saw(problems: Problems) -> Tensor:
    return certain(problems.offsets.lengths[problems.target_offsets.owner], L)


@pytest.mark.parametrize(("order", "counts"), WAYS)
@pytest.mark.parametrize("steps", range(1, L + 1))
def test_every_wanted_position_is_decided_and_nothing_else(order, counts, steps):
    tokens, known = state()
    done, _ = run(says_its_position, tokens, known, steps=steps, order=order, counts=counts)
    assert torch.equal(done, torch.where(known, tokens, torch.arange(L)))


@pytest.mark.parametrize(("order", "counts"), WAYS)
@pytest.mark.parametrize("steps", range(1, L + 1))
def test_a_step_sees_the_tokens_decided_before_it_and_no_others(order, counts, steps):
    tokens, known = state()
    seen: list[Problems] = []

    def watching(problems: Problems) -> Tensor:
        seen.append(problems)
        return certain((7 * problems.targets + len(seen)) % V, V)

    _, run_steps = run(watching, tokens, known, steps=steps, order=order, counts=counts)
    now, decided = tokens.clone(), known.clone()
    assert len(seen) == len(run_steps)
    for problems, step in zip(seen, run_steps, strict=True):
        rows = step.rows.unique()
        contexts = zip(
            problems.positions.split(problems.offsets.lengths.tolist()),
            problems.tokens.split(problems.offsets.lengths.tolist()),
            strict=True,
        )
        for row, (positions, values) in zip(rows, contexts, strict=True):
            assert sorted(positions.tolist()) == decided[row].nonzero()[:, 0].tolist()
            assert torch.equal(values, now[row, positions])
        now[step.rows, step.positions] = step.tokens
        decided[step.rows, step.positions] = True
    assert decided.all()


def test_the_context_stands_in_the_order_in_which_it_became_known():
    tokens, known = state()
    seen: list[list[int]] = []

    def watching(problems: Problems) -> Tensor:
        seen.append(problems.positions[problems.offsets.owner == 0].tolist())
        return certain(problems.targets, V)

    _, steps = run(watching, tokens[2:3], known[2:3], steps=int((~known[2]).sum()))
    came = [int(step.positions) for step in steps]
    given = int(known[2].sum())
    for number, context in enumerate(seen):
        assert set(context[:given]) == set(known[2].nonzero()[:, 0].tolist())
        assert context[:given] == seen[0]
        assert context[given:] == came[:number]


@pytest.mark.parametrize("steps", range(1, L + 1))
def test_uniform_steps_grow_the_context_evenly(steps):
    nothing = torch.zeros(2, L, dtype=torch.bool)
    done, _ = run(says_how_much_it_saw, torch.zeros(2, L, dtype=torch.long), nothing, steps=steps)
    sizes = [L * (k + 1) // steps - L * k // steps for k in range(steps)]
    expected = [sum(sizes[:k]) for k in range(steps) for _ in range(sizes[k])]
    for row in done:
        assert sorted(row.tolist()) == expected


def test_raster_decides_from_left_to_right():
    tokens, known = state()
    _, steps = run(says_its_position, tokens, known, steps=L, order="raster")
    for row in range(B):
        came = [int(p) for step in steps for r, p in zip(step.rows, step.positions, strict=True) if r == row]
        assert came == (~known[row]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("order", "counts"), WAYS)
def test_positions_that_are_neither_known_nor_wanted_stay_out(order, counts):
    tokens, known = state()
    known[:, 4] = False
    wanted = ~known & (torch.arange(L) != 4)

    def watching(problems: Problems) -> Tensor:
        assert not (problems.positions == 4).any()
        assert not (problems.targets == 4).any()
        return certain(problems.targets, V)

    done, _ = run(watching, tokens, known, wanted=wanted, steps=3, order=order, counts=counts)
    assert torch.equal(done[:, 4], tokens[:, 4])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("order", "counts"), WAYS)
def test_a_row_is_the_same_alone_and_in_a_batch(tiny, kind, order, counts):
    network, (tokens, _) = tiny(kind, scale=0.2), state()
    known = torch.rand(B, L, generator=torch.Generator().manual_seed(0)).argsort(1) < torch.arange(B)[:, None]
    keys = row_keys(5, torch.arange(B))
    how = {"order": order, "counts": counts}
    together, _ = run(network, tokens, known, steps=3, keys=keys, **how)
    for row in range(B):
        one = slice(row, row + 1)
        alone, _ = run(network, tokens[one], known[one], steps=3, keys=keys[one], **how)
        assert torch.equal(alone[0], together[row])
    backwards, _ = run(network, tokens.flip(0), known.flip(0), steps=3, keys=keys.flip(0), **how)
    assert torch.equal(backwards.flip(0), together)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("order", "counts"), WAYS)
def test_equal_seeds_give_equal_samples_and_different_seeds_different_ones(tiny, kind, order, counts):
    network, tokens = tiny(kind), torch.zeros(8, L, dtype=torch.long)
    unknown = torch.zeros(8, L, dtype=torch.bool)
    first, again, other = (
        run(network, tokens, unknown, steps=4, order=order, counts=counts, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert (first != other).any(1).all()
    assert len(first.unique(dim=0)) == 8


def test_what_stands_at_unknown_positions_does_not_matter(tiny):
    tokens, known = state()
    one, _ = run(tiny("position"), tokens, known, steps=3)
    other, _ = run(tiny("position"), torch.where(known, tokens, -1), known, steps=3)
    assert torch.equal(one, other)


def test_the_steps_together_hold_every_decided_token_once(tiny):
    tokens, known = state()
    done, steps = run(tiny("position"), tokens, known, steps=4, counts="mdlm")
    seen = torch.zeros(B, L, dtype=torch.long)
    for step in steps:
        seen[step.rows, step.positions] += 1
        assert torch.equal(done[step.rows, step.positions], step.tokens)
    assert torch.equal(seen, (~known).long())
    numbers = [step.number for step in steps]
    assert numbers == sorted(set(numbers))
    assert set(numbers) <= set(range(4))


def test_steps_that_decide_nothing_are_not_run():
    calls = []

    def counting(problems: Problems) -> Tensor:
        calls.append(len(problems))
        return certain(problems.targets, V)

    tokens, known = state()  # row 1 lacks one position only
    _, steps = run(counting, tokens[1:2], known[1:2], steps=1)
    assert calls == [1]
    calls.clear()
    run(counting, tokens[:2], known[:2], steps=L)
    assert sum(calls) == L + 1  # row 0 is in every step, row 1 in one
    assert all(isinstance(step, Step) for step in steps)


@pytest.mark.parametrize("steps", [0, -1, L + 1])
def test_a_number_of_steps_out_of_range_is_refused_with_the_range(tiny, steps):
    tokens, known = state()
    with pytest.raises(ValueError, match=rf"^steps {steps} is out of range: expected 1 to {L}\b"):
        run(tiny("position"), tokens, known, steps=steps)


def test_the_order_and_the_counts_use_random_numbers_of_their_own():
    known = torch.zeros(B, L, dtype=torch.bool)
    keys, seen = row_keys(0, torch.arange(B)), []

    def order(stage: Tensor, u: Tensor) -> Tensor:
        seen.append(u)
        return ORDERS["random"](stage, u)

    def counts(unknown: Tensor, steps: int, u: Tensor) -> Tensor:
        seen.append(u)
        return COUNTS["mdlm"](unknown, steps, u)

    plan(known, ~known, keys, steps=3, order=order, counts=counts)
    draws = lg.uniforms(keys[:, None], torch.arange(L), DRAW)
    assert len(torch.cat([*seen, draws]).unique()) == 3 * B * L


def test_filters_see_the_row_and_the_position_of_every_logit():
    def only(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return certain((10 * rows + positions) % 7, 7)

    done, _ = run(
        lambda problems: torch.zeros(len(problems.targets), 7),
        torch.zeros(B, L, dtype=torch.long),
        torch.zeros(B, L, dtype=torch.bool),
        steps=2,
        filter=only,
    )
    assert torch.equal(done, (10 * torch.arange(B)[:, None] + torch.arange(L)) % 7)


def allowed(logits: Tensor, **truncation) -> list[set[int]]:
    rows = torch.zeros(len(logits), dtype=torch.long)
    return [set(x.isfinite().nonzero()[:, 0].tolist()) for x in Truncation(**truncation)(logits, rows, rows)]


def test_truncation_is_temperature_then_top_k_then_nucleus():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert allowed(logits) == [{0, 1, 2, 3}]
    assert allowed(logits, top_k=3) == [{0, 1, 2}]
    assert allowed(logits, top_p=0.65) == [{0, 1}]
    assert allowed(logits, top_p=0.75, top_k=3) == [{0, 1}]  # 4/9 + 3/9 of the three that are left
    assert allowed(logits, top_p=0.65, temperature=4.0) == [{0, 1, 2}]
    assert allowed(logits, top_p=0.65, temperature=0.5) == [{0, 1}]
    assert allowed(logits, top_p=0.5, temperature=0.5) == [{0}]
    assert allowed(logits, temperature=0) == [{0}]


def test_the_default_truncation_leaves_the_distribution_as_it_is():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(5, dtype=torch.long)
    assert torch.equal(Truncation()(logits, rows, rows), logits)
    assert torch.equal(Truncation(top_p=1.0, top_k=9)(logits, rows, rows), logits)


def test_a_greedy_sample_takes_the_most_likely_token(tiny):
    network, (tokens, known) = tiny("position", scale=0.3), state()
    done, steps = run(network, tokens, known, steps=1, filter=Truncation(temperature=0))
    for row in range(B):
        context, targets = known[row].nonzero().T, (~known[row]).nonzero().T
        with torch.no_grad():
            best = network(dense(tokens[row, context], context, targets)).argmax(-1)
        assert torch.equal(done[row, targets[0]], best)
    assert len(steps) == 1


@pytest.mark.parametrize("temperature", [1e-20, 1e-40])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = torch.tensor([[-torch.inf, 3.0, 30.0, 29.0]])
    filtered = Truncation(temperature=temperature)(logits, torch.zeros(1), torch.zeros(1))
    assert lg.draw(filtered, torch.tensor([0.999]).double()).tolist() == [2]


def test_ids_that_are_never_drawn_are_not_drawn(tiny):
    network, unknown = tiny("position", scale=0.2), torch.zeros(50, L, dtype=torch.bool)
    done, _ = run(network, unknown.long(), unknown, steps=3)
    assert len(done.unique()) == V + 1
    done, _ = run(network, unknown.long(), unknown, steps=3, filter=Never((0, 4, V)))
    assert set(done.unique().tolist()) == set(range(V)) - {0, 4}


def test_warm_up_halves_the_sharpness_in_the_first_steps_of_each_row():
    came = torch.tensor([[0, 1, 2, -1], [3, 2, -1, 4]])  # row 1 starts later: others had shorter prompts
    rows, positions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 1, 0, 3])
    logits = torch.full((6, 3), 8.0)
    for steps, expected in ((0, [8] * 6), (1, [4, 8, 8, 4, 8, 8]), (2, [4, 4, 8, 4, 4, 8])):
        assert warmed(came, steps)(logits, rows, positions)[:, 0].tolist() == expected
    with pytest.raises(ValueError, match="warmup -1 is out of range"):
        warmed(came, -1)


def test_a_warm_first_step_samples_at_twice_the_temperature(p_value):
    rows, logits = 20_000, torch.tensor([2.0, 0.0, -1.0])
    unknown, keys = torch.zeros(rows, 2, dtype=torch.bool), row_keys(0, torch.arange(rows))
    planned = plan(unknown, ~unknown, keys, steps=2, order=ORDERS["raster"], counts=COUNTS["uniform"])
    done, filter = unknown.long(), warmed(planned.came(), 1)
    list(sample(lambda p: logits.expand(len(p.targets), 3), done, planned, keys, filter=filter))
    for position, sharpness in ((0, 0.5), (1, 1.0)):
        law = (sharpness * logits).double().softmax(-1)
        assert p_value(done[:, position].bincount(minlength=3), rows * law) > 1e-4


def test_progress_goes_from_0_to_1_over_a_rows_own_steps():
    ends = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 5, 5, 5], [2, 2, 2, 3, 4, 4], [4, 5, 5, 5, 5, 5]])
    progress = Plan(torch.arange(5).repeat(4, 1), ends).progress()
    assert progress.tolist() == [[0, 0.25, 0.5, 0.75, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]


def test_a_picture_is_decided_cell_by_cell_after_its_bos():
    """3 x 4 cells after a BOS, of which some are known: the others come as the Halton sequence visits them."""
    order = after_lead(halton((3, 4)), 1)
    cells = halton((3, 4))(torch.ones(1, 12, dtype=torch.long), torch.zeros(1, 12))[0].tolist()
    known = torch.zeros(2, 13, dtype=torch.bool)
    known[:, 0] = known[1, [3, 8, 9]] = True
    keys, tokens = row_keys(0, torch.arange(2)), torch.full((2, 13), -1)
    planned = plan(known, ~known, keys, steps=4, order=order, counts=COUNTS["arccos"])
    list(sample(lambda p: certain(p.targets, 13), tokens, planned, keys, filter=Truncation()))
    assert torch.equal(tokens, torch.where(known, -1, torch.arange(13)))
    assert planned.decided() == [[1 + c for c in cells], [1 + c for c in cells if 1 + c not in (3, 8, 9)]]
    assert planned.order[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1 is out of range"),
        ({"temperature": math.nan}, "temperature nan is out of range"),
        ({"temperature": math.inf}, "temperature inf is out of range"),
        ({"top_k": 0}, "top_k 0 is out of range"),
        ({"top_p": 0.0}, "top_p 0.0 is out of range"),
        ({"top_p": 1.1}, "top_p 1.1 is out of range"),
    ],
)
def test_truncations_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Truncation(**wrong)


def test_negative_ids_are_refused():
    with pytest.raises(ValueError, match="expected 0 or more"):
        Never((3, -1))


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
    done, _ = run(network, tokens, unknown, steps=steps, counts=counts)
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


def test_causal_rows_may_end_early(tiny):
    network, keys = tiny("causal", scale=0.2, length=L), row_keys(1, torch.arange(2))
    known = torch.zeros(2, L, dtype=torch.bool)
    wanted = torch.arange(L) < torch.tensor([[3], [L]])
    done, whole = torch.zeros(2, L, dtype=torch.long), torch.zeros(2, L, dtype=torch.long)
    list(sample(network, done, plan_causal(known, wanted), keys, filter=Truncation()))
    list(sample(network, whole, plan_causal(known, ~known), keys, filter=Truncation()))
    assert torch.equal(done, torch.where(wanted, whole, 0))


def test_a_causal_network_refuses_a_gap_with_text_behind_it():
    known = torch.tensor([[True, False, True, False, False, False]])
    with pytest.raises(ValueError, match="cannot fill a gap that has text after it"):
        plan_causal(known, ~known)
