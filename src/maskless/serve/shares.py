"""Who gets a slot: requests share them, whatever the number of their rows.

Half of what there is goes to whoever came first, so that under too much load some requests end in time and none waits
for ever. The other half is dealt out evenly, beginning with those that have had least: a request that has just come
gets a slot at once, and a short one is done before others go before it.
"""

from __future__ import annotations

from collections.abc import Sequence

QUANTUM = 32  # calls after which a request lets others go before it in the half that is dealt out evenly


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
