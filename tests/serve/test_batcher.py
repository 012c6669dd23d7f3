"""The batcher: rows join and leave between steps, the queue is bounded, and one failure is not everybody's."""

import threading
import time

import pytest

from maskless.serve import texts
from maskless.serve.batcher import BusyError, Job
from maskless.serve.host import Host, Limits
from maskless.serve.turns import Turns


class Waiter:
    """A job and how it ended."""

    def __init__(self, host, text="the [6] .", deadline=float("inf"), **how):
        self.rows = texts.rows_of(host, texts.from_template(host, text), texts.Settings(**how))
        self.ended, self.error, self.steps = threading.Event(), None, []
        self.job = Job(self.rows, on_end=self.end, on_step=self.steps.append, deadline=deadline)
        host.batcher.submit(self.job)

    def end(self, error):
        self.error = error
        self.ended.set()

    def wait(self):
        assert self.ended.wait(20)
        return self


class Gate:
    """A network that stops before each call until it is let through."""

    def __init__(self, host):
        self.quick, self.gate, self.calls, self.sizes = host.batcher.network, threading.Semaphore(0), 0, []
        host.batcher.network = self

    def __call__(self, problems):
        self.calls += 1
        self.sizes.append(len(problems))
        assert self.gate.acquire(timeout=20)
        return self.quick(problems)

    def let(self, n=1):
        self.gate.release(n)

    def reached(self, calls):
        deadline = time.monotonic() + 20
        while self.calls < calls:
            assert time.monotonic() < deadline
            time.sleep(0.002)


@pytest.fixture
def make(models):
    hosts = []

    def host(**limits) -> Host:
        hosts.append(Host("pgm", models["pgm"], Limits(**limits)))
        return hosts[-1]

    yield host
    for one in hosts:
        one.batcher.close()


def test_rows_join_a_step_that_is_about_to_begin(make):
    host = make()
    gate = Gate(host)
    first = Waiter(host, steps=6, seed=1)
    gate.reached(1)
    second = Waiter(host, steps=3, seed=2, n=2)
    gate.let(100)
    first.wait()
    second.wait()
    assert gate.sizes == [1, 3, 3, 3, 1, 1]
    assert len(first.steps) == 6
    assert host.batcher.counts.tokens == 18


def test_a_cancelled_job_frees_its_seat_within_a_step(make):
    host = make(batch=1)
    gate = Gate(host)
    leaving = Waiter(host, steps=6)
    gate.reached(1)
    waiting = Waiter(host, steps=2)
    leaving.job.cancel()
    gate.let(1)  # the step that was under way
    gate.reached(2)
    assert [seat.job for seat in host.batcher.seats] == [waiting.job]
    gate.let(100)
    waiting.wait()
    assert waiting.error is None
    assert host.batcher.counts.cancelled == 1
    assert not leaving.ended.is_set()


def test_the_queue_is_bounded(make):
    host = make(batch=1, queue=2)
    gate = Gate(host)
    first = Waiter(host, steps=1)
    gate.reached(1)
    others = [Waiter(host, steps=1), Waiter(host, steps=1)]
    with pytest.raises(BusyError, match="queue is full"):
        Waiter(host, steps=1)
    gate.let(100)
    for one in [first, *others]:
        assert one.wait().error is None
    assert host.batcher.counts.refused == 1


def test_a_late_job_is_told_so(make):
    host = make()
    gate = Gate(host)
    late = Waiter(host, steps=6, deadline=time.monotonic() + 0.05)
    gate.reached(1)
    time.sleep(0.06)
    gate.let(100)
    assert "time limit" in str(late.wait().error)
    assert len(late.steps) == 1


def test_a_failing_step_ends_its_jobs_and_no_others(make):
    host = make()
    quick = host.batcher.network

    def fails(problems):
        raise RuntimeError("a broken network")

    host.batcher.network = fails
    assert "broken" in str(Waiter(host).wait().error)
    host.batcher.network = quick
    assert Waiter(host).wait().error is None


def test_closing_tells_those_who_wait(make):
    host = make(batch=1)
    gate = Gate(host)
    jobs = [Waiter(host, steps=6), Waiter(host, steps=6)]
    gate.reached(1)
    closing = threading.Thread(target=host.batcher.close)
    closing.start()
    time.sleep(0.02)
    gate.let(100)
    closing.join(10)
    assert all("stopping" in str(one.wait().error) for one in jobs)
    with pytest.raises(BusyError, match="stopping"):
        Waiter(host)


def test_models_side_by_side_share_the_time_and_not_the_steps(models):
    """One whose steps take four times as long gets a quarter of them while both have work."""
    turns, pauses = Turns(), {"quick": 0.002, "slow": 0.008}
    hosts = [Host(name, models["pgm"], Limits(steps=100), turns) for name in pauses]
    at_once, inside = [], []
    for host in hosts:
        host.batcher.network = sleeping(host.batcher.network, pauses[host.name], at_once, inside)
    quick, slow = (Waiter(host, "[40]", steps=40) for host in hosts)
    quick.wait()
    done = len(slow.steps)
    slow.wait()
    assert 5 <= done <= 22
    assert max(at_once) == 1
    for host in hosts:
        host.batcher.close()


def sleeping(network, pause, at_once, inside):
    def slept(problems):
        inside.append(1)
        at_once.append(len(inside))
        time.sleep(pause)
        inside.pop()
        return network(problems)

    return slept


def test_who_comes_after_a_pause_does_not_catch_up():
    turns = Turns()
    for _ in range(3):
        with turns.turn("a"):
            time.sleep(0.01)
    with turns.turn("b"):
        pass
    assert turns.used["b"] >= turns.used["a"] - 1e-3
    turns.leave("a")
    with turns.turn("b"):
        time.sleep(0.001)
    assert turns.working == {"b"}
