"""The batcher: one thread that owns a network and steps all rows that are under way; rows join and leave between steps.

A job is a request: some rows, who wants to know, and until when. Rows are admitted in the order in which their jobs
came. A job that is cancelled or late leaves before the next step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from maskless.serve.rows import Answers, Landed, Row, Rules, advance, batches, cells_of, due, reconsider
from maskless.serve.turns import Turns

log = logging.getLogger("maskless.serve")


class BusyError(Exception):
    """The server cannot take or finish this request now."""


class LateError(BusyError):
    """The time for this request is over."""

    def __init__(self) -> None:
        super().__init__("not done within the time limit: ask for fewer steps or a shorter text")


@dataclass(eq=False)
class Job:
    """Rows that were asked for together. The callbacks are called in the batcher's thread and must not wait."""

    rows: Sequence[Row]
    on_end: Callable[[Exception | None], None]  # None: all rows are done
    on_step: Callable[[list[tuple[int, Landed]]], None] | None = None  # (number of the row, what landed)
    deadline: float = float("inf")  # of time.monotonic()
    cancelled: bool = False
    started: int = 0  # rows that have been admitted
    finished: int = 0

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


@dataclass(eq=False)
class _Seat:
    job: Job
    number: int
    row: Row = field(init=False)

    def __post_init__(self) -> None:
        self.row = self.job.rows[self.number]


class Batcher:
    """Steps rows of one network, at most `batch` at a time; at most `queue` jobs wait for a seat."""

    def __init__(
        self,
        name: str,
        answers: Answers,
        rules: Rules,
        vocab: int,
        *,
        batch: int = 64,
        queue: int = 64,
        turns: Turns | None = None,
    ):
        self.name, self.answers, self.rules, self.vocab = name, answers, rules, vocab
        self.cells = cells_of(rules.device)
        self.turns = turns or Turns()  # shared by the models of a server
        self.batch, self.queue = batch, queue
        self.counts = Counts()
        self.pending: deque[Job] = deque()  # jobs with rows that have no seat yet
        self.seats: list[_Seat] = []
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
                self._tell([job for job in self.pending if job.gone and not job.started])
            if (waiting := self._waiting) >= self.queue:
                self.counts.refused += 1
                raise BusyError(f"the queue is full: {waiting} requests wait already, try again in a moment")
            self.pending.append(job)
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
        return len(self.seats)

    @property
    def _waiting(self) -> int:
        """Jobs that will find no seat before the next step."""
        return len(self.pending) - (self.batch - len(self.seats))

    def _work(self) -> None:
        while self._ready():
            rows = [seat.row for seat in self.seats]
            try:
                self.answers.keep(rows)
                for group in due(rows, self.vocab, self.cells):
                    self._step(group, self._reconsider)
                for group in batches([seat.row for seat in self.seats], self.vocab, self.cells):
                    self._step(group, self._advance)
                if not self.seats:
                    self.answers.keep([])
            except Exception as error:  # whatever it was, nobody waits for ever
                log.exception("the batcher failed")
                self._fail({seat.job for seat in self.seats}, error)
        self.turns.leave(self.name)
        for job in dict.fromkeys([*(seat.job for seat in self.seats), *self.pending]):
            job.on_end(BusyError("the server is stopping"))
        self.seats, self.pending = [], deque()

    def _ready(self) -> bool:
        """Wait for work, see who leaves and who sits down; false when there is to be no more."""
        with self.changed:
            if not (self.seats or self.pending):
                self.turns.leave(self.name)
            self.changed.wait_for(lambda: self.seats or self.pending or self.closing)
            self._leave()
            self._admit()
            return not self.closing

    def _leave(self) -> None:
        """Free the seats of jobs that were cancelled or are late, and forget those that wait."""
        gone = [job for job in dict.fromkeys([*(seat.job for seat in self.seats), *self.pending]) if job.gone]
        if gone:
            self.seats = [seat for seat in self.seats if seat.job not in gone]
            self._tell(gone)

    def _tell(self, gone: list[Job]) -> None:
        """Jobs that have no seat any more wait no longer."""
        for job in gone:
            if job.late:
                self.counts.late += 1
                job.on_end(LateError())
            else:
                self.counts.cancelled += 1
        self.pending = deque(job for job in self.pending if job not in gone)

    def _admit(self) -> None:
        while self.pending and len(self.seats) < self.batch:
            job = self.pending[0]
            self.seats.append(_Seat(job, job.started))
            job.started += 1
            if job.started == len(job.rows):
                self.pending.popleft()

    def _advance(self, group: list[Row]) -> list[Landed]:
        return advance(group, self.answers, self.rules)

    def _reconsider(self, group: list[Row]) -> list[Landed]:
        reconsider(group, self.answers)
        return []

    def _step(self, group: list[Row], take: Callable[[list[Row]], list[Landed]]) -> None:
        """Take a step of these rows; it lands something in each of them, or nothing in any."""
        seats = {id(seat.row): seat for seat in self.seats}
        group = [row for row in group if id(row) in seats]  # their job may have failed in another group
        if not group:
            return
        try:
            with self.turns.turn(self.name):
                begin = time.perf_counter()
                landed = take(group)
                self.counts.seconds += time.perf_counter() - begin
        except Exception as error:
            log.exception("a step of %d rows failed", len(group))
            self.counts.failed += 1
            jobs = dict.fromkeys(seats[id(row)].job for row in group)
            if len(jobs) == 1:
                self._fail(set(jobs), error)
                return
            for job in jobs:  # one by one: it may be the fault of one of them, or of all being too much at once
                self._step([row for row in group if seats[id(row)].job is job], take)
            return
        self.counts.steps += 1
        self.counts.rows += len(group)
        self.counts.tokens += sum(len(one.tokens) for one in landed)
        of_jobs: dict[Job, list[tuple[int, Landed]]] = {}
        for row, one in zip(group, landed, strict=False):
            seat = seats[id(row)]
            of_jobs.setdefault(seat.job, []).append((seat.number, one))
            seat.job.finished += row.done
        self.seats = [seat for seat in self.seats if not seat.row.done]
        for job, steps in of_jobs.items():
            if job.on_step is not None:
                job.on_step(steps)
            if job.finished == len(job.rows):
                job.on_end(None)

    def _fail(self, jobs: set[Job], error: Exception) -> None:
        with self.changed:
            self.pending = deque(job for job in self.pending if job not in jobs)
            self.seats = [seat for seat in self.seats if seat.job not in jobs]
        for job in jobs:
            job.on_end(error)
