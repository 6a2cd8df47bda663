"""The real command in a process of its own, from the checkout, and what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.conftest import CHECKOUT


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    seconds: float


def environment() -> dict[str, str]:
    """The tests' own, without a running cluster's address; Ray wants no token of a local cluster."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return kept | {"RAY_AUTH_MODE": "disabled"}


def raylysses(
    *arguments: str, cwd: Path = CHECKOUT, timeout: float = 120, environ: Mapping[str, str] | None = None
) -> Outcome:
    """`python -m runtime ...` to its end. environ: beside the tests' own."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "runtime", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment() | dict(environ or {}),
        timeout=timeout,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


class Running:
    """`python -m runtime generate ...` under way, in a process group of its own."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.folder = folder
        self._seen = ""
        self._found = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runtime", "generate", *arguments, f"run.dir={folder}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
            env=environment(),
            start_new_session=True,
            # A shell's background jobs ignore SIGINT, and so would their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait_for_step(self, rank: int, timeout: float = 90) -> None:
        """Until a rank has finished a denoising step."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if any(event["event"] == "step" for event in events(self.folder, rank)):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"no step of rank {rank}: {self.process.communicate()}")

    def wait_for_line(self, beginning: str, timeout: float = 60) -> None:
        """Until the progress has a line that begins so."""
        stderr = self.process.stderr
        if stderr is None:
            raise AssertionError("the process has no stderr")
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        self._seen = "".join(iter(lambda: self._read_line(stderr, beginning), ""))
        timer.cancel()

    def _read_line(self, stream: TextIO, beginning: str) -> str:
        if self._found:
            return ""
        line = stream.readline()
        self._found = line.startswith(beginning)
        return line

    def pids(self) -> list[int]:
        """Of the ranks, in rank order."""
        return [rank["pid"] for rank in summary(self.folder)["ranks"]]

    def interrupt(self, signum: int) -> None:
        """What a terminal does on Ctrl-C: the signal goes to the whole process group."""
        os.killpg(self.process.pid, signum)

    def finish(self, timeout: float = 30) -> Outcome:
        began = time.monotonic()
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return Outcome(self.process.returncode, out, self._seen + err, time.monotonic() - began)


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def selection(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "selection.json").read_text())
    return content


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    file = folder / "ranks" / f"rank{rank}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def alive(pids: Sequence[int]) -> list[int]:
    """Those of the processes that still run (a zombie does not)."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def gone_within(pids: Sequence[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    found, parents = [pid], {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(after_name[1])
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
