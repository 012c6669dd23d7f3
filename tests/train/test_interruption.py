"""Ctrl-C waits for the end of a step, a second one does not, and nobody else's handler is touched."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from maskless.train.interruption import Interruption


@pytest.fixture(autouse=True)
def _handler_put_back(ctrl_c) -> Iterator[None]:
    yield
    assert handler() is signal.default_int_handler


def handler() -> object:
    return signal.getsignal(signal.SIGINT)


def steps(ctrl_c: Callable[[], None], presses: int, done: list[bool]) -> None:
    """Take a step after each Ctrl-C, and write down whether it was noted."""
    with Interruption() as interruption:
        for _ in range(presses):
            ctrl_c()
            done.append(interruption.asked)


@pytest.mark.parametrize("presses", [1, 3])
def test_the_first_one_waits_and_the_second_stops_at_once(presses, ctrl_c):
    done: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        steps(ctrl_c, presses, done)
    assert done == [True]


def test_without_one_nothing_happens(ctrl_c):
    steps(ctrl_c, 0, [])


def test_an_error_is_not_hidden(ctrl_c):
    class Broken(list):
        def append(self, _: object) -> None:
            raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        steps(ctrl_c, 1, Broken())


@pytest.mark.parametrize("other", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_another_handler_stays(other, ctrl_c):
    done: list[bool] = []
    signal.signal(signal.SIGINT, other)
    steps(ctrl_c, 2, done)
    after = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (after, done) == (other, [False, False])


def test_another_thread_leaves_it_to_the_main_one():
    seen = []

    def work() -> None:
        with Interruption() as interruption:
            seen.append((handler(), interruption.asked))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(signal.default_int_handler, False)]
