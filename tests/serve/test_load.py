"""The load of tools/load.py counts what a server really did."""

from __future__ import annotations

import load


def test_a_load_counts_answers_and_tokens(server):
    found = load.load(server.url, text="the [4] sat", clients=3, seconds=0.5, steps=2)
    assert found["statuses"] == {"200": found["answers"]}
    assert found["answers"] >= 3
    assert 0 < found["p50"] <= found["p95"]
    assert abs(found["tokens_per_second"] * found["seconds"] - 4 * found["answers"]) < 0.2 * 4 * found["answers"]


def test_a_load_counts_what_is_refused(slow):
    server = slow(0.05, queue=1, batch=1)
    found = load.load(server.url, text="the [4] sat", clients=6, seconds=1.0, steps=4)
    assert found["statuses"].keys() == {"200", "503"}
    assert found["statuses"]["200"] == found["answers"] > 0


def test_no_server_is_no_answer():
    found = load.load("http://127.0.0.1:9", text="the [4] sat", clients=1, seconds=0.1, steps=2)
    assert found["statuses"].keys() == {"0"}
    assert found["answers"] == 0
