"""Prefetching changes nothing but the time, and ends with its reader."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from maskless.train.prefetch import prefetch


def test_prefetching_changes_nothing():
    assert list(prefetch(iter(range(50)))) == list(range(50))


def test_an_error_comes_where_its_item_would_have_come():
    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("the sixth")

    found = prefetch(items())
    assert [next(found) for _ in range(5)] == list(range(5))
    with pytest.raises(ValueError, match="the sixth"):
        next(found)


def test_the_thread_ends_when_nobody_wants_more():
    before, made = set(threading.enumerate()), []
    items = prefetch((made.append(i) or i for i in itertools.count()), depth=2)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    [thread] = set(threading.enumerate()) - before
    items.close()
    assert not thread.is_alive()
    assert len(made) <= 3 + 2 + 1  # used, ready, and one on its way
    count = len(made)
    time.sleep(0.05)
    assert len(made) == count
