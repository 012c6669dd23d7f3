"""A server's life: it sends at once; told to stop, it ends what is nearly done and tells the others so."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from waiters import until

from maskless.serve import connection
from maskless.serve.host import Host, Limits
from maskless.serve.run import Address, bind, serve


def post(url, body):
    """The status and the body, also of an error."""
    request = urllib.request.Request(f"{url}/v1/fill", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture
def stopped(models, monkeypatch):
    """stopped(bodies, pause of a step, *signals): the answers of requests under way when the server is told to stop."""

    def run(bodies, pause, *signals):
        limits = Limits(length=48, steps=64, rows=8)
        host = Host("pgm", models["pgm"], limits)
        quick = host.batcher.backend.logits
        monkeypatch.setattr(host.batcher.backend, "logits", lambda rows: (time.sleep(pause), quick(rows))[1])
        answers, threads, heard, handle = {}, [], [], connection.Server.handle_exit
        monkeypatch.setattr(connection.Server, "handle_exit", lambda *given: (handle(*given), heard.append(given)))

        def ask(url, i, body):
            answers[i] = post(url, body)

        def stop():
            until(lambda: host.batcher.active == len(bodies))
            for sent, number in enumerate(signals, 1):
                os.kill(os.getpid(), number)
                until(lambda sent=sent: len(heard) == sent)  # two at once would be one

        def ready(url):
            for i, body in enumerate(bodies):
                threads.append(threading.Thread(target=ask, args=(url, i, body), daemon=True))
            threads.append(threading.Thread(target=stop, daemon=True))
            for thread in threads:
                thread.start()

        serve([host], limits, Address(port=0), ready=ready)
        for thread in threads:
            thread.join(60)
        return [answers.get(i, (0, b"")) for i in range(len(bodies))]  # 0: it was cut off

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_would_wait_too_long_is_told_that_the_server_stops(stopped, number, monkeypatch, capsys):
    monkeypatch.setattr(connection, "GRACE", 0.2)
    slow = {"text": "a [40]", "steps": 40}
    whole, (status, events) = stopped([slow, slow | {"stream": True}], 0.1, number)
    assert whole[0] == 503
    error = json.loads(whole[1])
    assert error["error"]["message"] == "the server is stopping"
    assert status == 200
    name, data = events.decode().strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == error
    assert capsys.readouterr().err == ""


def test_a_second_signal_ends_the_grace(stopped, monkeypatch, capsys):
    monkeypatch.setattr(connection, "GRACE", 60)
    monkeypatch.setattr(connection, "TELLING", 60)
    slow = {"text": "a [40]", "steps": 40}
    found = stopped([slow, slow], 0.5, signal.SIGINT, signal.SIGINT)
    assert [status for status, _ in found] == [503, 503]  # in the grace both would be done: 20 seconds
    assert capsys.readouterr().err == ""


def test_what_is_nearly_done_is_finished(stopped):
    ((status, _),) = stopped([{"text": "a [4]", "steps": 4}], 0.05, signal.SIGTERM)
    assert status == 200


def test_what_is_said_is_sent_at_once():
    """Otherwise the body of an answer waits some 40 ms for the client to acknowledge its head."""

    async def delayed() -> bool:
        found = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: found.set_result(writer), sock=bind(Address(port=0)))
        async with server:
            _, mine = await asyncio.open_connection(*server.sockets[0].getsockname())
            theirs = await found
            off = theirs.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            mine.close()
            theirs.close()
            return not off

    assert not asyncio.run(delayed())
