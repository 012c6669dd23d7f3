"""Requests that schemathesis makes up from the OpenAPI document: none may be answered with a 500.

Behind a flag: MASKLESS_FUZZ=300 python -m pytest tests/serve/test_fuzz.py makes about so many for each endpoint.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

COUNT = int(os.environ.get("MASKLESS_FUZZ", "0"))
pytestmark = pytest.mark.skipif(not COUNT, reason="set MASKLESS_FUZZ to a number of requests for each endpoint")


@pytest.fixture(scope="module")
def schema(server):
    schemathesis = pytest.importorskip("schemathesis", reason="needs the extra fuzz")
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_no_made_up_request_is_a_500(schema, server):
    """Half of them as the document has it, half against it."""
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode

    seen: Counter[tuple[str, int]] = Counter()
    calm = settings(
        max_examples=(COUNT + 1) // 2,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )

    def attack(operation, mode):
        @calm
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            answer = case.call(base_url=server.url, timeout=30)
            seen[operation.path, answer.status_code] += 1
            assert answer.status_code < 500, (answer.status_code, answer.text, case.body)
            if answer.status_code >= 400:
                assert "\n" not in answer.json()["error"]["message"]

        ask()

    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in (one for one in operations if one.method == "post"):
        attack(operation, GenerationMode.POSITIVE)
        attack(operation, GenerationMode.NEGATIVE)
    print(sum(seen.values()), "requests:", dict(sorted(seen.items())))
    assert server.get("/healthz").status == 200
    assert len({path for path, _ in seen}) == 6
