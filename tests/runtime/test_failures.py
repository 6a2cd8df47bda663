"""A rank that dies, raises or sticks ends the run within seconds; it is named, and nothing is left running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.command import Running, alive, family, gone_within, summary

pytestmark = pytest.mark.ray

LONG = ("--prompt", "a cat", "parallel.world_size=2", "generate.steps=400", "run.outputs=[]")
SOON_S = 5.0


def assert_nothing_left(pids: list[int]) -> None:
    assert gone_within(pids, 5.0), f"still running: {alive(pids)}"


def test_a_killed_rank_is_named_within_seconds(tmp_path: Path) -> None:
    run = Running(tmp_path / "run", LONG)
    run.wait_for_step(1)
    processes, victim = family(run.process.pid), run.pids()[1]

    os.kill(victim, signal.SIGKILL)
    outcome = run.finish()

    assert outcome.code == 4, outcome.err
    assert outcome.seconds < SOON_S
    assert f"error: rank 1 on {os.uname().nodename}" in outcome.err
    assert f"pid {victim}" in outcome.err
    assert outcome.err.count("its process is gone") == 1
    assert "Some common causes" not in outcome.out + outcome.err
    assert "A worker died or was killed" in (run.folder / "ray.log").read_text()
    assert "Some common causes" in (run.folder / "ranks" / "rank1.traceback.txt").read_text()
    error = summary(run.folder)["error"]
    assert (error["rank"], error["node"], summary(run.folder)["status"]) == (1, os.uname().nodename, "failed")
    assert_nothing_left(processes)


def test_a_rank_that_raises_is_told_by_its_own_error(tmp_path: Path, ray_cluster: str) -> None:
    register = "attention.register.RAISING=tests.runtime.doubles.RaisingBackend"
    settings = (register, "attention.per_role.self=RAISING", f"cluster.address={ray_cluster}")
    run = Running(tmp_path / "run", (*LONG, *settings))
    outcome = run.finish(timeout=90)

    assert outcome.code == 4, outcome.err
    first_line = outcome.err[outcome.err.index("error: ") :].splitlines()[0]
    assert "rank 1" in first_line
    assert "ArithmeticError: the kernel met a number that it does not like" in first_line
    assert "closed by peer" not in first_line
    assert "doubles.py" in (run.folder / "ranks" / "rank1.traceback.txt").read_text()
    assert "its traceback is in " in outcome.err


def test_a_stuck_rank_ends_the_run_as_stalled(tmp_path: Path, ray_cluster: str) -> None:
    register = "attention.register.STUCK=tests.runtime.doubles.StuckBackend"
    settings = (register, "attention.per_role.self=STUCK", "cluster.stall_timeout_s=5")
    run = Running(tmp_path / "run", (*LONG, *settings, f"cluster.address={ray_cluster}"))
    outcome = run.finish(timeout=90)

    assert outcome.code == 5, outcome.err
    assert "cluster.stall_timeout_s=5" in outcome.err
    assert "rank 1 is stuck" in outcome.err
    assert all(f"rank {rank} on" in outcome.err for rank in (0, 1))
    assert "waits for other ranks in" in outcome.err
    assert "busy in trouble (tests/runtime/doubles.py:" in outcome.err
    assert "denoise" in outcome.err
    assert "time.sleep(3600)" in (run.folder / "ranks" / "rank1.traceback.txt").read_text()


def test_a_stopped_process_ends_the_run_as_the_stuck_one(tmp_path: Path, ray_cluster: str) -> None:
    run = Running(tmp_path / "run", (*LONG, "cluster.stall_timeout_s=8", f"cluster.address={ray_cluster}"))
    run.wait_for_step(1)
    victim = run.pids()[1]

    os.kill(victim, signal.SIGSTOP)
    outcome = run.finish(timeout=90)

    assert outcome.code == 5, outcome.err
    assert "rank 1 is stuck" in outcome.err
    assert "its process is stopped (SIGSTOP)" in outcome.err
    assert_nothing_left([victim])


def test_a_rank_that_dies_while_it_imports_is_named_within_seconds(tmp_path: Path) -> None:
    run = Running(tmp_path / "run", LONG)
    run.wait_for_line("importing")
    victim = run.pids()[1]

    os.kill(victim, signal.SIGKILL)
    outcome = run.finish()

    assert outcome.code == 4, outcome.err
    assert outcome.seconds < SOON_S
    assert f"pid {victim}" in outcome.err


@pytest.fixture
def heard() -> Iterator[None]:
    """A hang-up is not ignored, whoever runs the tests: under `nohup` it is, and a run inherits that."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("line", "signum", "code", "to_group"),
    [
        ("connecting", signal.SIGTERM, 143, True),
        ("connecting", signal.SIGINT, 130, False),
        ("importing", signal.SIGHUP, 129, True),
    ],
)
def test_a_signal_during_the_start_ends_the_run_soon_and_leaves_nothing(
    tmp_path: Path, line: str, signum: int, code: int, to_group: bool
) -> None:
    run = Running(tmp_path / "run", LONG)
    run.wait_for_line(line)
    time.sleep(1.5)  # Ray is half started, or the ranks half imported
    processes = family(run.process.pid)

    if to_group:  # as a terminal and a batch system do; it takes Ray's processes, too
        run.interrupt(signum)
    else:
        os.kill(run.process.pid, signum)
    outcome = run.finish()

    assert outcome.code == code, outcome.err
    assert outcome.seconds < 15, "Ray alone would wait 60 s for its dead processes"
    assert "Traceback" not in outcome.err
    assert_nothing_left(processes)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_all_ranks(tmp_path: Path, signum: int, code: int) -> None:
    run = Running(tmp_path / "run", LONG)
    run.wait_for_step(0)
    processes = family(run.process.pid)

    run.interrupt(signum)
    outcome = run.finish()

    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    told = summary(run.folder)
    assert told["status"] == "interrupted"
    stopped = {1: "stopped by signal 1", 2: "interrupted by SIGINT", 15: "stopped by signal 15"}
    assert told["error"]["message"] == stopped[signum]
    assert_nothing_left(processes)
