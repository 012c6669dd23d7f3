"""The batcher: rows join and leave between steps, the queue is bounded, and one failure is not everybody's."""

import threading
import time

import pytest
import torch
from waiters import PATIENCE, Waiter, all_well, until

from maskless import sampling
from maskless.engine import backends
from maskless.serve.batcher import BusyError
from maskless.serve.host import Host, Limits


class Gate:
    """A network that stops before each call until it is let through."""

    def __init__(self, host):
        self.quick, self.gate, self.calls, self.sizes = host.batcher.backend.logits, threading.Semaphore(0), 0, []
        host.batcher.backend.logits = self

    def __call__(self, asks):
        self.calls += 1
        self.sizes.append(sum(len(ask.rows) for ask in asks))
        assert self.gate.acquire(timeout=PATIENCE)
        return self.quick(asks)

    def let(self, n=1):
        self.gate.release(n)

    def reached(self, calls):
        until(lambda: self.calls >= calls)


@pytest.fixture
def make(models, keeping):
    hosts = []

    def host(kind="pgm", **limits) -> Host:
        hosts.append(Host(kind, (models | keeping)[kind], Limits(**limits)))
        return hosts[-1]

    yield host
    for one in hosts:
        one.batcher.close()


@pytest.fixture
def gated(make):
    """gated(kind, **limits): a host, and the gate before its network."""

    def host(kind="pgm", **limits) -> tuple[Host, Gate]:
        made = make(kind, **limits)
        return made, Gate(made)

    return host


def test_rows_join_a_step_that_is_about_to_begin(gated):
    host, gate = gated()
    first = Waiter(host, steps=6, seed=1)
    gate.reached(1)
    second = Waiter(host, steps=3, seed=2, n=2)
    gate.let(100)
    all_well(first, second)
    assert gate.sizes == [1, 3, 3, 3, 1, 1]
    assert len(first.steps) == 6
    assert host.batcher.counts.tokens == 18


def test_a_cancelled_job_frees_its_slot_within_a_step(gated):
    host, gate = gated(batch=1)
    leaving = Waiter(host, steps=6)
    gate.reached(1)
    waiting = Waiter(host, steps=2)
    leaving.job.cancel()
    gate.let(1)  # the step that was under way
    gate.reached(2)
    assert list(host.batcher.slots) == [waiting.job]
    gate.let(100)
    all_well(waiting)
    assert host.batcher.counts.cancelled == 1
    assert not leaving.ended.is_set()


def sitting(waiter, host):
    return len(host.batcher.slots.get(waiter.job, ()))


@pytest.mark.parametrize("kind", ["pgm", "ordered"])
def test_a_short_request_has_a_slot_at_once(make, kind):
    """Also where requests of many rows have all of them: rows stand up, go on later, and come out as they should."""
    host = make(kind, batch=8)
    many, one = {"text": "the [12] .", "steps": 12, "n": 4}, {"text": "a [3]", "steps": 3, "seed": 9}
    alone = [Waiter(host, **many, seed=i).wait().drafts.tokens.tolist() for i in range(2)]
    gate = Gate(host)
    long = [Waiter(host, **many, seed=i) for i in range(2)]
    gate.let(3)
    gate.reached(4)
    assert [sitting(waiter, host) for waiter in long] == [4, 4]
    short = Waiter(host, **one)
    gate.let(4)  # the call that has begun, and three
    gate.reached(8)
    assert short.ended.is_set()
    assert gate.sizes[1:7] == [8] * 6  # the calls stay full
    assert not any(waiter.ended.is_set() for waiter in long)
    gate.let(100)
    for waiter, tokens in zip(long, alone, strict=True):
        assert waiter.wait().error is None
        assert waiter.drafts.tokens.tolist() == tokens
    assert len({len(waiter.steps) for waiter in long}) == 2  # a row of one of them had to wait


def test_a_light_request_does_not_wait_for_all_heavy_rows(gated):
    """Where a row fills a call, every second call is for those that have had least, and every other for the oldest."""
    host, gate = gated()
    host.batcher.vocab = 1 << 30  # so that no two rows fit into a call
    first = Waiter(host, steps=1)
    gate.reached(1)
    heavy = [Waiter(host, "[40]", steps=1, n=4, seed=seed) for seed in range(3)]
    light = Waiter(host, "a [3]", steps=3)
    gate.let(1 + 6)
    gate.reached(8)
    assert first.ended.is_set()
    assert light.ended.is_set()
    assert len(heavy[0].steps) == 3
    gate.let(100)
    all_well(*heavy)


@pytest.mark.parametrize(("batch", "queue"), [(1, 2), (4, 1)])
def test_the_queue_is_bounded(gated, batch, queue):
    """Who finds a free slot does not wait."""
    host, gate = gated(batch=batch, queue=queue)
    jobs = [Waiter(host, steps=1)]
    gate.reached(1)
    jobs += [Waiter(host, steps=1) for _ in range(batch - 1 + queue)]
    with pytest.raises(BusyError, match=rf"queue is full \({queue} waiting\)"):
        Waiter(host, steps=1)
    gate.let(100)
    all_well(*jobs)
    assert host.batcher.counts.refused == 1


def test_a_late_job_is_told_so(gated):
    host, gate = gated()
    late = Waiter(host, steps=6)
    gate.reached(1)
    late.job.deadline = time.monotonic()  # it passes in the first step
    gate.let(100)
    assert "time limit" in str(late.wait().error)
    assert len(late.steps) == 1


@pytest.mark.parametrize("kind", ["pgm", "ordered"])
def test_the_fault_of_one_is_not_that_of_all(make, kind):
    """A step that fails is taken again, one request at a time: the others come out as they would have."""
    host = make(kind)
    alone = [Waiter(host, steps=6, seed=seed).wait().drafts.tokens.tolist() for seed in range(3)]
    gate = Gate(host)
    jobs = [Waiter(host, steps=6, seed=seed) for seed in range(3)]
    bad = Waiter(host, steps=6, seed=9)
    quick = gate.quick

    def sometimes(asks):
        if any(ask.drafts is bad.drafts for ask in asks) and int(bad.drafts.number[0]) > 2:
            raise RuntimeError("one of these is bad")
        return quick(asks)

    host.batcher.backend.logits = sometimes
    gate.let(100)
    assert "one of these" in str(bad.wait().error)
    for one, tokens in zip(jobs, alone, strict=True):
        assert one.wait().error is None
        assert one.drafts.tokens.tolist() == tokens
        assert len(one.steps) == 6
    assert host.batcher.counts.failed == 2  # together, and the bad one alone


def test_a_request_that_fails_in_one_of_its_calls_is_out_of_the_others(gated):
    host, gate = gated()
    host.batcher.vocab = 1 << 30  # so that no two rows fit into a call
    first = Waiter(host, steps=1)
    gate.reached(1)
    bad, good = Waiter(host, n=3), Waiter(host, n=3)
    host.batcher.backend.logits = lambda asks: 1 / 0 if asks[0].drafts is bad.drafts else gate.quick(asks)
    gate.let(1)
    assert "division" in str(bad.wait().error)
    all_well(first, good)
    assert host.batcher.counts.failed == 1


def test_nobody_waits_for_ever_whatever_fails(make):
    host = make("ordered")
    host.batcher.backend.keep = lambda rows: 1 / len(rows)  # fails where nobody is there
    all_well(Waiter(host, steps=2))
    host.batcher.backend.keep = lambda rows: 1 / 0 if rows else None
    assert "division" in str(Waiter(host).wait().error)
    host.batcher.backend.keep = lambda rows: None
    all_well(Waiter(host))


def test_what_a_cancelled_row_had_kept_is_given_back(gated):
    host, gate = gated("ordered")
    jobs = [Waiter(host, steps=6, seed=seed) for seed in range(3)]
    gate.reached(1)
    gate.let(1)
    gate.reached(2)
    slots = host.batcher.backend.slots
    assert {owner[0] for owner in slots.owners} == {one.drafts for one in jobs if one.steps}
    jobs[0].job.cancel()
    gate.let(1)
    gate.reached(3)
    assert {owner[0] for owner in slots.owners} == {one.drafts for one in jobs[1:]}
    gate.let(100)
    all_well(*jobs[1:])
    until(lambda: not slots.owners)


@pytest.mark.parametrize("kind", ["pgm", "ordered"])
def test_rows_that_begin_a_round_share_a_call_that_counts(gated, kind):
    host, gate = gated(kind)
    first = Waiter(host, "the [16] .", steps=4, n=3, revise=2)
    gate.let(100)
    first.wait()
    assert gate.sizes == [3] * 6  # 4 of the draft, and one of each round
    assert host.batcher.counts.steps == 6 + 2
    assert host.batcher.counts.tokens == 3 * (16 + 2 + 1)


def test_rows_that_begin_a_round_do_not_wait_for_others(gated):
    host, gate = gated()
    long = Waiter(host, "[40]", steps=40)
    gate.reached(1)
    revised = Waiter(host, "the [16] .", steps=2, revise=2)
    gate.let(5)  # one that has begun, two of the draft, and one of each round
    gate.reached(6)
    assert revised.ended.is_set()
    assert len(long.steps) == 5
    gate.let(100)
    all_well(long)


def test_a_round_that_cannot_begin_is_the_fault_of_one(make, monkeypatch):
    host = make("ordered")
    how = {"text": "the [16] .", "steps": 4, "revise": 2}
    alone = Waiter(host, **how, seed=1).wait().drafts.tokens.tolist()
    gate, quick = Gate(host), sampling.to_revise
    good, bad = Waiter(host, **how, seed=1), Waiter(host, **how, seed=2)
    wrong = bad.drafts.keys_of(torch.arange(1), 1)

    def sometimes(network, tokens, known, wanted, keys, **given):
        return 1 / 0 if wrong in keys else quick(network, tokens, known, wanted, keys, **given)

    monkeypatch.setattr(sampling, "to_revise", sometimes)
    gate.let(100)
    assert "division" in str(bad.wait().error)
    assert good.wait().error is None
    assert good.drafts.tokens.tolist() == alone


def test_who_has_left_the_queue_keeps_nobody_out(gated):
    """Also while a step is under way."""
    host, gate = gated(batch=1, queue=1)
    first = Waiter(host, steps=1)
    gate.reached(1)
    for _ in range(5):
        Waiter(host, steps=1).job.cancel()
    last = Waiter(host, steps=1)
    assert len(host.batcher.pending) == 1
    assert host.batcher.counts.cancelled == 5
    gate.let(100)
    all_well(first, last)


def test_rows_whose_memory_would_not_fit_wait(make, monkeypatch):
    monkeypatch.setattr(backends, "KEPT", 1)
    host = make("ordered")
    jobs = [Waiter(host, steps=3, seed=seed) for seed in range(3)]
    all_well(*jobs)
    assert host.batcher.counts.rows == host.batcher.counts.steps == 9


def test_closing_tells_those_who_wait(gated):
    host, gate = gated(batch=1)
    jobs = [Waiter(host, steps=6), Waiter(host, steps=6)]
    gate.reached(1)
    closing = threading.Thread(target=host.batcher.close)
    closing.start()
    until(lambda: host.batcher.closing)
    gate.let(100)
    closing.join(PATIENCE)
    assert all("stopping" in str(one.wait().error) for one in jobs)
    with pytest.raises(BusyError, match="stopping"):
        Waiter(host)
