"""What is logged: the same line over and over is said a few times, and then how often."""

from __future__ import annotations

import logging
import threading
import time

FEW, PERIOD = 5, 60.0  # so many lines that begin alike in so many seconds
KINDS = 256  # of lines that are remembered


class Throttle(logging.Filter):
    """Lets few lines of a kind through; the first of the next period says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.seen: dict[tuple[str, ...], tuple[float, int]] = {}  # of each kind: when its period began, lines since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is let through; those that begin alike are, with the same kind of error."""
        error = record.exc_info[0] if record.exc_info else None
        kind, now = (record.name, str(record.msg).partition("\n")[0], str(error)), time.monotonic()
        with self.lock:
            if len(self.seen) > KINDS:
                self.seen.clear()
            begun, count = self.seen.get(kind, (now, 0))
            if now - begun > PERIOD:
                if count > FEW:
                    record.msg = f"({count - FEW:,} more lines like this were left out) {record.msg}"
                begun, count = now, 0
            self.seen[kind] = begun, count + 1
        return count < FEW


THROTTLE = Throttle()


def throttle(*names: str) -> None:
    """Let these loggers repeat themselves a few times only."""
    for name in names:
        logging.getLogger(name).addFilter(THROTTLE)
