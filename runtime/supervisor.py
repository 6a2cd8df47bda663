"""Drives the ranks' streams to their ends, and names the rank that ended them early."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.events import Phase, Step
from runtime.errors import RankError, RankPlace, RankTrouble, StallError
from runtime.ray_api import Died, Ended, Raised, Stream, Yielded, ready

GRACE_S = 1.5
POLL_S = 0.5

# What torch says on a rank whose peer is gone: a consequence, not a cause.
_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Read error|Broken pipe|Timed out waiting|Operation timed out"
    r"|wait timeout|NCCL communicator was aborted|remote process exited|Socket Timeout|recvValue failed|failed to recv",
    re.IGNORECASE,
)
_TORCH_COMMUNICATION = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")

OnEvent = Callable[[int, Any], None]


def classify(item: Raised | Died) -> str:
    """`died`, `raised`, or `disconnected` for the error of a rank that lost a peer."""
    if isinstance(item, Died):
        return "died"
    names = {cls.__name__ for cls in type(item.cause).__mro__}
    communication = bool(names & set(_TORCH_COMMUNICATION)) or isinstance(item.cause, RuntimeError | OSError)
    return "disconnected" if communication and _LOST_PEER.search(str(item.cause)) else "raised"


def trouble(place: RankPlace, phase: str, item: Raised | Died) -> RankTrouble:
    """What became of a rank, from how its call or its stream ended."""
    if isinstance(item, Raised):
        message = _shortened(f"{type(item.cause).__name__}: {item.cause}")
        return RankTrouble(place, classify(item), phase, message, item.traceback)
    return RankTrouble(place, classify(item), phase, f"its process is gone ({_last_line(item.message)})")


@dataclass(frozen=True)
class _Failure:
    trouble: RankTrouble
    cause: BaseException | None


class Supervisor:
    """Watches one group of ranks. places[r] is where rank r runs."""

    def __init__(self, places: Sequence[RankPlace], on_event: OnEvent, stall_timeout_s: float) -> None:
        self._places = places
        self._on_event = on_event
        self._stall_timeout_s = stall_timeout_s
        self._doing = ["start"] * len(places)

    def drive(self, streams: Sequence[Stream]) -> None:
        """Pass on every event until all streams have ended.

        Raises RankError as soon as a rank is lost or raises (after a short wait for the cause, if what came first is
        only a consequence), and StallError if nothing comes for too long. The caller stops the other ranks.
        """
        open_streams = dict(enumerate(streams))
        failures: list[_Failure] = []
        quiet_since = time.monotonic()
        deadline: float | None = None
        while open_streams and (deadline is None or time.monotonic() < deadline):
            arrived = ready(list(open_streams.values()), POLL_S if deadline is None else 0.1)
            now = time.monotonic()
            if arrived:
                quiet_since = now
            elif deadline is None and now - quiet_since > self._stall_timeout_s:
                raise StallError(self._stall_timeout_s, tuple(map(self._last_seen, range(len(self._places)))))
            for rank in [rank for rank, stream in open_streams.items() if stream in arrived]:
                failure = self._advance(rank, open_streams)
                if failure is not None:
                    failures.append(failure)
                    deadline = now + GRACE_S if deadline is None else deadline
        if failures:
            raise self._verdict(failures)

    def _advance(self, rank: int, open_streams: dict[int, Stream]) -> _Failure | None:
        item = open_streams[rank].take()
        if isinstance(item, Yielded):
            self._note(rank, item.value)
            self._on_event(rank, item.value)
            return None
        del open_streams[rank]
        if isinstance(item, Ended):
            return None
        cause = item.cause if isinstance(item, Raised) else None
        return _Failure(trouble(self._places[rank], self._doing[rank], item), cause)

    def _verdict(self, failures: list[_Failure]) -> RankError:
        """The root cause first: a death, then a rank's own error, then what a lost peer says; in that order, by
        arrival.
        """
        severity = {"died": 0, "raised": 1, "disconnected": 2}
        ordered = sorted(failures, key=lambda failure: severity[failure.trouble.kind])
        error = RankError(ordered[0].trouble, tuple(failure.trouble for failure in ordered[1:]))
        error.__cause__ = ordered[0].cause
        return error

    def _note(self, rank: int, event: Any) -> None:
        if isinstance(event, Phase):
            self._doing[rank] = event.name
        elif isinstance(event, Step):
            self._doing[rank] = f"denoise (after step {event.step} of {event.steps})"

    def _last_seen(self, rank: int) -> str:
        return f"{self._places[rank]}: {self._doing[rank]}"


def _shortened(text: str, limit: int = 2000) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters; the traceback has all of them)"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
