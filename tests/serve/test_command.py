"""The command: it starts from folders, answers, and stops in good order; a mistake is one line."""

import contextlib
import signal
import socket
import sys

import pytest

from maskless.serve.host import Limits, name_of
from maskless.serve.run import Address


@pytest.mark.skipif(sys.platform == "win32", reason="sockets are no descriptors there")
def test_it_serves_folders_also_beside_silent_connections_beyond_the_descriptors_and_stops_when_told(serving, tmp_path):
    """Such connections gave an error for each try to accept one more, 40 MB of them in seconds."""
    words = ["pgm", "--mdlm", "mdlm", "--pictures", "pictures"]
    with (
        serving(words, tmp_path, descriptors=200) as (run, server, said),
        contextlib.ExitStack() as silent,
    ):
        assert server.get("/healthz").json["models"] == ["pgm", "mdlm", "pictures"]
        for _ in range(400):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        assert server.post("/v1/fill", {"text": "a [3]"}).status == 200
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
        assert said.read_text() == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Address(port=70000), "port 70000"),
        (lambda: Address(key="short"), "too simple"),
        (lambda: Address(key="with a space in it"), "too simple"),
        (lambda: Limits(queue=0), "queue 0"),
        (lambda: Limits(seconds=0), "timeout 0"),
    ],
)
def test_a_wrong_option_is_one_line(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_without_a_model_the_shipped_ones_are_served(monkeypatch):
    from maskless import shipped
    from maskless.cli import serve

    monkeypatch.setattr(shipped, "names", lambda: ["cifar10", "stories", "stories-fast"])
    assert serve.shipped_models() == ["stories", "cifar10"]
    monkeypatch.setattr(shipped, "names", lambda: ["stories", "stories-ar", "stories-mdlm"])
    assert serve.shipped_models() == ["stories", "stories-mdlm", "stories-ar"]
    monkeypatch.setattr(shipped, "names", list)
    with pytest.raises(ValueError, match="expected a MODEL"):
        serve.shipped_models()


def test_names_are_short_and_differ():
    assert name_of("runs/a/stories", set()) == "stories"
    assert name_of("other/stories", {"stories"}) == "stories-2"
    assert name_of("owner/model", set()) == "model"
