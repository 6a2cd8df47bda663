"""What summary.json says: how a run ended, on what, and what each request took. A pure function over plain values.

It follows docs/summary.schema.json.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from backends.platforms.facts import installed
from parallel.events import RequestRan, Step
from runtime.errors import RankError, RankPlace, TerminatedError
from runtime.signals import SignalInterrupt

VERSION = 1
PACKAGES = ("raylysses", "torch", "diffusers", "ray")
Status = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """Why a run did not end well; rank, node and phase are None where it was no rank's doing."""

    type: str
    message: str
    rank: int | None = None
    node: str | None = None
    phase: str | None = None


@dataclass(frozen=True)
class RequestRecord:
    """A request as it was asked for and what its ranks reported, by rank; ranks that did not get so far are absent."""

    request: int
    prompt: str
    seed: int
    steps: int
    ran: Mapping[int, RequestRan] = field(default_factory=dict)
    step_events: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)


def failure_of(error: BaseException) -> Failure:
    """An exception as the summary has it; a rank's failure names the rank, its node and its phase."""
    if isinstance(error, SignalInterrupt):
        error = TerminatedError(error.signum)
    name, message = type(error).__name__, str(error)
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted by SIGINT"
    if isinstance(error, RankError):
        trouble = error.trouble
        return Failure(name, message, trouble.place.rank, trouble.place.hostname, trouble.phase)
    return Failure(name, message)


def versions() -> dict[str, str | None]:
    """The versions that matter to a result, by name; None for a package that is not installed as one."""
    found = installed(PACKAGES)
    return {"python": platform.python_version(), **{name: found.get(name) for name in PACKAGES}}


def summary(
    *,
    status: Status,
    world_size: int,
    device: str,
    ranks: Iterable[RankPlace],
    requests: Iterable[RequestRecord],
    elapsed_s: float,
    versions: Mapping[str, str | None],
    error: Failure | None = None,
) -> dict[str, Any]:
    """The summary of a run. device: a label such as `cpu` or `cuda:9.0`. elapsed_s: of the whole run, in seconds."""
    return {
        "version": VERSION,
        "status": status,
        "error": None if error is None else asdict(error),
        "versions": dict(versions),
        "world_size": world_size,
        "device": device,
        "ranks": [_rank(place) for place in sorted(ranks, key=lambda place: place.rank)],
        "requests": [_request(record, world_size) for record in requests],
        "elapsed_s": elapsed_s,
    }


def _rank(place: RankPlace) -> dict[str, Any]:
    return {"rank": place.rank, "node": place.hostname, "pid": place.pid, "gpu": place.gpu or None}


def _request(record: RequestRecord, world_size: int) -> dict[str, Any]:
    ran = {str(rank): record.ran[rank] for rank in sorted(record.ran)}
    step_seconds = slowest_steps(record.step_events, world_size)
    later = [seconds for step, seconds in step_seconds.items() if step > 1]
    return {
        "request": record.request,
        "prompt": record.prompt,
        "seed": record.seed,
        "steps": record.steps,
        "steps_done": max(step_seconds, default=0),
        "seconds": _largest(each.seconds for each in ran.values()),
        "rows": {rank: dict(each.rows) for rank, each in ran.items()},
        "forwards": _largest(each.forwards for each in ran.values()),
        "traffic": {
            rank: {"planned": each.planned.to_dict(), "measured": each.measured.to_dict()} for rank, each in ran.items()
        },
        "peak_memory_bytes": {rank: each.peak_memory_bytes for rank, each in ran.items()},
        # The first step compiles and warms up, so that it would spoil a mean.
        "first_step_s": step_seconds.get(1),
        "median_step_s": statistics.median(later) if later else None,
    }


def slowest_steps(events: Mapping[int, Iterable[Step]], world_size: int) -> dict[int, float]:
    """Seconds of the slowest rank for each step that every rank has finished."""
    by_step: dict[int, dict[int, float]] = {}
    for rank, steps in events.items():
        for step in steps:
            by_step.setdefault(step.step, {})[rank] = step.seconds
    return {step: max(seconds.values()) for step, seconds in sorted(by_step.items()) if len(seconds) == world_size}


def _largest(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """For each name, the largest number that a rank reported."""
    largest: dict[str, Any] = {}
    for table in tables:
        for name, number in table.items():
            largest[name] = max(number, largest.get(name, number))
    return largest
