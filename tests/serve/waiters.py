"""Jobs of tests: each is waited for, and a batcher that hangs is a failure."""

import threading
import time

from maskless.how import How
from maskless.serve import texts
from maskless.serve.batcher import Job

PATIENCE = 60  # seconds for what takes none: a busy machine is no failure


def until(happened):
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Waiter:
    """A job and how it ended."""

    def __init__(self, host, text="the [6] .", n=1, deadline=float("inf"), **how):
        self.drafts = texts.drafts_of(host, [texts.from_template(host, text)], How(**how), n)
        self.ended, self.error, self.steps = threading.Event(), None, []
        self.job = Job(self.drafts, on_end=self.end, on_step=self.steps.append, deadline=deadline)
        host.batcher.submit(self.job)

    def end(self, error):
        self.error = error
        self.ended.set()

    def wait(self):
        assert self.ended.wait(PATIENCE)
        return self


def all_well(*waiters: Waiter) -> None:
    for one in waiters:
        assert one.wait().error is None
