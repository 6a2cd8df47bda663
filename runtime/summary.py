"""What summary.json says: how a run ended, on what, and what each request took. A pure function over plain values.

It follows docs/summary.schema.json.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from backends.platforms.facts import installed
from parallel.events import PromptCut, RequestRan, Step
from runtime.errors import RankError, RankPlace, TerminatedError
from runtime.report import SelectionReport
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
class Driver:
    """The process that started the run.

    Attributes:
        began: When the run began, with a time zone.
        command: The process's arguments, the program first.
        hostname: Its host.
    """

    began: datetime
    command: Sequence[str]
    hostname: str


@dataclass(frozen=True)
class RequestRecord:
    """A request as it was asked for and what its ranks reported, by rank; ranks that did not get so far are absent."""

    request: int
    prompt: str
    seed: int
    steps: int
    ran: Mapping[int, RequestRan] = field(default_factory=dict)
    step_events: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)
    cuts: Sequence[PromptCut] = ()


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
    driver: Driver,
    world_size: int,
    device: str,
    device_notice: str,
    ranks: Iterable[RankPlace],
    gpu_names: Mapping[int, str],
    selection: SelectionReport,
    start_s: Mapping[str, float],
    requests: Iterable[RequestRecord],
    elapsed_s: float,
    versions: Mapping[str, str | None],
    error: Failure | None = None,
) -> dict[str, Any]:
    """Build the content of summary.json.

    Args:
        status: How the run ended.
        driver: The process that started the run.
        world_size: The number of ranks.
        device: The device of the ranks, a label such as `cpu` or `cuda:9.0`.
        device_notice: Why the ranks use no GPU, if nvidia-smi failed; empty otherwise.
        ranks: Where each rank runs.
        gpu_names: The name of the GPU by rank; empty on a CPU, and absent before the rank has reported it.
        selection: What the layers have run so far.
        start_s: Seconds of each finished phase of the start: connect, place, import, load.
        requests: The requests, in order.
        elapsed_s: Seconds of the whole run.
        versions: Versions by package.
        error: What ended the run early.

    Returns:
        The content, as plain values for JSON.
    """
    return {
        "version": VERSION,
        "status": status,
        "error": None if error is None else asdict(error),
        "began": driver.began.isoformat(timespec="seconds"),
        "command": list(driver.command),
        "host": driver.hostname,
        "versions": dict(versions),
        "world_size": world_size,
        "device": device,
        "device_notice": device_notice or None,
        "ranks": [_rank(place, gpu_names) for place in sorted(ranks, key=lambda place: place.rank)],
        "parallel": _parallel(selection),
        "start_s": dict(start_s),
        "requests": [_request(record, world_size) for record in requests],
        "elapsed_s": elapsed_s,
    }


def _rank(place: RankPlace, gpu_names: Mapping[int, str]) -> dict[str, Any]:
    return {
        "rank": place.rank,
        "node": place.hostname,
        "address": place.host,
        "pid": place.pid,
        "gpu": place.gpu or None,
        "gpu_name": gpu_names.get(place.rank) or None,
    }


def _parallel(selection: SelectionReport) -> list[dict[str, Any]]:
    """The strategy and the degrees of each role, without the details that selection.json has."""
    rows: list[dict[str, Any]] = []
    for entry in selection.entries:
        row = {"model": entry.model, "role": entry.role, "strategy": entry.strategy, **entry.degrees}
        if row not in rows:
            rows.append(row)
    return rows


def _request(record: RequestRecord, world_size: int) -> dict[str, Any]:
    ran = {str(rank): record.ran[rank] for rank in sorted(record.ran)}
    step_seconds = slowest_steps(record.step_events, world_size)
    later = [seconds for step, seconds in step_seconds.items() if step > 1]
    return {
        "request": record.request,
        "prompt": record.prompt,
        "tokens_left_out": {cut.name: cut.tokens - cut.limit for cut in record.cuts},
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
