"""What the ranks of a bench are told. No torch here: the driver makes it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.bench.grid import Case, Shape


@dataclass(frozen=True)
class BenchSpec:
    """cases: the grid; shapes: in its order. rounds: timed calls of each cell. causal: of all calls."""

    cases: tuple[Case, ...]
    shapes: tuple[Shape, ...]
    rounds: int
    causal: bool
