"""Signals that ask a script to stop: Ctrl-C, SIGTERM of a scheduler, SIGHUP of a terminal that closes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
# torch's launcher passes on to its processes a signal that the terminal has already sent to them.
_LAUNCHED, _SECONDS_OF_ECHO = "TORCHELASTIC_RUN_ID", 2.0


class Stopped(KeyboardInterrupt):
    """A signal ended the work; the message says where it stands. `number`: of the signal."""

    def __init__(self, number: int, message: str = "") -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}" + (f": {message}" if message else ""))


@dataclass
class StopRequest:
    """The number of the signal that asked to stop, or 0."""

    number: int = 0
    _heard: float = 0.0

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Keep the first signal; raise `Stopped` at the second."""
        echo = _LAUNCHED in os.environ and time.monotonic() - self._heard < _SECONDS_OF_ECHO
        if self.number and not echo:
            _leave(number)
        self.number = self.number or number
        self._heard = time.monotonic()


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Inside the context a signal raises `Stopped`."""
    with _heard_by(_leave):
        yield


@contextmanager
def stopping_after_the_step() -> Iterator[StopRequest]:
    """Inside the context the first signal is kept for the caller to look at; a second one raises `Stopped`."""
    request = StopRequest()
    with _heard_by(request.hear):
        yield request


def leave_signals_to_the_main_process(worker: int = 0) -> None:
    """For the workers of a loader: what a terminal or a scheduler sends to all must not end them before the step.

    A second SIGTERM does: so the loader ends what hangs.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def _leave(number: int, frame: FrameType | None = None) -> None:
    for other in _SIGNALS:  # while the stack unwinds, one more ends the process
        signal.signal(other, signal.SIG_DFL)
    if hasattr(signal, "SIGCHLD"):  # at which torch raises errors about workers that the same signal has ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raise Stopped(number)


@contextmanager
def _heard_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Only the main thread may say who hears signals; what is ignored (by `nohup`) stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
