"""Positions of a sequence as a few runs, and where they lie. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


def split(length: int, parts: int) -> tuple[range, ...]:
    """`length` items over `parts` owners, in order, no padding; the first `length % parts` owners hold one more."""
    size, extra = divmod(length, parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


@dataclass(frozen=True)
class Rows:
    """Distinct positions in the order in which a tensor holds them. runs: none of them empty, none that continues the
    one before (see `rows`).
    """

    runs: tuple[range, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[int]:
        return (position for run in self.runs for position in run)

    def cut(self, part: range) -> Rows:
        """Those that stand at the places `part` of these."""
        kept, at = [], 0
        for run in self.runs:
            low, high = max(part.start - at, 0), min(part.stop - at, len(run))
            kept.append(run[low:high] if low < high else range(0))
            at += len(run)
        return rows(*kept)

    def within(self, span: range) -> Rows:
        """Those whose positions lie within a span."""
        return rows(*(range(max(run.start, span.start), min(run.stop, span.stop)) for run in self.runs))

    def shifted(self, by: int) -> Rows:
        return Rows(tuple(range(run.start + by, run.stop + by) for run in self.runs))

    def count_in(self, span: range) -> int:
        """How many of them lie within a span."""
        return len(self.within(span))

    @property
    def sorted(self) -> Rows:
        return rows(*sorted(self.runs, key=lambda run: run.start))


def rows(*runs: range) -> Rows:
    """The positions of the runs, one after another."""
    joined: list[range] = []
    for run in runs:
        if not run:
            continue
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return Rows(tuple(joined))


def chain(parts: tuple[Rows, ...]) -> Rows:
    """The positions of the parts, one after another."""
    return rows(*(run for part in parts for run in part.runs))


@dataclass(frozen=True)
class Slice:
    """The places `start` to `stop` of one part."""

    part: int
    start: int
    stop: int


@lru_cache(maxsize=4096)
def find(wanted: Rows, parts: tuple[Rows, ...]) -> tuple[Slice, ...]:
    """Where the wanted positions lie in tensors that hold `parts`, in the order of the wanted; of two parts that hold
    one, the first. Raises KeyError for a position that none of them holds.
    """
    held = []
    for part, owned in enumerate(parts):
        at = 0
        for run in owned.runs:
            held.append((run, part, at))
            at += len(run)
    found: list[Slice] = []
    for run in wanted.runs:
        position = run.start
        while position < run.stop:
            home = next((entry for entry in held if position in entry[0]), None)
            if home is None:
                raise KeyError(position)
            span, part, at = home
            stop = min(run.stop, span.stop)
            start_place, stop_place = at + position - span.start, at + stop - span.start
            if found and (found[-1].part, found[-1].stop) == (part, start_place):
                found[-1] = Slice(part, found[-1].start, stop_place)
            else:
                found.append(Slice(part, start_place, stop_place))
            position = stop
    return tuple(found)
