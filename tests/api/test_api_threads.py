"""One model in many hands: calls from any thread, inside one another and after a fork give what they give alone."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from api_models import of_pictures, over_bytes

import maskless
from maskless import Model, fill, generate, log_likelihood
from maskless.engine import Engine, engine_of, registry
from maskless.engine import engine as engine_module
from maskless.problems import Offsets

TEXT, WAIT = "ab[4]c[3]", 60


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads take over from one another all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def told(text: maskless.Text) -> tuple[Any, ...]:
    return str(text), text.tokens, text.steps, text.order


def inside(model: Model, seed: int) -> tuple[Any, ...]:
    """A call with calls of the same kind inside it."""
    found: list[Any] = []
    text = fill(model, TEXT, seed=seed, steps=3, on_step=lambda step: found.append(told(fill(model, TEXT, seed=9))))
    return told(text), found


def calls_of(model: Model) -> list[Callable[[int], Any]]:
    if model.layout == "image":
        grey, known = np.zeros((3, 3), np.uint8), np.eye(3, dtype=bool)
        orders = [
            lambda seed, order=order: [one.tokens.tolist() for one in generate(model, 2, seed=seed, order=order)]
            for order in ("halton", "confidence")
        ]
        return [*orders, lambda seed: fill(model, grey, known=known, label="cat", seed=seed).tokens.tolist()]
    row, places = torch.arange(97, 103)[None], torch.arange(6)[None]
    calls: list[Callable[[int], Any]] = [
        lambda seed: [told(text) for text in generate(model, 2, length=7, seed=seed)],
        lambda seed: log_likelihood(model, "abcdef", samples=2, seed=seed).tolist(),
    ]
    if model.kind == "causal":
        return calls
    return [
        *calls,
        lambda seed: told(fill(model, TEXT, seed=seed, top_p=0.9)),
        lambda seed: told(fill(model, TEXT, seed=seed, revise=2)),
        lambda seed: [told(text) for text in fill(model, [TEXT, "[2]de"], seed=seed, counts="mdlm")],
        lambda seed: inside(model, seed),
        lambda seed: model.predict(row, places, places + seed).tolist(),
    ]


@pytest.mark.parametrize("kind", ["ordered", "position", "masked", "causal", "pictures"])
def test_calls_from_eight_threads_give_what_they_give_alone(tiny, kind):
    def fresh() -> Model:
        return of_pictures(tiny) if kind == "pictures" else over_bytes(tiny, kind)

    jobs = [(number, seed) for seed in range(2) for number in range(len(calls_of(fresh())))]
    alone = [calls_of(fresh())[number](seed) for number, seed in jobs]
    calls = calls_of(fresh())  # of a model that nobody has used: threads meet at its first call
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda job: calls[job[0]](job[1]), 4 * jobs))
    assert found == 4 * alone


def test_whoever_watches_may_wait_for_a_call_of_another_thread(tiny, monkeypatch):
    """Also where calls take turns, as on a GPU."""
    model = over_bytes(tiny, "ordered")
    alone = told(fill(model, TEXT, seed=1))
    engine_of(model.network).lock = engine_module.GPU_LOCK
    found: list[Any] = []

    def watch(step: object) -> None:
        other = threading.Thread(target=lambda: found.append(told(fill(model, TEXT, seed=1))), daemon=True)
        other.start()
        other.join(WAIT)

    assert told(fill(model, TEXT, seed=1, on_step=watch)) == alone
    assert found == len(found) * [alone] != []


def test_threads_that_come_first_share_one_engine(tiny, monkeypatch):
    network, start = tiny("ordered"), threading.Barrier(8)

    def slowly(network: torch.nn.Module) -> Engine:
        for _ in range(100):
            time.sleep(0)  # let the others go first
        return Engine(network)

    def first(_: int) -> object:
        start.wait(WAIT)
        return engine_of(network)

    monkeypatch.setattr(sys.modules[engine_of.__module__], "Engine", slowly)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(first, range(8)))) == 1


def test_a_network_that_was_training_trains_again_after_the_last_call(tiny):
    """And no call that is still under way meets dropout."""
    model = over_bytes(tiny, "mean")
    alone = told(fill(model, TEXT, steps=4))
    for block in (*model.network.encoder, *model.network.decoder):
        block.dropout = 0.9
    model.train()
    begun, both, ended = threading.Event(), threading.Event(), threading.Event()

    def first() -> Any:
        return told(fill(model, TEXT, steps=4, on_step=lambda step: begun.set() or both.wait(WAIT)))

    def second() -> Any:
        return told(fill(model, TEXT, steps=4, on_step=lambda step: both.set() or ended.wait(WAIT)))

    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(first)
        assert begun.wait(WAIT)
        late = threads.submit(second)
        assert early.result(WAIT) == alone
        ended.set()  # only now the other takes its second step
        assert late.result(WAIT) == alone
    assert all(module.training for module in model.network.modules())


def in_a_child(call: Callable[[], bool]) -> int:
    """The exit status of a forked process: 0 where the call is true in it; it must not take for ever."""
    child = os.fork()
    if child == 0:
        signal.alarm(WAIT)  # ends it
        os._exit(0 if call() else 1)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_process_forked_inside_another_threads_call_waits_for_nobody(tiny, monkeypatch):
    model, fresh = over_bytes(tiny, "ordered"), over_bytes(tiny, "ordered")
    alone = told(fill(model, TEXT, seed=1, revise=1))
    locks = [registry._making, engine_module._runs_lock, engine_module.GPU_LOCK]
    offsets, held, go_on = Offsets.regular(2, 3), threading.Event(), threading.Event()
    real = torch.arange

    def slowly(*args: Any, **kwargs: Any) -> torch.Tensor:
        held.set()
        assert go_on.wait(WAIT)
        return real(*args, **kwargs)

    def hold() -> torch.Tensor:
        with locks[0], locks[1], locks[2]:
            return offsets.real  # up to Python 3.11 a cached property has a lock as well

    monkeypatch.setattr(torch, "arange", slowly)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(hold)
        assert held.wait(WAIT)
        monkeypatch.setattr(torch, "arange", real)
        status = in_a_child(lambda: all(told(fill(one, TEXT, seed=1, revise=1)) == alone for one in (model, fresh)))
        go_on.set()
        other.result(WAIT)
    assert status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_whoever_watches_may_fork(tiny):
    """The child goes on with its own call, and the mode of the network is its own as well."""
    model = over_bytes(tiny, "mean")
    alone, statuses = told(fill(model, TEXT, seed=1)), []
    model.train()

    def watch(step: maskless.sampling.Step) -> None:
        if step.number == 1:
            statuses.append(in_a_child(lambda: told(fill(model, TEXT, seed=1)) == alone))

    assert told(fill(model, TEXT, seed=1, on_step=watch)) == alone
    assert statuses == [0]
