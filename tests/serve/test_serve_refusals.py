"""What the API refuses: bad requests in one line, what is beyond its limits, a wrong key, clients that linger."""

import asyncio
import json
import re
import socket
import threading
import time

import pytest
import torch
from waiters import until

from maskless.how import How
from maskless.serve import texts
from maskless.serve.host import Limits
from maskless.serve.metrics import Metrics
from maskless.serve.state import State

HEAD = b"POST /v1/fill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


WRONG = [
    ("/v1/fill", {"text": "no gap"}, 400, r"no gap .* write \[8\]"),
    ("/v1/fill", {"text": "a [999]"}, 400, r"999 tokens long.*at most 48"),
    ("/v1/fill", {"text": "a b c d e f [44]"}, 400, r"tokens long with its gaps: expected at most 48"),
    ("/v1/fill", {"text": "[1000000]" * 5000}, 400, r"5,000,000,000 tokens long"),
    ("/v1/fill", {"text": "[0000000001000000]" * 3}, 400, r"the gaps are 3,000,000 tokens long: expected at most 48"),
    ("/v1/fill", {"text": "[1]" * 20_000}, 400, r"the gaps are 20,000 tokens long: expected at most 48"),
    ("/v1/fill", {"text": "a [3]", "steps": 0}, 422, r"steps: .*greater than or equal to 1"),
    ("/v1/fill", {"text": "a [3]", "steps": 65}, 400, r"65 steps are more than the server allows: 64"),
    ("/v1/fill", {"text": "a [40]", "steps": 40, "revise": 9}, 400, r"40 steps and revise 9 make \d+, more than .* 64"),
    ("/v1/fill", {"text": "a [3]", "revise": 17}, 422, r"revise: .*less than or equal to 16"),
    ("/v1/fill", {"text": "a [3]", "n": 9}, 400, r"^9 texts: expected at most 8"),
    ("/v1/fill", {"text": "a [3]", "temperature": "1"}, 422, r"temperature: .*number"),
    ("/v1/fill", {"text": "a [3]", "seed": 2**63}, 422, r"seed: "),
    ("/v1/fill", {"text": "a [3]", "order": "up"}, 422, r"order: .*'random'"),
    ("/v1/fill", {"text": "a [3]", "model": "gpt"}, 404, r"unknown text model 'gpt': expected one of pgm, mdlm"),
    ("/v1/fill", {"text": "a [3]", "path": "/etc"}, 422, r"path: .*not permitted"),
    ("/v1/fill", {}, 422, r"either text or tokens"),
    ("/v1/fill", {"tokens": [1, 2]}, 400, r"nothing to sample"),
    ("/v1/fill", {"tokens": [1, None, 100000]}, 400, r"a token is 100000: expected 0 to \d+"),
    ("/v1/fill", {"tokens": [1, None], "spaced": [7]}, 400, r"a spaced position is 7"),
    ("/v1/fill", [1], 422, r"."),
    ("/v1/generate", {"prompt": "a", "length": 1}, 400, r"length 1 with a prompt of 1 tokens"),
    ("/v1/generate", {"prompt": "b c d " * 40}, 400, r"a prompt of less than 48 tokens"),
    ("/v1/alternatives", {"tokens": [1, 2], "position": 2}, 400, r"position 2 of 2 tokens"),
    ("/v1/alternatives", {"tokens": [], "position": 0}, 422, r"tokens: "),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4000}, 400, r"at most 48"),
    ("/v1/completions", {"prompt": "a", "logprobs": 6}, 422, r"logprobs: "),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}}, 422, r"^logit_bias is not supported: expected {}"),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 1}, 422, r"^presence_penalty is not supported: expected 0"),
    ("/v1/completions", {"prompt": [5, 1 << 20]}, 400, r"a token of the prompt is 1048576: expected 0 to"),
    ("/v1/completions", {"prompt": ["a"] * 9}, 400, r"^9 texts: expected at most 8 in a request"),
    ("/v1/pictures", {"label": "bird"}, 400, r"unknown label 'bird': expected one of cat, dog, ship"),
    ("/v1/pictures", {"label": 3}, 400, r"a label is 3: expected 0 to 2"),
    ("/v1/pictures", {"model": "pgm"}, 404, r"unknown image model 'pgm'"),
    ("/v1/pictures/fill", {"tokens": [[1]]}, 400, r"expected 4 rows of 4"),
    ("/v1/pictures/fill", {"tokens": [[9] * 4] * 4}, 400, r"a token is 9: expected 0 to 8"),
    ("/v1/pictures/fill", {"image": "AAAA", "mask": [[True] * 4] * 4}, 400, r"base64 of a PNG or JPEG"),
    ("/v1/pictures/fill", {"image": "iVBORw0KGgo=", "mask": [[True] * 4] * 4}, 400, r"damaged PNG"),
    ("/v1/pictures/fill", {"image": "AAAA", "mask": [[True]]}, 400, r"mask: expected 4 rows of 4"),
    ("/v1/pictures/fill", {}, 422, r"either tokens, or image and mask"),
    # Of many mistakes the first is said: to write down all half a million took 6 seconds for everybody, and 600 MB.
    ("/v1/fill", {"tokens": [-1] * 9000}, 422, r"^tokens\.0: Input should be greater than or equal to 0 \(got -1\)$"),
    ("/v1/fill", {"text": "a", "spaced": [-1] * 9000}, 422, r"^spaced\.0: Input should be greater .* \(got -1\)$"),
    ("/v1/pictures/fill", {"tokens": [[-1] * 4000] * 2}, 422, r"^tokens\.0\.0: Input should be greater .*got -1\)$"),
    (
        "/v1/pictures/fill",
        {"image": "AAAA", "mask": [[1] * 4000] * 2},
        422,
        r"^mask\.0\.0: .* valid boolean .*got 1\)$",
    ),
    ("/v1/pictures/fill", {"image": "AAAA", "mask": [[1]] * 4000}, 422, r"^mask\.0\.0: .* valid boolean .*got 1\)$"),
    ("/v1/fill", {f"a{i}": 1 for i in range(4000)}, 422, r"^4,000 fields: expected some of model, steps, seed"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_a_bad_request_is_one_clear_line(server, path, body, status, message):
    for stream in ({}, {"accept": "text/event-stream"}):
        answer = server.post(path, body, **stream)
        assert answer.status == status
        assert re.search(message, answer.message), answer.message


NOT_JSON = [b"{", b"", b"\xff", b'{"text": NaN}', b"[" * 8000, b'{"seed": 1e999}']
HALVES = [b'{"text": "\\ud800 [3]"}', b'{"\\ud800": 1}', b'{"text": "a [3]", "model": "\\udfff"}']  # of characters


@pytest.mark.parametrize("body", [*NOT_JSON, *HALVES])
def test_what_is_not_json_is_refused(server, body):
    answer = server.post("/v1/fill", body)
    assert answer.status in (400, 422)
    assert answer.message


def test_other_kinds_of_content_and_unknown_paths_are_refused(server):
    body = b'{"text": "a [3]"}'
    assert "expected application/json" in server.ask("POST", "/v1/fill", body, {"content-type": "text/plain"}).message
    assert server.ask("POST", "/v1/fill", body).status == 415
    assert server.get("/v1/fill").status == 405
    assert "no such path: /nothing" in server.get("/nothing").message
    assert server.get("/page/../web.py").status == 404
    assert server.get("/page/%2e%2e%2fweb.py").status == 404


def test_a_long_body_is_refused_however_it_comes(server):
    answer = server.post("/v1/fill", {"text": "a" * 70_000})
    assert answer.status == 413
    assert "expected at most 65,536" in answer.message
    connection = server.connect()
    parts = (b"x" * 10_000 for _ in range(20))
    connection.request("POST", "/v1/fill", parts, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_only_local_names_are_answered(server):
    assert server.get("/healthz", host="evil.example:80").status == 421
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:9"):
        assert server.get("/healthz", host=host).status == 200


def test_every_answer_has_the_headers_that_keep_a_page_to_itself(server):
    for path in ("/", "/docs", "/healthz", "/nothing", "/page/style.css"):
        headers = server.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


def test_a_key_is_asked_for(slow):
    server = slow(0, key="correct-horse")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic correct-horse"}):
        for answer in (server.post("/v1/fill", {"text": "a [3]"}, **headers), server.get("/metrics", **headers)):
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "correct" not in answer.message
    assert server.post("/v1/fill", {"text": "a [3]"}, authorization="Bearer correct-horse").status == 200
    assert server.get("/healthz").status == 200
    assert server.get("/").status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(slow, stream):
    server = slow(0.05, batch=1)
    batcher = server.hosts["pgm"].batcher
    body = json.dumps({"text": "a [40]", "steps": 40, "stream": stream}).encode()
    leaving = socket.create_connection(("127.0.0.1", server.port))
    leaving.sendall(HEAD % len(body) + body)
    until(lambda: batcher.counts.steps >= 2)
    leaving.close()
    until(lambda: batcher.active == 0)
    assert batcher.counts.cancelled == 1
    assert batcher.counts.steps < 40
    assert server.post("/v1/fill", {"text": "a [1]"}).status == 200


def test_a_full_queue_and_a_late_answer_are_said_clearly(slow):
    server = slow(0.2, batch=1, queue=1, seconds=1.0)
    batcher, answers, threads = server.hosts["pgm"].batcher, [], []

    def ask():
        answers.append(server.post("/v1/fill", {"text": "a [40]", "steps": 40}))

    for there in (1, 2, 2, 2):  # one has the slot, one waits, and there is no place for the others
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        until(lambda there=there: len(batcher.jobs) + len(answers) >= there)
    for thread in threads:
        thread.join()
    assert {answer.status for answer in answers} == {503}
    assert all(answer.headers["retry-after"] for answer in answers)
    messages = " ".join(answer.message for answer in answers)
    assert "queue is full" in messages
    assert "time limit" in messages
    late = server.post("/v1/fill", {"text": "a [40]", "steps": 40, "stream": True}).events[-1]
    assert late[0] == "error"
    assert "time limit" in late[1]["error"]["message"]


@pytest.mark.parametrize(
    ("patience", "start", "answer"),
    [
        ("guard", HEAD % 50 + b"{", b"HTTP/1.1 408"),
        ("connection", b"", b""),
        ("connection", b"POST /v1/fill HTTP/1.1\r\nHost: loc", b""),
    ],
)
def test_what_does_not_arrive_is_not_waited_for(slow, monkeypatch, patience, start, answer):
    monkeypatch.setattr(f"maskless.serve.{patience}.PATIENCE", 0.2)
    server = slow(0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as lazy:
        lazy.sendall(start)
        assert lazy.recv(1000)[:12] == answer


def test_a_connection_may_rest_between_requests(slow, monkeypatch):
    monkeypatch.setattr("maskless.serve.connection.PATIENCE", 0.5)
    connection = slow(0.6).connect()
    for _ in range(2):
        connection.request("POST", "/v1/fill", b'{"text": "a [1]"}', {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.read()
        time.sleep(0.6)
    connection.close()


def test_a_step_that_does_not_come_back_is_not_waited_for(slow):
    server = slow(0, seconds=0.2)
    batcher, back = server.hosts["pgm"].batcher, threading.Event()
    quick = batcher.backend.logits
    batcher.backend.logits = lambda asks: (back.wait(60), quick(asks))[1]
    try:
        for stream in (False, True):
            answer = server.post("/v1/fill", {"text": "a [3]", "stream": stream})  # though the step is still away
            assert "time limit" in (answer.events[-1][1]["error"]["message"] if stream else answer.message)
    finally:
        back.set()
    until(lambda: batcher.counts.late == 2)
    until(lambda: batcher.active == 0)


def test_a_stream_without_events_says_that_it_is_still_there(slow, monkeypatch):
    from maskless.serve import tickets

    monkeypatch.setattr(tickets, "KEEP_ALIVE", 0.05)
    answer = slow(0.3).post("/v1/fill", {"text": "a [1]", "stream": True})
    assert b"\n\n: still here\n\n" in answer.body
    assert [name for name, _ in answer.events] == ["start", "step", "done"]


def test_a_stream_that_nobody_reads_is_cut_off(server):
    host = server.hosts["pgm"]
    drafts = texts.drafts_of(host, [texts.from_template(host, "a [3]")], How())

    async def unread():
        state = State([host], Limits(seconds=0.1), Metrics())
        nothing = {"landed": None, "ended": None}
        answer = state.stream(host, drafts, opened=[b"x"], **nothing)
        answer.seconds = 0.1
        waiting = asyncio.Event()

        async def never(*_):
            await waiting.wait()

        await asyncio.wait_for(answer({"type": "http", "asgi": {"spec_version": "2.3"}}, never, never), 60)
        return answer.ticket.job.cancelled

    assert asyncio.run(unread())


def nan(asks):
    return torch.full((sum(ask.offsets.total for ask in asks), 460), torch.nan)


def broken(asks):
    raise RuntimeError("secret detail")


@pytest.mark.parametrize(
    ("logits", "whole", "streamed"),
    [
        (nan, *["no token can be drawn: the model's logits are NaN, or rule out all 460 tokens"] * 2),
        (broken, "the server failed on this request", "the model failed on this request"),
    ],
)
def test_a_step_that_fails_is_a_500_without_a_trace(slow, logits, whole, streamed):
    server = slow(0)
    server.hosts["pgm"].batcher.backend.logits = logits
    answer = server.post("/v1/fill", {"text": "a [3]"})
    assert (answer.status, answer.message) == (500, whole)
    (_, event) = server.post("/v1/fill", {"text": "a [3]", "stream": True}).events[-1]
    assert (event["error"]["code"], event["error"]["message"]) == (500, streamed)
