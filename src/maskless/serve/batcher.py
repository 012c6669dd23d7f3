"""The batcher: one thread that owns a network and steps the rows that are under way; rows join and leave between calls.

A job is a request: some rows, who wants to know, and until when. Jobs share the slots whatever the number of their rows
(shares.py): a row may lose its slot to one of another job, and resumes later where it was. Where the rows in slots are
too many for one call, the calls are shared in the same way. A job that is cancelled or late leaves before the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, zip_longest

from maskless.drafts import Drafts, Step
from maskless.engine import Slots
from maskless.nn import device_of
from maskless.sampling import Plain, cells_of
from maskless.serve.rows import ActiveSequence, advance, batches, begin, due
from maskless.serve.shares import FairShare, shares

log = logging.getLogger("maskless.serve")
LATE = "not done within the time limit: ask for fewer steps or a shorter text"


class BusyError(Exception):
    """The server cannot take or finish this request now."""


@dataclass(eq=False)
class Job:
    """Drafts that were asked for together. The callbacks are called in the batcher's thread and must not wait."""

    drafts: Drafts
    on_end: Callable[[Exception | None], None]  # None: all rows are done
    on_step: Callable[[list[Step]], None] | None = None
    deadline: float = float("inf")  # of time.monotonic()
    cancelled: bool = False
    calls: int = 0  # of the network in which it had a part
    targets: int = 0  # of its rows in these calls
    finished: int = 0  # rows

    def cancel(self) -> None:
        """Leave before the next step; from any thread."""
        self.cancelled = True

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def gone(self) -> bool:
        return self.cancelled or self.late


@dataclass
class Counts:
    """What a batcher has done so far."""

    steps: int = 0  # calls of the network
    rows: int = 0  # rows in all those calls: rows / steps is the mean size of a batch
    tokens: int = 0
    seconds: float = 0.0
    cancelled: int = 0
    refused: int = 0
    late: int = 0
    failed: int = 0


class Batcher:
    """Steps rows of one network, at most `batch` at a time; at most `queue` jobs have rows without a slot."""

    def __init__(
        self,
        name: str,
        backend: Plain,
        vocab: int,
        *,
        batch: int = 64,
        queue: int = 64,
        share: FairShare | None = None,
    ):
        self.name, self.backend, self.vocab = name, backend, vocab
        self.cells = cells_of(device_of(backend.network))
        self.share = share or FairShare()  # shared by the models of a server
        self.batch, self.queue = batch, queue
        self.counts = Counts()
        self.jobs: list[Job] = []  # that are not done, in the order in which they came
        self.slots: dict[Job, list[ActiveSequence]] = {}  # rows that have one; replaced whole: others read it
        self.stepped, self.began = 0, False  # calls that were steps, and whether the last one was another
        self.changed = threading.Condition()
        self.closing = False
        self.thread = threading.Thread(target=self._work, name=f"batcher-{name}", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> None:
        """Let a job in; raises BusyError where too many wait already."""
        with self.changed:
            if self.closing:
                raise BusyError("the server is stopping")
            if self._waiting >= self.queue:
                self._tell([job for job in self.jobs if job.gone and job not in self.slots])
            if (waiting := self._waiting) >= self.queue:
                self.counts.refused += 1
                raise BusyError(f"the queue is full ({waiting} waiting): try again in a moment")
            self.jobs.append(job)
            self.changed.notify()

    def stop(self) -> None:
        """End after the step that is under way; what is not done by then is told so."""
        with self.changed:
            self.closing = True
            self.changed.notify()

    def close(self, patience: float = 5.0) -> None:
        """Stop, and wait for the end."""
        self.stop()
        self.thread.join(patience)

    @property
    def active(self) -> int:
        return sum(map(len, self.slots.values()))

    @property
    def pending(self) -> list[Job]:
        """Jobs with rows that have no slot."""
        return [job for job in self.jobs if job.finished + len(self.slots.get(job, ())) < len(job.drafts)]

    @property
    def _waiting(self) -> int:
        """Jobs that will find no slot before the next step."""
        return len(self.pending) - (self.batch - self.active)

    def _work(self) -> None:
        while self._ready():
            try:
                self._keep()
                self._call()
                if not self.slots:
                    self._keep()
            except Exception as error:  # whatever it was, nobody waits for ever
                log.exception("the batcher failed")
                self._fail(set(self.slots), error)
        self.share.leave(self.name)
        for job in self.jobs:
            job.on_end(BusyError("the server is stopping"))
        self.slots, self.jobs = {}, []

    def _keep(self) -> None:
        """All rows without a slot have left, and what was encoded of those that are due has changed."""
        if isinstance(self.backend, Slots):
            self.backend.keep({(row.drafts, row.at) for rows in self.slots.values() for row in rows if not row.due})

    def _ready(self) -> bool:
        """Wait for work, see who leaves and who gets a slot; false when there is to be no more."""
        with self.changed:
            if not self.jobs:
                self.share.leave(self.name)
            self.changed.wait_for(lambda: self.jobs or self.closing)
            self._leave()
            self._assign()
            return not self.closing

    def _leave(self) -> None:
        """Free the slots of jobs that were cancelled or are late, and forget those that wait."""
        gone = [job for job in self.jobs if job.gone]
        if gone:
            self.slots = {job: rows for job, rows in self.slots.items() if job not in gone}
            self._tell(gone)

    def _tell(self, gone: list[Job]) -> None:
        """Jobs that have no slot any more wait no longer."""
        for job in gone:
            if job.late:
                self.counts.late += 1
                job.on_end(BusyError(LATE))
            else:
                self.counts.cancelled += 1
        self.jobs = [job for job in self.jobs if job not in gone]

    def _assign(self) -> None:
        """Deal out the slots. The first rows of a job that are not done have its slots, so few change theirs."""
        wanted = [len(job.drafts) - job.finished for job in self.jobs]
        given = shares(wanted, [job.calls for job in self.jobs], self.batch)
        slots = {}
        for job, some in zip(self.jobs, given, strict=True):
            rows = (ActiveSequence(job.drafts, at) for at in range(len(job.drafts)))
            if some:
                slots[job] = list(islice((row for row in rows if not row.done), some))
        self.slots = slots

    def _call(self) -> None:
        """One call: a step of as many rows as fit or, alternately where there are both, rows that begin a round."""
        rows = self._order()
        ready, waiting = [row for row in rows if not row.due], due(rows, self.vocab, self.cells)
        self.began = bool(waiting) and not (ready and self.began)
        if self.began:
            self._step(waiting[0], begin)
        elif ready:
            self.stepped += 1
            self._step(batches(ready, self.vocab, self.cells)[0], advance)

    def _order(self) -> list[ActiveSequence]:
        """The rows in slots, as they come next: alternately one of the job that came first and one of the job that will
        have had least. So a short request has a part in nearly every call, however much the others ask for."""
        of = {job: sorted(rows, key=lambda row: row.number) for job, rows in self.slots.items()}
        first = [row for rows in of.values() for row in rows]
        rounds = zip_longest(*(of[job] for job in sorted(of, key=lambda job: job.targets + of[job][0].size)))
        least = [row for one in rounds for row in one if row is not None]
        orders = (first, least) if self.stepped % 2 else (least, first)  # both begin: a row may fill a call alone
        return list(dict.fromkeys(row for both in zip(*orders, strict=True) for row in both))

    def _step(
        self, group: list[ActiveSequence], take: Callable[[list[ActiveSequence], Plain], dict[Drafts, list[Step]]]
    ) -> None:
        """Take a step of these rows; it lands something in each of them, or nothing in any."""
        of = {job.drafts: job for job in self.jobs}
        jobs: Counter[Job] = Counter()
        for row in group:
            jobs[of[row.drafts]] += row.size
        try:
            with self.share.turn(self.name):
                begin = time.perf_counter()
                landed = take(group, self.backend)
                self.counts.seconds += time.perf_counter() - begin
        except Exception as error:
            log.exception("a step of %d rows failed", len(group))
            self.counts.failed += 1
            if len(jobs) == 1:
                self._fail(set(jobs), error)
                return
            for job in jobs:  # one by one: it may be the fault of one of them, or of all being too much at once
                self._step([row for row in group if row.drafts is job.drafts], take)
            return
        for job, targets in jobs.items():
            job.calls += 1
            job.targets += targets
        self.counts.steps += 1
        self.counts.rows += len(group)
        self.counts.tokens += sum(len(one.tokens) for steps in landed.values() for one in steps)
        self.slots = {job: left for job, rows in self.slots.items() if (left := [row for row in rows if not row.done])}
        for row in group:
            of[row.drafts].finished += row.done
        for job in jobs:
            if job.on_step is not None and job.drafts in landed:
                job.on_step(landed[job.drafts])
            if job.finished == len(job.drafts):
                with self.changed:
                    self.jobs.remove(job)
                job.on_end(None)

    def _fail(self, jobs: set[Job], error: Exception) -> None:
        with self.changed:
            self.jobs = [job for job in self.jobs if job not in jobs]
            self.slots = {job: rows for job, rows in self.slots.items() if job not in jobs}
        for job in jobs:
            job.on_end(error)
