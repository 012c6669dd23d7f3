"""Guided samples are samples from the combined logits, and what has no weight is not computed."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from maskless.draw import SCHEDULES, Guidance, Truncation, constant, interval, ramp
from maskless.how import SCHEDULES as NAMES
from maskless.logits import row_keys
from maskless.order import COUNTS, ORDERS
from maskless.plans import plan
from maskless.problems import Problems
from maskless.sampling import sample

B, L, V, DROPPED = 5, 6, 4, 9
SAMPLERS = [sample, partial(sample, confident=True)]
LABELS = torch.tensor([0, 1, 2, 1, 0])


def labelled(problems: Problems) -> Tensor:
    """Logits that depend on the label, the position and the context, the same in any batch."""
    assert problems.labels is not None
    seen = torch.zeros(len(problems), dtype=torch.long).index_add(0, problems.offsets.owner, 1 + problems.tokens)
    owner = problems.target_offsets.owner
    key = 5 * problems.labels[owner] + 3 * problems.targets + 2 * seen[owner]
    return 2 * torch.sin(1.7 * key[:, None] + (1 + key[:, None] % 5) * torch.arange(V))


def combined(problems: Problems, weight: float) -> Tensor:
    """(1 + w) * conditional - w * unconditional, by two calls."""
    dropped = replace(problems, labels=torch.full_like(problems.labels, DROPPED))
    return (1 + weight) * labelled(problems) - weight * labelled(dropped)


def run(sampler, network, *, known=None, rows=slice(None), steps=3, counts="uniform", guidance=None, **how) -> Tensor:
    """What a sampler makes of some rows of a batch that knows nothing, or the given positions."""
    known = (torch.zeros(B, L, dtype=torch.bool) if known is None else known)[rows]
    tokens, keys = torch.zeros_like(known).long(), row_keys(2, torch.arange(B)[rows])
    planned = plan(known, ~known, keys, steps=steps, order=ORDERS["random"], counts=COUNTS[counts])
    labels = LABELS[rows]
    list(sampler(network, tokens, planned, keys, filter=Truncation(), labels=labels, guidance=guidance, **how))
    return tokens


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_constant_guidance_samples_from_the_combined_logits(sampler, weight):
    guidance = Guidance(weight=weight, dropped=DROPPED, schedule=constant)
    expected = run(sampler, lambda problems: combined(problems, weight))
    assert torch.equal(run(sampler, labelled, guidance=guidance), expected)
    assert not torch.equal(run(sampler, labelled), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_ramp_grows_from_nothing_to_the_whole_weight_and_a_single_step_has_it_all(sampler, steps):
    weights = iter([3.0 * s / (steps - 1) for s in range(steps)] if steps > 1 else [3.0])
    expected = run(sampler, lambda problems: combined(problems, next(weights)), steps=steps)
    assert next(weights, None) is None
    assert torch.equal(run(sampler, labelled, steps=steps, guidance=Guidance(weight=3.0, dropped=DROPPED)), expected)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1, 1]),
        ("ramp", [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]),
        ("cosine", [0, (2 - math.sqrt(3)) / 4, 1 / 4, 1 / 2, 3 / 4, (2 + math.sqrt(3)) / 4, 1]),
        ("interval", [0, 0, 1, 1, 1, 1, 1]),
    ],
)
def test_schedules_give_these_shares_of_the_weight_in_seven_steps(schedule, expected):
    assert set(SCHEDULES) == set(NAMES)
    progress = torch.arange(7).double() / 6
    torch.testing.assert_close(SCHEDULES[schedule](progress), torch.tensor(expected).double())
    assert SCHEDULES[schedule](torch.ones(1)).item() == 1  # a row with a single step has it all


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_weight_of_zero_is_no_guidance(sampler, schedule):
    guidance = Guidance(weight=0, dropped=DROPPED, schedule=SCHEDULES[schedule])
    assert torch.equal(run(sampler, labelled, guidance=guidance), run(sampler, labelled))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    ("weight", "schedule", "expected"),
    [
        (0.0, constant, [B, B, B]),
        (2.0, constant, [2 * B, 2 * B, 2 * B]),
        (2.0, ramp, [B, 2 * B, 2 * B]),
        (2.0, interval, [B, 2 * B, 2 * B]),
    ],
)
def test_the_unconditional_half_is_computed_only_where_it_has_a_weight(sampler, weight, schedule, expected):
    calls: list[int] = []

    def counting(problems: Problems) -> Tensor:
        calls.append(len(problems))
        return labelled(problems)

    run(sampler, counting, guidance=Guidance(weight=weight, dropped=DROPPED, schedule=schedule))
    assert calls == expected


def test_the_two_halves_differ_in_their_labels_only():
    seen: list[Problems] = []

    def watching(problems: Problems) -> Tensor:
        seen.append(problems)
        return labelled(problems)

    known = torch.arange(L) < torch.tensor([[0], [5], [2], [3], [0]])  # ragged: contexts and targets of many lengths
    run(sample, watching, known=known, steps=3, guidance=Guidance(weight=1.0, dropped=DROPPED, schedule=constant))
    for problems in seen:
        half = len(problems) // 2
        assert problems.labels[half:].tolist() == [DROPPED] * half
        assert (problems.labels[:half] != DROPPED).all()
        for offsets, packed in (
            (problems.offsets, (problems.tokens, problems.positions)),
            (problems.target_offsets, (problems.targets,)),
        ):
            assert offsets.total == len(packed[0]) == int(offsets.bounds[-1])
            assert offsets.longest == int(offsets.lengths.max())
            assert offsets.bounds.dtype == torch.int32
            for values in packed:
                parts = values.split(offsets.lengths.tolist())
                assert [x.tolist() for x in parts[:half]] == [x.tolist() for x in parts[half:]]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_guided_row_is_the_same_alone_and_in_a_batch(sampler, counts):
    """The ramp follows a row's own steps: rows with few unknown positions take fewer."""
    known = torch.arange(L) < torch.tensor([[0], [5], [2], [3], [4]])
    guidance = Guidance(weight=4.0, dropped=DROPPED)
    together = run(sampler, labelled, known=known, steps=5, counts=counts, guidance=guidance)
    for row in range(B):
        steps = min(5, int((~known[row]).sum()))
        one = slice(row, row + 1)
        alone = run(sampler, labelled, known=known, rows=one, steps=steps, counts=counts, guidance=guidance)
        assert torch.equal(alone[0], together[row])


def test_labels_reach_the_network_without_guidance_too():
    seen: list[list[int]] = []

    def watching(problems: Problems) -> Tensor:
        seen.append(problems.labels.tolist())
        return labelled(problems)

    run(sample, watching, known=torch.arange(L) < torch.tensor([[0], [5], [2], [3], [0]]), steps=3)
    assert seen == [LABELS.tolist(), [0, 2, 1, 0], [0, 2, 1, 0]]  # row 1 has one position to decide


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_guidance_without_labels_and_labels_of_another_number_are_refused(sampler):
    known, keys = torch.zeros(2, L, dtype=torch.bool), row_keys(0, torch.arange(2))
    planned = plan(known, ~known, keys, steps=1, order=ORDERS["random"], counts=COUNTS["uniform"])

    def go(**how) -> None:
        list(sampler(labelled, torch.zeros(2, L, dtype=torch.long), planned, keys, filter=Truncation(), **how))

    with pytest.raises(ValueError, match=r"^guidance 2.0 needs labels, one for each row$"):
        go(guidance=Guidance(weight=2.0, dropped=DROPPED))
    with pytest.raises(ValueError, match=r"^labels \(3,\): expected one for each of 2 rows$"):
        go(labels=torch.zeros(3, dtype=torch.long))
