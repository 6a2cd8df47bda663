"""Signals during a run, in processes of their own: what is ignored stays so, and nothing that came is lost."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.conftest import CHECKOUT

HELD = """
import os, signal, subprocess, sys
from runtime.errors import TerminatedError
from runtime.signals import signals_held, terminated_by_signal

signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
ignored = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
try:
    with terminated_by_signal():
        with signals_held(repeat=True):
            print(subprocess.run([sys.executable, "-c", ignored], capture_output=True, text=True).stdout.strip())
            for name in sys.argv[2:]:
                os.kill(os.getpid(), getattr(signal, name))
        print("went on")
except TerminatedError as error:
    print(f"stopped by {error.signum}")
print(signal.getsignal(signal.SIGHUP) is getattr(signal, sys.argv[1]))
"""


def told(*arguments: str) -> list[str]:
    command = [sys.executable, "-c", HELD, *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("signals", "end"),
    [
        (("SIGHUP",), "went on"),
        (("SIGHUP", "SIGTERM"), f"stopped by {signal.SIGTERM:d}"),
        (("SIGTERM", "SIGHUP"), f"stopped by {signal.SIGTERM:d}"),
    ],
)
def test_a_hang_up_that_is_ignored_stays_so_for_what_is_started_too(signals: tuple[str, ...], end: str) -> None:
    assert told("SIG_IGN", *signals) == ["True", end, "True"]


def test_a_hang_up_stops_a_run() -> None:
    assert told("SIG_DFL", "SIGHUP") == ["False", f"stopped by {signal.SIGHUP:d}", "True"]


STUCK = """
import signal, sys, threading, time
from runtime.signals import ExitWatch, signals_held

watch = ExitWatch(0.1)
watch.start()
with signals_held():  # as while Ray starts, which may wait for processes that the signal has ended
    print("stuck", flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_cannot_act_on_a_signal_ends_with_its_exit_code(signum: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"

    process.send_signal(signum)
    _, err = process.communicate(timeout=30)

    assert process.returncode == 128 + signum
    assert "the ranks were stopped" in err
