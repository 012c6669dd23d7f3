"""The batcher: rows join and leave between steps, the queue is bounded, and one failure is not everybody's."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from maskless import sampling
from maskless.engine import backends
from maskless.how import How
from maskless.serve import fair_share, texts
from maskless.serve.batcher import BusyError, Job
from maskless.serve.fair_share import FairShare
from maskless.serve.host import Host, Limits

PATIENCE = 60  # seconds for what takes none: a busy machine is no failure


def until(happened):
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Waiter:
    """A job and how it ended."""

    def __init__(self, host, text="the [6] .", n=1, deadline=float("inf"), **how):
        self.drafts = texts.drafts_of(host, texts.from_template(host, text), How(**how), n)
        self.ended, self.error, self.steps = threading.Event(), None, []
        self.job = Job(self.drafts, on_end=self.end, on_step=self.steps.append, deadline=deadline)
        host.batcher.submit(self.job)

    def end(self, error):
        self.error = error
        self.ended.set()

    def wait(self):
        assert self.ended.wait(PATIENCE)
        return self


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


def test_a_cancelled_job_frees_its_slot_within_a_step(make):
    host = make(batch=1)
    gate = Gate(host)
    leaving = Waiter(host, steps=6)
    gate.reached(1)
    waiting = Waiter(host, steps=2)
    leaving.job.cancel()
    gate.let(1)  # the step that was under way
    gate.reached(2)
    assert list(host.batcher.slots) == [waiting.job]
    gate.let(100)
    waiting.wait()
    assert waiting.error is None
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


def test_a_light_request_does_not_wait_for_all_heavy_rows(make):
    """Where a row fills a call, every second call is for those that have had least, and every other for the oldest."""
    host = make()
    host.batcher.vocab = 1 << 30  # so that no two rows fit into a call
    gate = Gate(host)
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
    for waiter in heavy:
        assert waiter.wait().error is None


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
    late = Waiter(host, steps=6)
    gate.reached(1)
    late.job.deadline = time.monotonic()  # it passes in the first step
    gate.let(100)
    assert "time limit" in str(late.wait().error)
    assert len(late.steps) == 1


def test_a_failing_step_ends_its_jobs_and_no_others(make):
    host = make()
    quick = host.batcher.backend.logits

    def fails(rows):
        raise RuntimeError("a broken network")

    host.batcher.backend.logits = fails
    assert "broken" in str(Waiter(host).wait().error)
    host.batcher.backend.logits = quick
    assert Waiter(host).wait().error is None


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


def test_a_request_that_fails_in_one_of_its_calls_is_out_of_the_others(make):
    host = make()
    host.batcher.vocab = 1 << 30  # so that no two rows fit into a call
    gate = Gate(host)
    first = Waiter(host, steps=1)
    gate.reached(1)
    bad, good = Waiter(host, n=3), Waiter(host, n=3)
    host.batcher.backend.logits = lambda asks: 1 / 0 if asks[0].drafts is bad.drafts else gate.quick(asks)
    gate.let(1)
    assert "division" in str(bad.wait().error)
    assert first.wait().error is good.wait().error is None
    assert host.batcher.counts.failed == 1


def test_nobody_waits_for_ever_whatever_fails(make):
    host = make("ordered")
    host.batcher.backend.keep = lambda rows: 1 / len(rows)  # fails where nobody is there
    first = Waiter(host, steps=2).wait()
    assert first.error is None
    host.batcher.backend.keep = lambda rows: 1 / 0 if rows else None
    assert "division" in str(Waiter(host).wait().error)
    host.batcher.backend.keep = lambda rows: None
    assert Waiter(host).wait().error is None


def test_what_a_cancelled_row_had_kept_is_given_back(make):
    host = make("ordered")
    gate = Gate(host)
    jobs = [Waiter(host, steps=6, seed=seed) for seed in range(3)]
    gate.reached(1)
    gate.let(1)
    gate.reached(2)
    seats = host.batcher.backend.seats
    assert {owner[0] for owner in seats.owners} == {one.drafts for one in jobs if one.steps}
    jobs[0].job.cancel()
    gate.let(1)
    gate.reached(3)
    assert {owner[0] for owner in seats.owners} == {one.drafts for one in jobs[1:]}
    gate.let(100)
    for one in jobs[1:]:
        one.wait()
    until(lambda: not seats.owners)


@pytest.mark.parametrize("kind", ["pgm", "ordered"])
def test_rows_that_begin_a_round_share_a_call_that_counts(make, kind):
    host = make(kind)
    gate = Gate(host)
    first = Waiter(host, "the [16] .", steps=4, n=3, revise=2)
    gate.let(100)
    first.wait()
    assert gate.sizes == [3] * 6  # 4 of the draft, and one of each round
    assert host.batcher.counts.steps == 6 + 2
    assert host.batcher.counts.tokens == 3 * (16 + 2 + 1)


def test_rows_that_begin_a_round_do_not_wait_for_others(make):
    host = make()
    gate = Gate(host)
    long = Waiter(host, "[40]", steps=40)
    gate.reached(1)
    revised = Waiter(host, "the [16] .", steps=2, revise=2)
    gate.let(5)  # one that has begun, two of the draft, and one of each round
    gate.reached(6)
    assert revised.ended.is_set()
    assert len(long.steps) == 5
    gate.let(100)
    assert long.wait().error is None


def test_a_round_that_cannot_begin_is_the_fault_of_one(make, monkeypatch):
    host = make("ordered")
    how = {"text": "the [16] .", "steps": 4, "revise": 2}
    alone = Waiter(host, **how, seed=1).wait().drafts.tokens.tolist()
    gate, quick = Gate(host), sampling.erased
    good, bad = Waiter(host, **how, seed=1), Waiter(host, **how, seed=2)
    wrong = bad.drafts.keys_of(torch.arange(1), 1)

    def sometimes(network, tokens, known, wanted, keys, **given):
        return 1 / 0 if wrong in keys else quick(network, tokens, known, wanted, keys, **given)

    monkeypatch.setattr(sampling, "erased", sometimes)
    gate.let(100)
    assert "division" in str(bad.wait().error)
    assert good.wait().error is None
    assert good.drafts.tokens.tolist() == alone


def test_who_finds_a_free_slot_does_not_wait(make):
    host = make(batch=4, queue=1)
    gate = Gate(host)
    jobs = [Waiter(host, steps=1)]
    gate.reached(1)
    jobs += [Waiter(host, steps=1) for _ in range(3)]  # three slots are free
    jobs.append(Waiter(host, steps=1))
    with pytest.raises(BusyError, match="1 requests wait"):
        Waiter(host, steps=1)
    gate.let(100)
    for one in jobs:
        assert one.wait().error is None


def test_who_has_left_the_queue_keeps_nobody_out(make):
    """Also while a step is under way."""
    host = make(batch=1, queue=1)
    gate = Gate(host)
    first = Waiter(host, steps=1)
    gate.reached(1)
    for _ in range(5):
        Waiter(host, steps=1).job.cancel()
    last = Waiter(host, steps=1)
    assert len(host.batcher.pending) == 1
    assert host.batcher.counts.cancelled == 5
    gate.let(100)
    assert first.wait().error is last.wait().error is None


def test_rows_whose_memory_would_not_fit_wait(make, monkeypatch):
    monkeypatch.setattr(backends, "KEPT", 1)
    host = make("ordered")
    jobs = [Waiter(host, steps=3, seed=seed) for seed in range(3)]
    for one in jobs:
        assert one.wait().error is None
    assert host.batcher.counts.rows == host.batcher.counts.steps == 9


def test_closing_tells_those_who_wait(make):
    host = make(batch=1)
    gate = Gate(host)
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


def test_models_side_by_side_share_the_time_and_not_the_steps(models, monkeypatch):
    """One whose steps take eight times as long gets an eighth of them while both have work."""
    now, taken, inside, at_once = [0.0], [], [], []
    monkeypatch.setattr(fair_share, "time", SimpleNamespace(perf_counter=lambda: now[0]))  # only what is told below
    monkeypatch.setattr(fair_share, "PATIENCE", PATIENCE)
    share, costs = FairShare(), {"quick": 1.0, "slow": 8.0}
    hosts = [Host(name, models["pgm"], Limits(steps=100), share) for name in costs]

    def costly(name, logits):
        def step(rows):
            until(lambda: len(share.working) == 2 or len(taken) > 1)  # both are there when the first one is done
            taken.append(name)
            inside.append(1)
            at_once.append(len(inside))
            time.sleep(0.001)
            now[0] += costs[name]
            inside.pop()
            return logits(rows)

        return step

    for host in hosts:
        host.batcher.backend.logits = costly(host.name, host.batcher.backend.logits)
    quick, slow = (Waiter(host, "[40]", steps=40) for host in hosts)
    quick.wait()
    slow.wait()
    last = len(taken) - 1 - taken[::-1].index("quick")
    assert taken.count("quick") == 40
    assert 40 / 8 - 1 <= taken[:last].count("slow") <= 40 / 8 + 1
    assert max(at_once) == 1
    for host in hosts:
        host.batcher.close()


def test_who_comes_after_a_pause_does_not_catch_up():
    share = FairShare()
    for _ in range(3):
        with share.turn("a"):
            time.sleep(0.01)
    with share.turn("b"):
        pass
    assert share.used["b"] >= share.used["a"] - 1e-3
    share.leave("a")
    with share.turn("b"):
        time.sleep(0.001)
    assert share.working == {"b"}
