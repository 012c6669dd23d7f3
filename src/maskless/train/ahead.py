"""Reading ahead: a thread prepares the items of the next steps while a step is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """The same items, prepared by a thread a little ahead of their use."""
    ready: queue.Queue[T | Exception | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | Exception | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                pass
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(None)
        except Exception as error:  # raised again where the items are used
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
