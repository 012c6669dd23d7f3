"""Who gets a place: requests share them, whatever the number of their rows.

Half of what there is goes to whoever came first, so that under too much load some requests end in time and none waits
for ever. The other half is dealt out evenly, beginning with those that have had least: a request that has just come
gets a place at once, and a short one is done before its turn is over.
"""

from __future__ import annotations

from collections.abc import Sequence

TURN = 32  # calls after which a request that holds a place by turns lets others go before it


def shares(wanted: Sequence[int], calls: Sequence[int], places: int) -> list[int]:
    """How many rows of each request have a place; requests stand in the order in which they came.

    wanted: rows of each that are not done.  calls: how many calls of the network each has had a part in.
    """
    if sum(wanted) <= places:
        return list(wanted)
    given = [0] * len(wanted)
    turns = sorted(range(len(wanted)), key=lambda i: calls[i] // TURN)
    even = places // 2
    while even:
        for i in turns:
            if even and given[i] < wanted[i]:
                given[i] += 1
                even -= 1
    left = places - places // 2
    for i, more in enumerate(wanted):
        extra = min(more - given[i], left)
        given[i] += extra
        left -= extra
    return given
