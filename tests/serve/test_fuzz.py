"""Made-up requests to a server in a process of its own: none is answered with a 500, and its memory stays small.

Some come from the OpenAPI document, by schemathesis, some from what no document says (hostile_requests.py). The suite
sends a few of these. MASKLESS_FUZZ=300 python -m pytest tests/serve/test_fuzz.py -s sends about so many of both kinds
for each endpoint, to the shipped models, and prints what came of them.
"""

import json
import os
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import hostile_requests
import pytest

COUNT = int(os.environ.get("MASKLESS_FUZZ", "0"))
ENDPOINTS = 6
MEMORY = 1 << 30  # bytes that requests may take at most: what the process itself takes depends on the machine


class Process(NamedTuple):
    server: Any
    pid: int

    def peak(self) -> int:
        """The most memory that it has had, in bytes; 0 where the system does not tell."""
        status = Path(f"/proc/{self.pid}/status")
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
        return 1024 * int(found[1]) if found else 0


@pytest.fixture(scope="module")
def process(serving, tmp_path_factory):
    """`maskless serve`: the shipped models in a long run, tiny ones in the suite. It takes little more memory."""
    words = [] if COUNT else ["pgm", "--pictures", "pictures"]
    with serving([*words, "--timeout", "10"], tmp_path_factory.mktemp("served")) as (run, server, said):
        one = Process(server, run.pid)
        begun = one.peak()
        yield one
        assert run.poll() is None, said.read_text()[-2000:]
        assert one.peak() - begun < MEMORY
        assert server.get("/healthz").status == 200
    assert "Traceback" not in said.read_text()


def judged(status: int, body: bytes, what: object) -> None:
    """An answer, or a refusal in one line; 503 where it would take too long."""
    assert status < 500 or status == 503, (status, body[:500], what)
    if status >= 400:
        error = json.loads(body)["error"]
        assert error["code"] == status
        assert "\n" not in error["message"]
        assert len(error["message"]) < 1000


def report(seen: Counter[tuple[str, int]], begun: float, process: Process) -> None:
    statuses: Counter[int] = Counter()
    for (_, status), count in seen.items():
        statuses[status] += count
    print(f"\n{sum(seen.values())} requests in {time.monotonic() - begun:.0f} s: {dict(sorted(statuses.items()))},")
    print(f"{process.peak() / 1e6:.0f} MB at most", dict(sorted(seen.items())))


def test_no_hostile_request_takes_much_or_breaks_anything(process):
    seen: Counter[tuple[str, int]] = Counter()
    begun = time.monotonic()

    def send(number: int) -> None:
        known = hostile_requests.KNOWN
        path, body = known[number] if number < len(known) else hostile_requests.attack(number)
        answer = process.server.post(path, body)
        seen[path, answer.status] += 1
        if not answer.body.startswith(b"event: "):
            judged(answer.status, answer.body, (number, path, body[:200]))

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(send, range(ENDPOINTS * COUNT or 120)))
    report(seen, begun, process)
    assert {status for _, status in seen} >= {200, 400, 413, 422}


@pytest.mark.skipif(not COUNT, reason="set MASKLESS_FUZZ to a number of requests for each endpoint")
def test_no_made_up_request_is_a_500(process):
    """Half of them as the document has it, half against it."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs the extra fuzz")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{process.server.url}/openapi.json")
    seen: Counter[tuple[str, int]] = Counter()
    begun = time.monotonic()
    few = {"max_examples": (COUNT + 1) // 2, "phases": [Phase.generate]}
    calm = settings(**few, deadline=None, suppress_health_check=list(HealthCheck), database=None)

    def attack(operation, mode):
        @calm
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            answer = case.call(base_url=process.server.url, timeout=90)
            seen[operation.path, answer.status_code] += 1
            if "event-stream" not in answer.headers.get("content-type", [""])[0]:
                judged(answer.status_code, answer.content, case.body)

        ask()

    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in (one for one in operations if one.method == "post"):
        attack(operation, schemathesis.GenerationMode.POSITIVE)
        attack(operation, schemathesis.GenerationMode.NEGATIVE)
    report(seen, begun, process)
    assert len({path for path, _ in seen}) == ENDPOINTS
