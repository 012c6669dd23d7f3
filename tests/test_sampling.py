"""Sampling: each step sees exactly what was decided before, and a row does not depend on the others."""

import pytest
import torch
from torch import Tensor

from maskless import logits as lg
from maskless.drafts import Step
from maskless.draw import DRAW, Truncation
from maskless.logits import row_keys
from maskless.order import COUNTS, ORDERS
from maskless.plans import Plan, plan, plan_causal
from maskless.problems import Problems
from maskless.sampling import sample
from sampling_runs import EACH, KINDS, WAYS, B, L, V, certain, run, state

SAMPLERS = [{}, {"confident": True}, {"confident": True, "noise": 5.0}]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize(("order", "counts"), WAYS)
@pytest.mark.parametrize("steps", range(1, L))
def test_every_wanted_position_is_decided_once_and_the_others_stay_out(order, counts, steps, sampler):
    tokens, known = state()
    known[:, 4] = False  # and not wanted
    wanted = ~known & (torch.arange(L) != 4)

    def watching(problems: Problems) -> Tensor:
        assert not (problems.positions == 4).any()
        assert not (problems.targets == 4).any()
        return certain(problems.targets)

    how = {"wanted": wanted, "steps": steps, "order": order, "counts": counts, **sampler}
    done, taken, _ = run(watching, tokens, known, **how)
    assert torch.equal(done, torch.where(wanted, torch.arange(L), tokens))
    seen = torch.zeros(B, L, dtype=torch.long)
    for step in taken:
        seen[step.rows, step.positions] += 1
        assert torch.equal(done[step.rows, step.positions], step.tokens)
    assert torch.equal(seen, wanted.long())
    numbers = [step.number for step in taken]
    assert numbers == sorted(set(numbers) & set(range(steps)))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("order", "counts"), EACH)
def test_a_row_is_the_same_alone_and_in_a_batch(tiny, kind, order, counts, sampler):
    """Also one that takes fewer steps than those beside it."""
    network, (tokens, _), keys = tiny(kind, scale=0.2), state(), row_keys(5, torch.arange(B))
    known = torch.rand(B, L, generator=torch.Generator().manual_seed(0)).argsort(1) < torch.arange(B)[:, None]
    how = {"order": order, "counts": counts, **sampler}
    together, _, planned = run(network, tokens, known, steps=5, keys=keys, **how)
    for row in range(B):
        one, own = slice(row, row + 1), min(5, int((~known[row]).sum()))
        alone, _, planned_alone = run(network, tokens[one], known[one], steps=own, keys=keys[one], **how)
        assert torch.equal(alone[0], together[row])
        assert planned_alone.decided()[0] == planned.decided()[row]
    backwards, *_ = run(network, tokens.flip(0), known.flip(0), steps=5, keys=keys.flip(0), **how)
    assert torch.equal(backwards.flip(0), together)


@pytest.mark.parametrize(("order", "counts"), WAYS)
@pytest.mark.parametrize("steps", range(1, L + 1))
def test_a_step_sees_the_tokens_decided_before_it_and_no_others(order, counts, steps):
    tokens, known = state()
    seen: list[Problems] = []

    def watching(problems: Problems) -> Tensor:
        seen.append(problems)
        return certain((7 * problems.targets + len(seen)) % V, V)

    _, run_steps, _ = run(watching, tokens, known, steps=steps, order=order, counts=counts)
    now, decided = tokens.clone(), known.clone()
    assert len(seen) == len(run_steps)
    for problems, step in zip(seen, run_steps, strict=True):
        rows = step.rows.unique()
        lengths = problems.offsets.lengths.tolist()
        contexts = zip(problems.positions.split(lengths), problems.tokens.split(lengths), strict=True)
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

    _, steps, _ = run(watching, tokens[2:3], known[2:3], steps=int((~known[2]).sum()))
    came = [int(step.positions) for step in steps]
    given = int(known[2].sum())
    for number, context in enumerate(seen):
        assert set(context[:given]) == set(known[2].nonzero()[:, 0].tolist())
        assert context[:given] == seen[0]
        assert context[given:] == came[:number]


def test_a_causal_plan_goes_from_the_end_of_each_prompt_to_the_end_of_its_row():
    """Whatever the other rows have: some of these begin later, some end earlier."""
    place, begins, ends = torch.arange(L), [0, 2, 1, 4], [6, 3, 4, 5]
    known = place < torch.tensor(begins)[:, None]
    wanted = ~known & (place < torch.tensor(ends)[:, None])
    tokens, planned = torch.full((B, L), -1), plan_causal(known, wanted)
    keys = row_keys(0, torch.arange(B))
    list(sample(lambda problems: certain(problems.targets), tokens, planned, keys, filter=Truncation()))
    assert torch.equal(tokens, torch.where(wanted, place, -1))
    assert torch.equal(planned.came(), torch.where(wanted, place, -1))  # the longer prompts wait
    assert planned.decided() == [list(range(a, b)) for a, b in zip(begins, ends, strict=True)]


def test_steps_that_decide_nothing_are_not_run():
    calls = []

    def counting(problems: Problems) -> Tensor:
        calls.append(len(problems))
        return certain(problems.targets, V)

    tokens, known = state()  # row 1 lacks one position only
    _, steps, _ = run(counting, tokens[1:2], known[1:2], steps=1)
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


def test_progress_goes_from_0_to_1_over_a_rows_own_steps():
    ends = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 5, 5, 5], [2, 2, 2, 3, 4, 4], [4, 5, 5, 5, 5, 5]])
    progress = Plan(torch.arange(5).repeat(4, 1), ends).progress()
    assert progress.tolist() == [[0, 0.25, 0.5, 0.75, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
