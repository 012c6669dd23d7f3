"""The load of tools/load.py counts what a server really did, and goes on where it is lost."""

import socket
import threading
from types import SimpleNamespace

import pytest

import load


def test_a_load_counts_answers_and_tokens(server):
    found = load.load(server.url, text="the [4] sat", clients=3, seconds=0.5, steps=2)
    assert found["statuses"] == {"200": found["answers"]}
    assert found["answers"] >= 3
    assert 0 < found["p50"] <= found["p95"]
    assert 0 < found["quiet"] <= found["seconds"]
    tokens = found["tokens_per_second"] * found["seconds"]  # both are rounded to a tenth, the seconds are 0.5 or more
    assert tokens == pytest.approx(4 * found["answers"], rel=0.05 / 0.45, abs=0.05 * found["seconds"])


def test_a_load_counts_what_is_refused(slow):
    server = slow(0.05, queue=1, batch=1)
    found = load.load(server.url, text="the [4] sat", clients=6, seconds=1.0, steps=4)
    assert found["statuses"].keys() == {"200", "503"}
    assert found["statuses"]["200"] == found["answers"] > 0


@pytest.fixture
def clock(monkeypatch):
    """Time goes on only where a client waits."""
    slept = [0.0]
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))


@pytest.mark.usefixtures("clock")
def test_no_server_is_no_answer():
    found = load.load("http://127.0.0.1:9", text="the [4] sat", clients=1, seconds=0.1, steps=2)
    assert found["statuses"].keys() == {"refused"}
    assert found["answers"] == 0
    assert found["quiet"] == found["seconds"] == 0.2


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("said", "status"),
    [(b"", "reset"), (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "cut off"), (b"no HTTP\r\n", "cut off")],
)
def test_a_server_that_is_lost_is_counted_and_asked_again(said, status):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                line, _ = listener.accept()
                with line:
                    line.recv(1 << 16)
                    line.sendall(said)
                    line.shutdown(socket.SHUT_WR)  # the end; what is not read yet would be a reset
                    while line.recv(1 << 16):
                        pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found = load.load(url, text="the [4] sat", clients=1, seconds=0.3, steps=2)
        thread.join(60)
    assert found["statuses"] == {status: 2}


def test_a_server_that_does_not_answer_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert load.ask(f"http://127.0.0.1:{listener.getsockname()[1]}", {}, timeout=0.1) == ("timeout", {})
