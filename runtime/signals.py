"""Signals become exceptions while ranks are alive, so that every way out passes the teardown."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from runtime.errors import TerminatedError


@contextmanager
def terminated_by_signal() -> Iterator[None]:
    """SIGTERM raises TerminatedError inside. Enter it after Ray has started: Ray puts a handler of its own in place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TerminatedError(signum)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the ranks behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
