"""Ctrl-C while a run trains: the step that is under way is finished and saved before the run stops."""

from __future__ import annotations

import signal
import threading


class StoppedError(ValueError):
    """What stops a run that can be resumed; the command line says how."""


class Interruption:
    """Put around the steps of a run: Ctrl-C sets `asked` and is raised where the block ends; a second one at once.

    Outside the main thread, and where Ctrl-C is ignored or somebody else handles it, it changes nothing.
    """

    def __enter__(self) -> Interruption:
        self.asked = False
        self._heard = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._heard:
            signal.signal(signal.SIGINT, self._hear)
        return self

    def _hear(self, *_: object) -> None:
        """Runs between any two instructions of the main thread, so it takes no lock and prints nothing."""
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.asked and kind is None:
            raise KeyboardInterrupt
