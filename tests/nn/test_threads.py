"""Small work is computed by one thread, large work by all, and a number that the user has chosen stays.

In processes of their own: here the tests have chosen a number.
"""

import json
import os
import subprocess
import sys

import pytest

from maskless.nn import threads

pytestmark = pytest.mark.skipif(threads._openmp is None, reason="needs OpenMP")
FOUR = """
import json, os, signal, threading, torch
from maskless import Model, fill, generate, log_likelihood, logits
from maskless.codec.text import byte_codec
from maskless.nn import threads
from maskless.nn.partition import PartitionConfig, PartitionTransformer

torch.get_num_threads()
threads._openmp(4)  # as if there were four cores
threads.DEFAULT = 4
sizes = dict(vocab=257, length=64, width=64, heads=2, encoder=1, decoder=1, context="ordered")
model = Model(PartitionTransformer(PartitionConfig(**sizes)).eval(), byte_codec())
seen, draw = [], logits.draw

def watched(*args):
    seen.append(torch.get_num_threads())
    return draw(*args)

logits.draw = watched
"""
SMALL = "fill(model, 'ab[4]c', steps=2)"


def told(script: str, **environment: str) -> object:
    """What a script says about itself in its last line."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", FOUR + script], env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_small_work_has_one_thread_and_large_work_all():
    """The process has as many as before afterwards, in on_step, and in threads that start meanwhile."""
    script = f"""
{SMALL}
small, between, started = list(seen), [], []
begin = []
first = threading.Thread(target=lambda: begin.append(torch.get_num_threads()))  # what a thread has from the start
first.start()
first.join()
generate(model, 2, length=8, steps=1, on_step=lambda step: between.append(torch.get_num_threads()))
real = PartitionTransformer.forward

def forward(*args):
    seen.append(torch.get_num_threads())
    other = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
    other.start()
    other.join()
    return real(*args)

PartitionTransformer.forward = forward
seen.clear()
log_likelihood(model, "ab", samples=1)
plain = list(seen)
seen.clear()
threads.GRAIN = 1 << 16
{SMALL}
print(json.dumps([small, between, plain, begin, started, seen, torch.get_num_threads()]))
"""
    small, between, plain, begin, started, large, after = told(script)
    assert small == [1, 1]
    assert between == [4]
    assert set(plain) == {1}
    assert set(started) == set(begin)
    assert large == [4, 4]
    assert after == 4


def test_a_number_in_the_environment_stays():
    chosen = told(f"{SMALL}\nprint(json.dumps([seen, torch.get_num_threads()]))", OMP_NUM_THREADS="4")
    assert chosen == [[4, 4], 4]


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_of_the_command_line_wait_without_keeping_a_core(given, expected):
    """Set before torch is loaded, which reads it then; a setting of the user's stays."""
    script = """
import os, sys
from maskless.cli import main
early = "torch" not in sys.modules
sys.argv = ["maskless", "models", "--json"]
try:
    main()
except SystemExit:
    print(early, os.environ.get("GOMP_SPINCOUNT"), file=sys.stderr)
"""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", script], env=unset | given, capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["True", expected]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_number_that_was_set_stays_but_for_a_forked_process():
    """Of GNU's OpenMP it would wait for ever: the threads of the parent are not in the child."""
    script = f"""
torch.set_num_threads(3)
{SMALL}
many = torch.randint(257, (64, 64))
alone = log_likelihood(model, many, samples=1)
child = os.fork()
if child == 0:
    signal.alarm(120)  # ends it
    os._exit(0 if torch.allclose(log_likelihood(model, many, samples=1), alone) else 1)
print(json.dumps([seen, torch.get_num_threads(), os.waitpid(child, 0)[1]]))
"""
    assert told(script) == [[3, 3], 3, 0]
