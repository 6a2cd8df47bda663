"""Which parts of a block of queries and keys have to be computed. No torch here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from parallel.rows import Rows

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class BlockPart:
    """Queries and keys of a block, by their places in it. causal: query i of it looks at its keys 0 to i; if not, at
    all.
    """

    queries: range
    keys: range
    causal: bool = False


@lru_cache(maxsize=4096)
def parts_of(queries: Rows, keys: Rows, causal: bool, window: Window | None = None) -> tuple[BlockPart, ...]:
    """The parts of a block in which a query may look at a key, none of them empty. Both are in ascending order."""
    if queries == keys:
        found = [BlockPart(range(len(queries)), range(len(keys)), causal)]
    elif causal:
        found = _earlier_keys(queries, keys)
    else:
        found = [BlockPart(range(len(queries)), range(len(keys)))]
    return tuple(
        part
        for part in found
        if part.queries and part.keys and (window is None or _within(queries.cut(part.queries), keys, window))
    )


def reach_of(queries: Rows, causal: bool, window: Window | None) -> range:
    """The positions that may be seen by a query of these, in ascending order; of none, nothing."""
    if not queries:
        return range(0)
    before, after = window or (None, None)
    if causal:
        after = 0 if after is None else min(after, 0)
    first, last = queries.runs[0].start, queries.runs[-1].stop - 1
    return range(0 if before is None else max(first - before, 0), sys.maxsize if after is None else last + after + 1)


def _earlier_keys(queries: Rows, keys: Rows) -> list[BlockPart]:
    """Runs of queries, each with the keys that stand before it; neighbours with the same keys are one part. Where rows
    are queries and keys, as those of a replicated stream are, they are a causal part of their own.
    """
    found: list[BlockPart] = []
    at = 0
    for run in queries.runs:
        for piece in _pieces(run, keys):
            places, seen = range(at, at + len(piece)), keys.count_in(range(piece.start))
            if found and not found[-1].causal and len(found[-1].keys) == seen:
                found[-1] = BlockPart(range(found[-1].queries.start, places.stop), range(seen))
            else:
                found.append(BlockPart(places, range(seen)))
            if keys.count_in(piece):
                found.append(BlockPart(places, range(seen, seen + len(piece)), True))
            at = places.stop
    return found


def _pieces(run: range, keys: Rows) -> list[range]:
    """A run in pieces of which every row is a key, or none."""
    ends = {end for other in keys.runs for end in (other.start, other.stop) if run.start < end < run.stop}
    return [range(start, stop) for start, stop in pairwise(sorted({run.start, run.stop, *ends}))]


def _within(queries: Rows, keys: Rows, window: Window) -> bool:
    """Whether the window of some query can reach some key."""
    return len(keys.within(reach_of(queries, False, window))) > 0
