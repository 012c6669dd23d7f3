"""Connections: how many there may be, who gives way, and what is said and logged about it."""

import asyncio
import contextlib
import json
import logging
import selectors
import socket
from unittest import mock

import pytest
from uvicorn.server import ServerState

from maskless.serve import logs
from maskless.serve.connection import Patient, config_of
from maskless.serve.host import Limits

resource = pytest.importorskip("resource", reason="sockets are no descriptors on Windows")
HALF = b"POST /v1/fill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answer(line):
    """The head, and the body that is JSON."""
    received = b""
    while not (received.endswith(b"}") and b"\r\n\r\n" in received):
        received += (more := line.recv(1 << 16))
        assert more, received
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode().lower(), json.loads(body)


@pytest.mark.parametrize(
    ("descriptors", "most"), [(20_000, 1024), (1024, 768), (256, 128), (64, 32), (resource.RLIM_INFINITY, 1024)]
)
def test_connections_leave_descriptors_for_files(monkeypatch, descriptors, most):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (descriptors, descriptors))
    assert Limits().connections == most


def test_who_comes_when_all_are_busy_is_told_so_in_json(slow):
    server = slow(0, batch=1, queue=1)
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        for _ in range(16):
            line = stack.enter_context(connect(server))
            ready.register(line, selectors.EVENT_READ)
            line.sendall(HALF)  # a request that is not whole yet is under way
        refused = []
        while len(refused) < 2:
            for key, _ in ready.select(60):
                ready.unregister(key.fileobj)
                refused.append(answer(key.fileobj))
    for head, body in refused:
        assert head.startswith("http/1.1 503")
        assert "content-type: application/json" in head
        assert "retry-after: 1" in head
        message = "too many requests at once: 14 are under way, try again in a moment"
        assert body == {"error": {"message": message, "type": "server_error", "code": 503}}


def test_the_silent_give_way_and_the_busy_stay(slow):
    server = slow(0.05, batch=1, queue=1)  # 16 connections
    body = json.dumps({"text": "a [20]", "steps": 20, "stream": True}).encode()
    busy = server.connect()
    busy.request("POST", "/v1/fill", body, {"content-type": "application/json"})
    stream = busy.getresponse()
    assert stream.readline() == b"event: start\n"
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(40)]
        assert server.get("/healthz").status == 200
        assert silent[0].recv(1) == b""  # the first to be silent is the first to go
        assert b"event: done" in stream.read()
    busy.close()


def test_what_is_no_http_is_told_so_in_json(server):
    with connect(server) as line:
        line.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, body = answer(line)
    assert head.startswith("http/1.1 400")
    assert body["error"] == {"message": "Invalid HTTP request received.", "type": "invalid_request_error", "code": 400}


def test_an_answer_that_is_not_read_is_not_kept_for_ever():
    """Closed, a transport waits until all is sent; aborted, it does not."""

    async def idle():
        transport = mock.Mock(get_extra_info=lambda name: None)
        line = Patient(config_of(lambda *_: None, Limits()), ServerState(), {})
        line.connection_made(transport)
        line.timeout_keep_alive_handler()
        return transport

    assert asyncio.run(idle()).abort.called


def test_a_line_that_repeats_itself_is_logged_a_few_times(monkeypatch):
    now = 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    throttle = logs.Throttle()

    def said(message, error=None):
        info = None if error is None else (type(error), error, None)
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "file", 1, message, (), info)
        return record.getMessage() if throttle.filter(record) else None

    message = "socket.accept() out of system resource\nsocket: <fd=%d>"
    lines = [said(message % i) for i in range(1000)]
    assert [line is not None for line in lines] == [True] * 5 + [False] * 995
    assert said("another line")
    assert said(message, OSError())
    now = 61.0
    assert said(message) == f"(995 more lines like this were left out) {message}"
    assert said(message) == message
