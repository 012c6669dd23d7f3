"""Figures for Prometheus, as text: requests and their times, steps, tokens, rows under way.

Written by hand: a dozen numbers do not need a library.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from maskless.serve.host import Host

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts of requests and how long they took; may be used from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: Counter[tuple[str, int]] = Counter()
        self.buckets: dict[str, list[int]] = {}
        self.seconds: Counter[str] = Counter()

    def seen(self, path: str, status: int, seconds: float) -> None:
        """A request for a path has ended."""
        with self.lock:
            self.requests[path, status] += 1
            self.seconds[path] += seconds  # type: ignore[assignment]
            counts = self.buckets.setdefault(path, [0] * (len(BOUNDS) + 1))
            counts[sum(seconds > bound for bound in BOUNDS)] += 1

    def text(self, hosts: Iterable[Host]) -> str:
        """All figures in Prometheus' text format."""
        with self.lock:
            lines = [*self._requests(), *self._times()]
        return "\n".join([*lines, *_hosts(list(hosts)), ""])

    def _requests(self) -> list[str]:
        lines = _head("requests_total", "counter", "Requests by path and status.")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'maskless_requests_total{{path="{path}",status="{status}"}} {count}')
        return lines

    def _times(self) -> list[str]:
        lines = _head("request_seconds", "histogram", "Time from a request's arrival to the end of its answer.")
        for path, counts in sorted(self.buckets.items()):
            total = 0
            for bound, count in zip([*BOUNDS, "+Inf"], counts, strict=True):
                total += count
                lines.append(f'maskless_request_seconds_bucket{{path="{path}",le="{bound}"}} {total}')
            lines.append(f'maskless_request_seconds_sum{{path="{path}"}} {self.seconds[path]:.6f}')
            lines.append(f'maskless_request_seconds_count{{path="{path}"}} {total}')
        return lines


def merged(texts: Mapping[int, str]) -> str:
    """Figures of several workers as one text, in which each has the label `worker`; a figure's lines stand together."""
    found: dict[str, list[str]] = {}  # heads, and the lines below them
    for worker, text in sorted(texts.items()):
        for line in text.splitlines():
            if line.startswith("#"):
                lines = found.setdefault(line, [])
            else:
                lines.append(line.replace("{", f'{{worker="{worker}",', 1))
    return "\n".join([line for head, lines in found.items() for line in (head, *lines)] + [""])


def _hosts(hosts: list[Host]) -> list[str]:
    figures = (
        ("tokens_total", "counter", "Tokens sampled.", lambda b: b.counts.tokens),
        ("steps_total", "counter", "Calls of the network.", lambda b: b.counts.steps),
        ("batched_rows_total", "counter", "Rows in all calls of the network.", lambda b: b.counts.rows),
        ("step_seconds_total", "counter", "Time spent in steps.", lambda b: round(b.counts.seconds, 6)),
        ("active_rows", "gauge", "Rows under way.", lambda b: b.active),
        ("waiting_requests", "gauge", "Requests that wait for a slot.", lambda b: len(b.pending)),
        ("cancelled_total", "counter", "Requests whose client left.", lambda b: b.counts.cancelled),
        ("refused_total", "counter", "Requests refused because the queue was full.", lambda b: b.counts.refused),
        ("late_total", "counter", "Requests not done within the time limit.", lambda b: b.counts.late),
        ("failed_steps_total", "counter", "Steps that raised an error.", lambda b: b.counts.failed),
    )
    lines = []
    for name, kind, text, value in figures:
        lines += _head(name, kind, text)
        lines += [f'maskless_{name}{{model="{_escaped(host.name)}"}} {value(host.batcher)}' for host in hosts]
    return lines


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP maskless_{name} {text}", f"# TYPE maskless_{name} {kind}"]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
