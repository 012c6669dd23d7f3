"""Many clients at a running server: how long answers take, how many tokens a second, and what is refused.

    maskless serve stories --port 8000 &
    python tools/load.py http://127.0.0.1:8000 --clients 64 --seconds 60

Each client asks, waits for the answer, and asks again with another seed. A client that is refused (429 or 503) waits a
little, as it is told to. One that finds no server, or loses it, does so too: the server may be killed and started again
meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LOST = {  # what became of a request that got no whole answer
    ConnectionRefusedError: "refused",
    ConnectionError: "reset",
    http.client.HTTPException: "cut off",
    TimeoutError: "timeout",
}
TEXT = "Once upon a time, there was a dog named Max. Max loved to [8]. One day, Max saw a [4] and [10]. [16]"


@dataclass
class Seen:
    """What all clients saw: seconds, end and tokens of each good answer, and how often each outcome came."""

    seconds: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, status: str, begin: float, tokens: int = 0) -> None:
        with self.lock:
            self.statuses[status] += 1
            if status == "200":
                self.ends.append(time.monotonic())
                self.seconds.append(self.ends[-1] - begin)
                self.tokens += tokens


def ask(url: str, body: dict[str, Any], timeout: float) -> tuple[str, dict[str, Any]]:
    """The status and the answer of one request; where no whole answer came, the status says how it was lost."""
    request = urllib.request.Request(f"{url}/v1/fill", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.status), json.load(answer)
    except urllib.error.HTTPError as error:
        return str(error.code), {}
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # urllib wraps what fails before the answer
        return next((name for kind, name in LOST.items() if isinstance(reason, kind)), "no answer"), {}


def client(number: int, url: str, text: str, steps: int, until: float, seen: Seen) -> None:
    """One client: asks until the time is over."""
    seed = number * 1_000_000
    while time.monotonic() < until:
        begin = time.monotonic()
        status, answer = ask(url, {"text": text, "steps": steps, "seed": seed, "top_p": 0.9}, timeout=120)
        decided = sum(step >= 0 for text in answer.get("texts", ()) for step in text["steps"])
        seen.add(status, begin, decided)
        seed += 1
        if status != "200":
            time.sleep(0.2)


def load(url: str, *, text: str, clients: int, seconds: float, steps: int) -> dict[str, Any]:
    """The figures of a load: latencies of good answers in seconds, tokens that were decided each second, statuses.

    `quiet` is the longest time in which no good answer came.
    """
    seen, begin = Seen(), time.monotonic()
    shared = url, text, steps, begin + seconds, seen
    threads = [threading.Thread(target=client, args=(i, *shared), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.monotonic()
    took = end - begin
    parts = statistics.quantiles(seen.seconds, n=20) if len(seen.seconds) > 1 else [float("nan")] * 19
    return {
        "clients": clients,
        "seconds": round(took, 1),
        "answers": len(seen.seconds),
        "p50": round(parts[9], 3),
        "p95": round(parts[18], 3),
        "quiet": round(max(b - a for a, b in itertools.pairwise([begin, *seen.ends, end])), 3),
        "tokens_per_second": round(seen.tokens / took, 1),
        "statuses": dict(sorted(seen.statuses.items())),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Load on a server of maskless.")
    parser.add_argument("url", help="of the server: http://127.0.0.1:8000")
    parser.add_argument("--text", default=TEXT, help="what is to be filled in")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=16, help="of each request")
    given = parser.parse_args(arguments)
    how = {"text": given.text, "clients": given.clients, "seconds": given.seconds, "steps": given.steps}
    print(json.dumps(load(given.url.rstrip("/"), **how)))


if __name__ == "__main__":
    main()
