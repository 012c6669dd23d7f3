"""Slots are shared by requests, not by rows; nobody waits for ever and nobody takes them all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskless.serve.shares import QUANTUM, shares

REQUESTS = st.lists(st.tuples(st.integers(1, 16), st.integers(0, 200)), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("wanted", "calls", "given"),
    [
        ([16] * 4, [9] * 4, [16] * 4),  # all fit
        ([16] * 4 + [1], [9] * 4 + [0], [16, 16, 16, 15, 1]),  # a short one has a slot at once
        ([64, 64], [9, 9], [48, 16]),  # a half each way
        ([1] * 65, [QUANTUM] * 64 + [0], [1] * 63 + [0, 1]),  # and takes it from one that has had its quantum
        ([1] * 65, [QUANTUM - 1] * 64 + [0], [1] * 64 + [0]),  # but not before that
    ],
)
def test_slots_are_shared_by_requests(wanted, calls, given):
    assert shares(wanted, calls, 64) == given


@given(REQUESTS, st.integers(1, 64))
def test_no_slot_is_left_empty_and_none_is_given_twice(requests, slots):
    wanted, calls = zip(*requests, strict=True)
    given = shares(wanted, calls, slots)
    assert sum(given) == min(slots, sum(wanted))
    assert all(0 <= some <= most for some, most in zip(given, wanted, strict=True))


@given(REQUESTS, st.integers(2, 64))
def test_the_oldest_and_the_newest_always_have_a_slot(requests, slots):
    """The newest as far as not too many others are new."""
    wanted, calls = zip(*requests[: slots // 2], (1, 0), strict=True)
    if sum(some < QUANTUM for some in calls) <= slots // 2:
        given = shares(wanted, calls, slots)
        assert given[0]
        assert given[-1]
