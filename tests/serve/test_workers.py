"""Two workers behind one port: both answer, with the results of one; what ends is started again; all end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiters import until

import load
import maskless
from in_process import exit_code_of
from maskless.serve.metrics import merged

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes there cannot share a socket")
TEXT = "the [6] sat on [8]"


def get(url, path):
    with urllib.request.urlopen(f"{url}{path}", timeout=60) as answer:
        return answer.read().decode()


def answered(url):
    """How many texts each worker has filled in."""
    lines = re.findall(r'requests_total\{worker="(\d)",path="/v1/fill",status="200"\} (\d+)', get(url, "/metrics"))
    return {int(worker): int(count) for worker, count in lines}


def workers_of(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def alive(pid):
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return found.strip() != "" and not found.startswith("Z")


@pytest.fixture
def serving(models, tmp_path):
    """A server with two workers, its address, and the file of what it says on stderr."""
    models["pgm"].save_pretrained(tmp_path / "pgm")
    words = [sys.executable, "-m", "maskless", "serve", "pgm", "--port", "0", "--devices", "cpu,cpu"]
    said, environment = tmp_path / "stderr", os.environ | {"TMPDIR": str(tmp_path)}
    with (
        said.open("w") as err,
        subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=err, text=True) as run,
    ):
        try:
            found = re.match(r"(http://127\.0\.0\.1:\d+)  \(cpu, cpu; Ctrl-C stops\)", run.stdout.readline())
            assert found, said.read_text()
            yield run, found[1], said
        finally:
            run.kill()


def test_two_workers_share_a_port_and_a_killed_one_is_started_again(serving, models):
    run, url, said = serving
    bodies = [{"text": TEXT, "steps": 4, "seed": seed} for seed in range(24)]
    alone = [("200", maskless.fill(models["pgm"], TEXT, steps=4, seed=body["seed"])) for body in bodies]
    asked = 0

    def both_have_answered():
        """The system shares connections out as it likes, so ask until both have had some."""
        nonlocal asked
        with ThreadPoolExecutor(len(bodies)) as clients:
            answers = [*clients.map(lambda body: load.ask(url, body, timeout=60), bodies)]
        assert [(status, answer["texts"][0]["text"]) for status, answer in answers] == alone
        asked += len(bodies)
        return answered(url).keys() == {0, 1}

    until(both_have_answered)
    until(lambda: sum(answered(url).values()) == asked)

    os.kill(workers_of(run.pid)[1], signal.SIGKILL)
    for body in bodies:
        assert load.ask(url, body, timeout=60)[0] == "200"
    until(lambda: "worker" in said.read_text())
    assert said.read_text() == "worker 1 (cpu) has ended (SIGKILL) and is started again; the others continue\n"
    until(lambda: 'steps_total{worker="1"' in get(url, "/metrics"))

    before = {*workers_of(run.pid)}
    run.send_signal(signal.SIGUSR1)
    found = load.load(url, text=TEXT, clients=4, seconds=8, steps=4)
    assert found["statuses"].keys() == {"200"}
    until(lambda: len({*workers_of(run.pid)} - before) == 2)
    after = workers_of(run.pid)

    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 0
    assert not any(map(alive, after))
    assert len(said.read_text().splitlines()) == 1


def test_workers_end_with_the_process_that_started_them(serving):
    run, _, said = serving
    workers = workers_of(run.pid)
    assert len(workers) == 2
    run.kill()
    until(lambda: not any(map(alive, workers)))
    assert said.read_text() == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "cpu,toaster"], "device 'toaster' cannot be used: expected cpu"),
        (["--devices", "cpu,"], "device '' cannot be used"),
        (["--devices", "cpu,4096"], "device 'cuda:4096' cannot be used"),
        (["--devices", "cpu,cpu", "--device", "cpu"], "expected one of the two"),
        (["nowhere", "--devices", "cpu,cpu"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line(words, message, capfd):
    assert exit_code_of("serve", "--port", 0, *words) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_figures_of_workers_stand_below_one_head():
    own = '# HELP a\n# TYPE a counter\na{b="x"} %d\n# HELP c\n# TYPE c gauge\nc{b="{"} 2\n'
    assert merged({1: own % 5, 0: own % 3}).splitlines() == [
        "# HELP a",
        "# TYPE a counter",
        'a{worker="0",b="x"} 3',
        'a{worker="1",b="x"} 5',
        "# HELP c",
        "# TYPE c gauge",
        'c{worker="0",b="{"} 2',
        'c{worker="1",b="{"} 2',
    ]
