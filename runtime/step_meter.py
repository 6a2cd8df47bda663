"""From the ranks' events to what a user is told: which phase has begun, how many steps are done, how long they take.

It keeps counts only; it reads no clock and prints nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from parallel.events import Event, Phase, Step

DONE = "done"


@dataclass(frozen=True)
class PhaseBegan:
    """The first rank entered a phase; `done`: the last rank did."""

    name: str
    request: int | None


@dataclass(frozen=True)
class StepsDone:
    """All ranks have finished `step` of `steps`. step_s: the usual seconds of a step; left_s: of the steps to come."""

    request: int
    step: int
    steps: int
    step_s: float
    left_s: float

    @property
    def text(self) -> str:
        """`step 3/8, 0.42 s/step, about 2 s left`."""
        left = "" if self.step >= self.steps else f", about {duration(self.left_s)} left"
        return f"step {self.step}/{self.steps}, {self.step_s:.2f} s/step{left}"


class StepMeter:
    """Follows `world_size` ranks; a step counts when the slowest of them has reported it."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._entered: dict[tuple[str, int | None], set[int]] = {}
        self._reached: dict[int, dict[int, int]] = {}
        self._seconds: dict[int, dict[int, float]] = {}
        self._told: dict[int, int] = {}
        self._held: list[PhaseBegan] = []

    def expect(self, world_size: int) -> None:
        """Follows so many ranks from now on; to be said before they report."""
        self._world_size = world_size

    def on_event(self, rank: int, event: Event) -> tuple[PhaseBegan | StepsDone, ...]:
        """What there is to tell after this event of this rank, in order."""
        if isinstance(event, Phase):
            phase = self._on_phase(rank, event)
            if phase is None:
                return ()
            if self._steps_open(phase.request):
                self._held.append(phase)  # the rank that decodes is done denoising, and the others are not
                return ()
            return (phase,)
        if isinstance(event, Step):
            steps = self._on_step(rank, event)
            if steps is None:
                return ()
            held, self._held = ((), self._held) if steps.step < steps.steps else (tuple(self._held), [])
            return (steps, *held)
        return ()

    def _steps_open(self, request: int | None) -> bool:
        """Whether ranks have reported steps of a request that others have still to report."""
        if request is None or request not in self._reached:
            return False
        return self._told.get(request, 0) < max(self._reached[request].values())

    def _on_phase(self, rank: int, event: Phase) -> PhaseBegan | None:
        ranks = self._entered.setdefault((event.name, event.request), set())
        # Only one rank decodes, and the others are done before it: the first counts, except for the end.
        awaited = self._world_size if event.name == DONE else 1
        news = rank not in ranks and len(ranks) + 1 == awaited
        ranks.add(rank)
        return PhaseBegan(event.name, event.request) if news else None

    def _on_step(self, rank: int, event: Step) -> StepsDone | None:
        request = event.request
        seconds = self._seconds.setdefault(request, {})
        seconds[event.step] = max(event.seconds, seconds.get(event.step, 0.0))
        reached = self._reached.setdefault(request, {})
        reached[rank] = max(event.step, reached.get(rank, 0))
        step = min(reached.values()) if len(reached) == self._world_size else 0
        if step <= self._told.get(request, 0):
            return None
        self._told[request] = step
        finished = {number: taken for number, taken in seconds.items() if number <= step}
        # The first step of a run also compiles and warms up; it says nothing about the next ones.
        usual = [taken for number, taken in finished.items() if number > min(finished)] or list(finished.values())
        step_s = statistics.median(usual)
        return StepsDone(request, step, event.steps, step_s, step_s * (event.steps - step))


def duration(seconds: float) -> str:
    """`2 s`, `3 min 20 s`, `2 h 05 min`; never less than a second."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
