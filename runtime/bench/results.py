"""What came of each cell of the grid: from the ranks' reports to rows with medians and efficiencies. No torch here."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from runtime.bench.grid import Case, Shape

Outcome = Literal["pending", "timed", "wrong", "refused"]
BASELINE = (
    "the fastest exact kernel of the grid on the full sequence with H/P heads, on every rank at once; where P does not "
    "divide H it runs with the next whole number of heads, and its time is scaled to H/P"
)


@dataclass(frozen=True)
class Refused:
    """A rank's report of a cell that nothing serves there, and why."""

    case: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """A rank's report of a cell's first call, compared with fp64.

    error: relative L2, of the rows of this rank that were compared; infinite for another shape and for what is no
    number. Bytes leave this rank. first_s: the seconds of the call, compilation and all.
    """

    case: int
    backend: str
    variant: str
    kernel: str
    exactness: str
    strategy: str
    degrees: tuple[int, int]
    error: float
    tolerance: float
    collectives: int
    bytes_sent: int
    first_s: float


@dataclass(frozen=True)
class RoundDone:
    """A rank's report of a round: milliseconds of one call by case."""

    shape: int
    round: int
    milliseconds: Mapping[int, float]


Report = Refused | Checked | RoundDone


@dataclass(frozen=True)
class Row:
    """One cell. milliseconds: the median over the rounds of the slowest rank's call; low, high: the first and the
    third quartile. rounds: that all ranks came to, fewer than asked for where a bench was stopped. efficiency: the
    baseline's time over it. bytes_sent, collectives: of a call, on the rank that sends most. Figures are None where
    there are none.
    """

    case: Case
    outcome: Outcome = "pending"
    why: str = ""
    checked: Checked | None = None
    milliseconds: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    baseline_ms: float | None = None
    efficiency: float | None = None

    def to_dict(self) -> dict[str, Any]:
        told = {} if self.checked is None else asdict(self.checked)
        degrees = told.pop("degrees", None)
        told.pop("case", None)
        # JSON has no infinity.
        told["error"] = None if told.get("error") in (None, float("inf")) else told["error"]
        names = ("backend", "variant", "kernel", "exactness", "strategy", "tolerance", "collectives", "bytes_sent")
        return {
            "shape": asdict(self.case.shape),
            "plan": self.case.plan,
            "asked_backend": self.case.backend,
            "outcome": self.outcome,
            "why": self.why,
            **{name: told.get(name) for name in (*names, "error", "first_s")},
            "degrees": None if degrees is None else {"ulysses": degrees[0], "ring": degrees[1]},
            "milliseconds": self.milliseconds,
            "low_ms": self.low,
            "high_ms": self.high,
            "rounds": self.rounds,
            "baseline_ms": self.baseline_ms,
            "efficiency": self.efficiency,
        }


class Results:
    """Collects the reports of `world_size` ranks."""

    def __init__(self, cases: tuple[Case, ...], shapes: tuple[Shape, ...], world_size: int) -> None:
        self.cases, self.shapes, self._world_size = cases, shapes, world_size
        self._refused: dict[int, Refused] = {}
        self._checked: dict[int, list[Checked]] = defaultdict(list)
        self._samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, report: Report) -> None:
        if isinstance(report, Refused):
            self._refused.setdefault(report.case, report)
        elif isinstance(report, Checked):
            self._checked[report.case].append(report)
        else:
            for case, milliseconds in report.milliseconds.items():
                self._samples[case][report.round].append(milliseconds)

    def rows(self) -> tuple[Row, ...]:
        """Every cell of the grid in order, baselines included."""
        rows = [self._row(case) for case in self.cases]
        per_shape = len(rows) // len(self.shapes)
        return tuple(
            row
            for index, shape in enumerate(self.shapes)
            for row in self._with_baseline(rows[index * per_shape : (index + 1) * per_shape], shape)
        )

    def _row(self, case: Case) -> Row:
        if case.index in self._refused:
            return Row(case, "refused", "; ".join(self._refused[case.index].reasons))
        told = self._checked.get(case.index, [])
        if not told:
            return Row(case)
        worst = max(told, key=lambda checked: checked.error)
        checked = max(told, key=lambda checked: checked.bytes_sent)
        checked = Checked(**{**vars(checked), "error": worst.error, "first_s": max(each.first_s for each in told)})
        if not worst.error <= worst.tolerance:
            why = f"its result is off by {worst.error:.3g}, over {worst.tolerance:g} (relative L2, against fp64)"
            return Row(case, "wrong", why, checked)
        rounds = [max(by_rank) for by_rank in self._samples[case.index].values() if len(by_rank) == self._world_size]
        if not rounds:
            return Row(case, checked=checked)
        low, middle, high = _quartiles(rounds)
        return Row(case, "timed", "", checked, middle, low, high, len(rounds))

    def _with_baseline(self, rows: Iterable[Row], shape: Shape) -> list[Row]:
        rows = list(rows)
        share = shape.heads / self._world_size
        times = [
            row.milliseconds * share / row.case.shape.heads
            for row in rows
            if row.case.is_baseline and row.milliseconds and row.checked and row.checked.exactness == "exact"
        ]
        if not times:
            return rows
        baseline = min(times)
        return [
            row
            if row.milliseconds is None
            else Row(**{**vars(row), "baseline_ms": baseline, "efficiency": baseline / row.milliseconds})
            for row in rows
        ]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def wrong(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.outcome == "wrong"]
