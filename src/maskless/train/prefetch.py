"""Prefetching: a thread prepares the items of the next steps while a step is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
END: Any = object()


def prefetch(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """The same items, prepared by a thread a little ahead of their use; an error comes where its item would have."""
    source, thread = iter(items), ThreadPoolExecutor(1)
    try:
        ready = deque(thread.submit(next, source, END) for _ in range(depth))
        while (item := ready.popleft().result()) is not END:
            ready.append(thread.submit(next, source, END))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)
