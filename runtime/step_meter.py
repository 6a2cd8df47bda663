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
    """A phase that the ranks have entered.

    The first rank that enters a phase counts, because only one rank decodes. The last rank counts for `done`, and for
    the request: no phase of a later request is reported while a rank still works on an earlier one.
    """

    name: str
    request: int | None


@dataclass(frozen=True)
class StepsDone:
    """All ranks have finished a step.

    Attributes:
        request: The request's number, from 0.
        step: The step's number, from 1.
        steps: How many steps the request has.
        step_s: Median seconds of a step.
        left_s: Estimated seconds of the remaining steps.
        unit: What a step is called.
    """

    request: int
    step: int
    steps: int
    step_s: float
    left_s: float
    unit: str = "step"

    @property
    def text(self) -> str:
        """`step 3/8, 0.42 s/step, about 2 s left`."""
        left = "" if self.step >= self.steps else f", about {duration(self.left_s)} left"
        return f"{self.unit} {self.step}/{self.steps}, {self.step_s:.2f} s/{self.unit}{left}"


class StepMeter:
    """Follows the ranks of a run; a step counts when the slowest rank has reported it.

    Args:
        world_size: How many ranks report.
        unit: What a step is called.
    """

    def __init__(self, world_size: int, unit: str = "step") -> None:
        self._world_size = world_size
        self._unit = unit
        self._request: int | None = None
        self._current: dict[int, int] = {}
        self._entered: dict[tuple[str, int | None], set[int]] = {}
        self._reached: dict[int, dict[int, int]] = {}
        self._seconds: dict[int, dict[int, float]] = {}
        self._told: dict[int, int] = {}
        self._waiting: list[PhaseBegan] = []

    def expect(self, world_size: int) -> None:
        """Follows so many ranks from now on; to be said before they report."""
        self._world_size = world_size

    def on_event(self, rank: int, event: Event) -> tuple[PhaseBegan | StepsDone, ...]:
        """Returns what is new after an event of a rank, in order."""
        if isinstance(event, Phase):
            if event.request is not None:
                self._current[rank] = event.request
            phase = self._on_phase(rank, event)
            if phase is not None:
                self._waiting.append(phase)
            return self._due_phases()
        if isinstance(event, Step):
            steps = self._on_step(rank, event)
            return self._due_phases() if steps is None else (steps, *self._due_phases())
        return ()

    def _due_phases(self) -> tuple[PhaseBegan, ...]:
        """Removes and returns the waiting phases that can be reported, those of earlier requests first."""
        due = []
        for phase in sorted(self._waiting, key=lambda phase: -1 if phase.request is None else phase.request):
            if self._ready(phase.request):
                self._waiting.remove(phase)
                self._request = self._request if phase.request is None else phase.request
                due.append(phase)
        return tuple(due)

    def _ready(self, request: int | None) -> bool:
        """Whether a phase of a request can be reported.

        It waits for the steps that faster ranks have already finished: one rank begins to decode while others denoise.
        It also waits for the ranks that still work on an earlier request.
        """
        if request is None:
            return True
        if self._told.get(request, 0) < max(self._reached.get(request, {}).values(), default=0):
            return False
        is_later = self._request is not None and request > self._request
        arrived = sum(current >= request for current in self._current.values())
        return not is_later or arrived >= self._world_size

    def _on_phase(self, rank: int, event: Phase) -> PhaseBegan | None:
        ranks = self._entered.setdefault((event.name, event.request), set())
        # Only one rank decodes, and the others end before it.
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
        return StepsDone(request, step, event.steps, step_s, step_s * (event.steps - step), self._unit)


def duration(seconds: float) -> str:
    """`2 s`, `3 min 20 s`, `2 h 05 min`; never less than a second."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
