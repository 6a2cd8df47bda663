"""Drives the ranks' streams to their ends, and names the rank that ended them early."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.events import Phase, Step
from parallel.transport.errors import ExchangeError, ExchangeSizeError
from runtime.errors import RankError, RankPlace, RankTrouble, StallError
from runtime.ray_api import Died, Ended, Raised, Stream, Yielded, is_alive, process_state, ready
from runtime.stuck import BEAT_S, Beat, stuck_ranks

GRACE_S = 1.5
POLL_S = 0.5

# A rank that lost a peer fails within milliseconds; Ray needs up to 15 s to notice that the peer's node is gone.
GRACE_FOR_CAUSE_S = 20.0
REASON = 300
# What Ray says after the reason why a worker ended: guesses that fit any of them.
_GUESSES = ("Some common causes include", "There are some potential root causes")
_TORCH_COMMUNICATION = "torch.distributed", "DistError"

OnEvent = Callable[[int, Any], None]


def classify(item: Raised | Died) -> str:
    """`died`, `raised`, or `disconnected` for a failed exchange with other ranks; by type, never by the message."""
    if isinstance(item, Died):
        return "died"
    if isinstance(item.cause, ExchangeSizeError):
        return "raised"  # tensors of this rank have the wrong size
    # By name, as the driver does not import torch.
    torch_lost_a_peer = any((cls.__module__, cls.__name__) == _TORCH_COMMUNICATION for cls in type(item.cause).__mro__)
    return "disconnected" if torch_lost_a_peer or isinstance(item.cause, ExchangeError) else "raised"


def trouble(place: RankPlace, phase: str, item: Raised | Died, *, node_lost: bool = False) -> RankTrouble:
    """Describe what became of a rank.

    Args:
        place: Where the rank ran.
        phase: What it was doing.
        item: How its call or its stream ended.
        node_lost: Whether the cluster has lost the rank's node.
    """
    if isinstance(item, Raised):
        message = _shortened(f"{type(item.cause).__name__}: {item.cause}", 2000)
        return RankTrouble(place, classify(item), phase, message, item.traceback)
    reason = _shortened(_reason(item), REASON)
    if node_lost:
        message = f"its node {place.hostname} ({place.host}) is lost ({reason}); look at that machine and its network"
    elif item.out_of_memory:
        message = (
            f"Ray killed its process because the node {place.hostname} ({place.host}) ran low on memory: {reason}; "
            f"use fewer ranks on that node, a smaller video, or a node with more memory"
        )
    else:
        message = f"its process is gone ({reason})"
    return RankTrouble(place, classify(item), phase, message, item.message)


@dataclass(frozen=True)
class _Failure:
    rank: int
    trouble: RankTrouble
    item: Raised | Died

    @property
    def is_consequence(self) -> bool:
        return self.trouble.kind == "disconnected"


class Supervisor:
    """Watches one group of ranks. places[r] is where rank r runs."""

    def __init__(self, places: Sequence[RankPlace], on_event: OnEvent, stall_timeout_s: float) -> None:
        self._places = places
        self._several_nodes = len({place.node_id for place in places}) > 1
        self._on_event = on_event
        self._stall_timeout_s = stall_timeout_s
        self._doing = ["start"] * len(places)
        self._reported = [0.0] * len(places)
        # Also counts that a rank waited for others, which is no fault of its own.
        self._advanced = [0.0] * len(places)
        self._beats: dict[int, tuple[Beat, float]] = {}

    def drive(self, streams: Sequence[Stream]) -> None:
        """Pass on every event until all streams have ended.

        Raises RankError as soon as a rank is lost or raises (after a short wait for the cause, if what came first is
        only a consequence), and StallError if a rank reports nothing for too long and does not wait for others, or if
        no rank reports anything. The caller stops the other ranks.
        """
        open_streams = dict(enumerate(streams))
        failures: list[_Failure] = []
        began = looked = awake_since = time.monotonic()
        self._reported, self._advanced = [began] * len(self._places), [began] * len(self._places)
        deadline: float | None = None
        while open_streams and (deadline is None or time.monotonic() < deadline):
            arrived = ready(list(open_streams.values()), POLL_S if deadline is None else 0.1)
            now = time.monotonic()
            for rank in [rank for rank, stream in open_streams.items() if stream in arrived]:
                failure = self._advance(rank, open_streams)
                if failure is not None:
                    failures.append(failure)
                    began = now if deadline is None else began
                    deadline = began + self._grace_s(failures)
            # While this loop took a large artefact, the beats of the other ranks waited in their streams.
            awake_since = now if now - looked > 2 * POLL_S else awake_since
            looked = now
            if deadline is None and now - awake_since > 3 * BEAT_S:
                self._raise_if_stalled(open_streams, now)
        if failures:
            raise self._verdict(failures)

    def _raise_if_stalled(self, ranks: Collection[int], now: float) -> None:
        timeout_s = self._stall_timeout_s
        all_silent = now - max(self._reported) > timeout_s
        overdue = [rank for rank in ranks if all_silent or now - self._advanced[rank] > timeout_s]
        beats = {rank: (beat, now - heard) for rank, (beat, heard) in self._beats.items()}
        stuck = stuck_ranks(overdue, beats, min(3 * BEAT_S, timeout_s))
        if not stuck and not all_silent:
            return
        last = tuple(self._last_seen(rank, stuck, beats) for rank in range(len(self._places)))
        stacks = {rank: beat.stack for rank, (beat, _) in beats.items() if beat.stack}
        raise StallError(self._stall_timeout_s, last, tuple(stuck), stacks)

    def _grace_s(self, failures: Sequence[_Failure]) -> float:
        """How long to wait for the cause after the first failure."""
        only_consequences = all(failure.is_consequence for failure in failures)
        return GRACE_FOR_CAUSE_S if only_consequences and self._several_nodes else GRACE_S

    def _advance(self, rank: int, open_streams: dict[int, Stream]) -> _Failure | None:
        item = open_streams[rank].take()
        if isinstance(item, Yielded) and isinstance(item.value, Beat):
            self._beats[rank] = (item.value, time.monotonic())
            if item.value.waits:  # its own time to compute begins when the wait ends
                self._advanced[rank] = time.monotonic()
            return None
        self._reported[rank] = self._advanced[rank] = time.monotonic()
        if isinstance(item, Yielded):
            self._beats.pop(rank, None)
            self._note(rank, item.value)
            self._on_event(rank, item.value)
            return None
        del open_streams[rank]
        if isinstance(item, Ended):
            return None
        return _Failure(rank, trouble(self._places[rank], self._doing[rank], item), item)

    def _verdict(self, failures: list[_Failure]) -> RankError:
        """The root cause first: a death, then a rank's own error, then what a lost peer says; in that order, by
        arrival.
        """
        severity = {"died": 0, "raised": 1, "disconnected": 2}
        ordered = sorted(failures, key=lambda failure: severity[failure.trouble.kind])
        root, *rest = ordered
        error = RankError(self._with_node(root), tuple(failure.trouble for failure in rest))
        error.__cause__ = root.item.cause if isinstance(root.item, Raised) else None
        return error

    def _with_node(self, failure: _Failure) -> RankTrouble:
        """The trouble of a rank, which may be that of its whole node. A group on one node shares the driver's fate."""
        place = self._places[failure.rank]
        if not isinstance(failure.item, Died) or not self._several_nodes or is_alive(place.node_id):
            return failure.trouble
        return trouble(place, failure.trouble.phase, failure.item, node_lost=True)

    def _note(self, rank: int, event: Any) -> None:
        if isinstance(event, Phase):
            self._doing[rank] = event.name
        elif isinstance(event, Step):
            self._doing[rank] = f"denoise (after step {event.step} of {event.steps})"

    def _last_seen(self, rank: int, stuck: Collection[int], beats: Mapping[int, tuple[Beat, float]]) -> str:
        place = self._places[rank]
        doing = f"{place}: {self._doing[rank]}"
        if rank in beats and beats[rank][1] <= min(3 * BEAT_S, self._stall_timeout_s):
            beat = beats[rank][0]
            return f"{doing}, {'waits for other ranks' if beat.waits else 'busy'} in {beat.at}"
        if rank not in stuck:
            return doing
        state = process_state(place.node_id, place.pid)
        if state == "stopped":
            return f"{doing}, its process is stopped (SIGSTOP); kill -CONT {place.pid} on its node resumes it"
        return f"{doing}, does not answer (process state: {state}); code that holds the GIL keeps it from answering"


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters; the run folder has all of them)"


def _reason(item: Died) -> str:
    """The sentence of Ray's report that says why a process ended."""
    lines = [line.strip() for line in item.message.splitlines() if line.strip()]
    if not lines:
        return "Ray gives no reason"
    if item.out_of_memory:
        # The node's use and its limit stand in the sentence with the unit.
        return next((line for line in lines if "GB" in line), lines[0])
    reason = lines[-1].rpartition("Worker exit detail: ")[2]
    for guesses in _GUESSES:
        reason = reason.partition(guesses)[0]
    return reason.strip().rstrip(".") or lines[-1]
