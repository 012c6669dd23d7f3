"""Models that are served side by side share the processor's time, whatever a step of theirs costs."""

import time
from types import SimpleNamespace

import pytest
from waiters import PATIENCE, Waiter, all_well, until

from maskless.serve import shares
from maskless.serve.host import Host, Limits
from maskless.serve.shares import FairShare


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, which passes only where a test says so."""
    now = [0.0]
    monkeypatch.setattr(shares, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_models_side_by_side_share_the_time_and_not_the_steps(models, now, monkeypatch):
    """One whose steps take eight times as long gets an eighth of them while both have work."""
    taken, inside, at_once = [], [], []
    monkeypatch.setattr(shares, "PATIENCE", PATIENCE)
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
    all_well(quick, slow)
    last = len(taken) - 1 - taken[::-1].index("quick")
    assert taken.count("quick") == 40
    assert 40 / 8 - 1 <= taken[:last].count("slow") <= 40 / 8 + 1
    assert max(at_once) == 1
    for host in hosts:
        host.batcher.close()


def test_who_comes_after_a_pause_does_not_catch_up(now):
    share = FairShare()
    for name, seconds in (("a", 3.0), ("b", 0.0)):
        with share.turn(name):
            now[0] += seconds
    assert share.used["b"] >= share.used["a"]
    share.leave("a")
    with share.turn("b"):
        now[0] += 1.0
    assert share.working == {"b"}
