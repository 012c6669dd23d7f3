"""The command: it starts from folders, answers, and stops in good order; a mistake is one line."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from maskless.serve.host import Limits, name_of
from maskless.serve.run import Address


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "maskless", "serve", *words]


@pytest.mark.skipif(sys.platform == "win32", reason="sockets are no descriptors there")
def test_silent_connections_beyond_the_descriptors_keep_nobody_out(models, tmp_path):
    """They gave an error for each try to accept one more, 40 MB of them in seconds."""
    models["pgm"].save_pretrained(tmp_path / "pgm")
    limited = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command("pgm", "--port", "0", "--device", "cpu")]
    environment, said = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}, tmp_path / "stderr"
    with (
        said.open("w") as err,
        subprocess.Popen(limited, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=err, text=True) as run,
        contextlib.ExitStack() as silent,
    ):
        try:
            url, port = re.match(r"(http://127\.0\.0\.1:(\d+)) ", run.stdout.readline()).groups()
            for _ in range(400):
                silent.enter_context(socket.create_connection(("127.0.0.1", int(port)), timeout=60))
            body = urllib.request.Request(f"{url}/v1/fill", b'{"text": "a [3]"}', {"content-type": "application/json"})
            assert urllib.request.urlopen(body, timeout=60).status == 200
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 0
        finally:
            run.kill()
    assert said.read_text() == ""


def test_it_serves_folders_and_stops_when_told(models, tmp_path):
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    words = command("pgm", "--mdlm", "mdlm", "--pictures", "pictures", "--port", "0", "--device", "cpu")
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as run:
        try:
            line = run.stdout.readline()
            found = re.match(r"(http://127\.0\.0\.1:\d+)  \(pgm, mdlm, pictures; Ctrl-C stops\)", line)
            assert found, line + run.stderr.read()
            body = urllib.request.Request(
                f"{found[1]}/v1/fill", b'{"text": "a [3]"}', {"content-type": "application/json"}
            )
            assert urllib.request.urlopen(body, timeout=60).status == 200
            run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 0
            assert run.stderr.read() == ""
        finally:
            run.kill()


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
