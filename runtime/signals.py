"""Signals become exceptions while ranks are alive, so that every way out passes the teardown."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import psutil

from runtime.errors import TerminatedError

STOPPING = (signal.SIGTERM, signal.SIGHUP)
HELD = (signal.SIGINT, *STOPPING)


class SignalInterrupt(KeyboardInterrupt):
    """A signal other than SIGINT, on its way out."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signum)


@contextmanager
def terminated_by_signal() -> Iterator[None]:
    """SIGTERM inside, and SIGHUP (a terminal that is gone) unless it is ignored (`nohup`), ends in TerminatedError.

    It travels as KeyboardInterrupt, the one exception that Ray lets through when a signal comes during one of its
    calls.
    """
    if not _in_main_thread():
        yield
        return
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        raise SignalInterrupt(signum)

    listened = [signum for signum in STOPPING if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, stop) for signum in listened}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if received:
            raise TerminatedError(received[0]) from interrupt
        raise
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def signals_held(*, repeat: bool = False) -> Iterator[None]:
    """Nothing inside is cut short by one of `HELD`. repeat: raise them afterwards; else they are forgotten."""
    if not _in_main_thread():
        yield
        return
    pending: list[int] = []
    # One that is ignored stays so: what Ray starts meanwhile inherits that, under `nohup` for one.
    held = [signum for signum in HELD if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, lambda number, frame: pending.append(number)) for signum in held}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if pending and repeat:
        signal.raise_signal(pending[0])


class ExitWatch:
    """Ends this process a few seconds after its first signal, with the signal's exit code, whatever it waits for.

    A signal to the whole process group also takes the processes of Ray. The driver may then wait for them in a call
    that no Python signal handler can leave, for a minute in `ray.init`. A thread reads the signals from a socket
    (`signal.set_wakeup_fd`), because the interpreter writes them there during such a call, too.

    Args:
        limit_s: How long the process may take to stop by itself, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self.signum: int | None = None

    def start(self) -> None:
        """Watch from now to the end of the process; call it in the main thread.

        SIGTERM, and SIGHUP unless it is ignored, raise SignalInterrupt from now on.
        """
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in STOPPING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _interrupt)
        threading.Thread(target=self._watch, name="exit-watch", daemon=True).start()

    def exit(self, code: int) -> NoReturn:
        """End the process and all its descendants at once, without the exit handlers of Ray."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
                stream.flush()
        os._exit(code)

    def _watch(self) -> None:
        while self.signum is None:
            self.signum = next((number for number in self._reader.recv(64) if number in HELD), None)
        time.sleep(self._limit_s)
        with contextlib.suppress(OSError, ValueError):
            show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
            print(f"{show_cursor}error: {signal_message(self.signum)}", file=sys.stderr)
        self.exit(128 + self.signum)


def signal_message(signum: int) -> str:
    """What a user is told of a run that a signal has stopped."""
    stopped = "interrupted" if signum == signal.SIGINT else f"stopped by signal {signum}"
    return f"{stopped}; the ranks were stopped"


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise SignalInterrupt(signum)


class StarterThread:
    """A thread that runs one piece of work and then stays until it is released.

    Ray installs a signal handler of its own when it starts in the main thread, and none elsewhere. The processes that
    it starts are bound by the kernel to the thread that started them (PR_SET_PDEATHSIG), so that thread has to
    outlive them.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._released = threading.Event()
        self._failure: Exception | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Returns when the work is done, and raises what it raises."""

        def body() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  it is raised below, in the caller's thread
                self._failure = error
            finally:
                self._done.set()
            self._released.wait()

        threading.Thread(target=body, name="starter", daemon=True).start()
        self._done.wait()
        if self._failure is not None:
            raise self._failure

    def release(self) -> None:
        self._released.set()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
