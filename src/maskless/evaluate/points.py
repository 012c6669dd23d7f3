"""What sweeps share: points that a file keeps and nobody computes again, and how fast batches are made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Generic, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from maskless.files import write_json

P = TypeVar("P")
B = TypeVar("B", bound=Sized)
Same = Callable[[str, Any, Any], bool]  # the name of a condition, what a file says, what is wanted


class Watch(Generic[B]):
    """Batches that are passed on, and how fast they were made: on the clock only while one is waited for."""

    def __init__(self, batches: Iterable[B], size: Callable[[B], int] = len):
        self.batches, self.size, self.made = batches, size, list[tuple[int, float]]()

    def __iter__(self) -> Iterator[B]:
        begin = time.perf_counter()
        for batch in self.batches:
            self.made.append((self.size(batch), time.perf_counter() - begin))
            yield batch
            begin = time.perf_counter()

    def speed(self) -> float:
        """A second, of all processes together; of each without its first batch, which warms up, if there are more."""
        counted = self.made[1:] or self.made
        mine = sum(n for n, _ in counted) / max(1e-9, sum(seconds for _, seconds in counted))
        return float(sum(gather_object([mine])))


def kept(
    path: Path | None,
    what: str,
    conditions: Mapping[str, Any],
    read: Callable[[dict[str, Any]], P],
    same: Same = lambda _, before, now: bool(before == now),
) -> list[P]:
    """The points of a file, as the main process reads them for all; read: makes one of what the file has of it.

    what: the kind of file that is expected. conditions: all that the figures depend on; a file made under others is a
    ValueError that names the first that differs, in `settings` too.
    """
    points, problem = list[P](), ""
    if path is not None and PartialState().is_main_process and path.exists():
        try:
            found = json.loads(path.read_text())
            points, stated, wanted = [*map(read, found["points"])], _flat(found["conditions"]), _flat(conditions)
            apart = [name for name in wanted | stated if not same(name, stated.get(name), wanted.get(name))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{path} is not {what}: {error!r}"
        else:
            for name in apart[:1]:
                before, now = stated.get(name), wanted.get(name)
                problem = f"{path} was made with {name} {before}, not {now}: name another file"
    points, problem = broadcast_object_list([points, problem])
    if problem:
        raise ValueError(problem)
    return points


def _flat(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back, settings beside the others."""
    plain = json.loads(json.dumps(dict(conditions)))
    settings = plain.pop("settings", {})
    return plain | settings


def keep(path: Path | None, conditions: Mapping[str, Any], points: Iterable[dict[str, Any]]) -> None:
    """Write the points of a sweep, once for all processes, if there is a file for them."""
    if path is not None and PartialState().is_main_process:
        write_json(path, {"conditions": conditions, "points": list(points)})
