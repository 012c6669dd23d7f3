"""Who comes next: requests share the slots of a model, and models that are served side by side share the processor.

Of the slots half go to whoever came first, so that under too much load some requests end in time and none waits for
ever. The other half is dealt out evenly, beginning with those that have had least: a request that has just come gets a
slot at once, and a short one is done before others go before it.

Steps of two networks at once would fight for the same cores, and both would lose. So one computes at a time, and of
those that have work the one that has had least time comes next: a model whose steps cost half takes twice as many.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

QUANTUM = 32  # calls after which a request lets others go before it in the half that is dealt out evenly
PATIENCE = 0.5  # seconds after which a turn is taken although somebody else, who does not come, would be next


def shares(wanted: Sequence[int], calls: Sequence[int], slots: int) -> list[int]:
    """How many rows of each request have a slot; requests stand in the order in which they came.

    wanted: rows of each that are not done.  calls: how many calls of the network each has had a part in.
    """
    if sum(wanted) <= slots:
        return list(wanted)
    given = [0] * len(wanted)
    least_served = sorted(range(len(wanted)), key=lambda i: calls[i] // QUANTUM)
    even = slots // 2
    while even:
        for i in least_served:
            if even and given[i] < wanted[i]:
                given[i] += 1
                even -= 1
    left = slots - slots // 2
    for i, more in enumerate(wanted):
        extra = min(more - given[i], left)
        given[i] += extra
        left -= extra
    return given


class FairShare:
    """Who computes next; names are those of batchers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.used: dict[str, float] = {}  # seconds that each has had
        self.working: set[str] = set()  # those that have rows under way
        self.busy = False

    def join(self, name: str) -> None:
        """There is work now; who comes after a pause starts level with the others."""
        with self.changed:
            if name not in self.working:
                level = min((self.used[other] for other in self.working), default=0.0)
                self.used[name] = max(self.used.get(name, 0.0), level)
                self.working.add(name)

    def leave(self, name: str) -> None:
        """There is no more work."""
        with self.changed:
            self.working.discard(name)
            self.changed.notify_all()

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Compute a step, when it is time for it."""
        self.join(name)
        with self.changed:
            self.changed.wait_for(lambda: self._next(name), PATIENCE)
            self.changed.wait_for(lambda: not self.busy)
            self.busy = True
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self.changed:
                self.used[name] += time.perf_counter() - begin
                self.busy = False
                self.changed.notify_all()

    def _next(self, name: str) -> bool:
        return not self.busy and self.used[name] <= min(self.used[other] for other in self.working | {name})
