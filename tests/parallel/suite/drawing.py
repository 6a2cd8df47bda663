"""How calls are drawn: hypothesis strategies that shrink to the plainest call."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from parallel.plan import Stream
from tests.parallel.suite.drawn import Drawn

BATCH = 48
"""Calls that are drawn together, and shrink together: the others of a failing one become nothing."""

WAYS = ("ulysses",) * 6 + ("ring",) * 5 + ("ulysses_ring",) * 6 + ("gather_kv",) * 2 + ("ulysses_gather_kv",) * 2
GRIDS = ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))
"""Ulysses degree x ring degree."""

DTYPES = ("float64", "float32", "float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "heads_first", "batch_last", "sliced", "strided")
WITH_LSE = ("REFERENCE",) * 9 + ("TORCH_SDPA",)
ANY = ("REFERENCE",) * 5 + ("TORCH_SDPA",) * 3 + (None,)


def often(draw: st.DrawFn, one_in: int) -> bool:
    """False where it shrinks to."""
    return draw(st.integers(0, one_in - 1)) == one_in - 1


def lengths(largest: int) -> st.SearchStrategy[int]:
    return st.integers(0, largest)


@st.composite
def calls(draw: st.DrawFn) -> Drawn:
    way = draw(st.sampled_from((*WAYS, "auto", "auto", "auto", "auto")))
    found = _ranks(draw, way)
    found |= _shapes(draw, way)
    found |= _carried(draw)
    ring = way in ("ring", "ulysses_ring")
    found["causal"] = often(draw, 5)
    found["backend"] = draw(st.sampled_from(WITH_LSE if ring else ANY))
    if found["world_size"] <= 4 and often(draw, 25):  # torch traces it anew for each shape, for half a second
        found["backend"] = "FLEX_ATTENTION"
    found["lse"] = found["backend"] != "TORCH_SDPA" and often(draw, 3)
    found["gradient"] = found["backend"] != "FLEX_ATTENTION" and often(draw, 5)
    found["dtype"] = draw(st.sampled_from(DTYPES))
    found["layouts"] = tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(3))
    found["seed"] = draw(st.integers(0, 2**20))
    return _made_to_fit(draw, found)


def _ranks(draw: st.DrawFn, way: str) -> dict[str, Any]:
    if way == "auto":
        return {"world_size": draw(st.integers(1, 8))}
    if way in ("ulysses_ring", "ulysses_gather_kv"):
        ulysses, ring = draw(st.sampled_from(GRIDS))
        strategy = "gather_kv" if way == "ulysses_gather_kv" else draw(st.sampled_from(("auto", "ring")))
        return {"world_size": ulysses * ring, "ulysses": ulysses, "ring": ring, "strategy": strategy}
    return {"world_size": draw(st.integers(2, 8)), "strategy": way}


def _shapes(draw: st.DrawFn, way: str) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 6))
    heads = kv_heads * draw(st.integers(1, max(9 // kv_heads, 1)))
    size = draw(st.sampled_from((4, 8, 3, 16)))
    kind = draw(st.sampled_from(("self", "self", "joint") if way != "auto" else ("self", "joint", "cross")))
    batch = 0 if often(draw, 40) else draw(st.integers(1, 3))
    found: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "size": size}
    found["value_size"] = draw(st.sampled_from((size + 1, 2))) if often(draw, 5) else size
    found["kind"] = kind
    if kind == "joint":
        found["streams"] = tuple(draw(st.lists(_streams(), min_size=1, max_size=4)))
    else:
        found["streams"] = (Stream("video", draw(lengths(40))),)
        found["cross_keys"] = draw(lengths(20)) if kind == "cross" else 0
    return found


@st.composite
def _streams(draw: st.DrawFn) -> Stream:
    what = draw(st.sampled_from(("sharded", "sharded", "replicated", "replicated", "keys")))
    return Stream(what, draw(lengths(16)), sharded=what == "sharded", queries=what != "keys")


def _carried(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {"mask": draw(st.sampled_from(("none",) * 6 + ("key_padding", "full", "full", "per_head")))}
    side = st.one_of(st.integers(0, 9), st.none())
    found["bias"] = draw(st.sampled_from(("none",) * 8 + ("shared", "per_head")))
    found["window"] = (draw(side), draw(side)) if often(draw, 9) else None
    found["soft_cap"] = 1.5 if often(draw, 12) else None
    found["sinks"] = often(draw, 8)
    found["documents"] = draw(st.integers(2, 5)) if often(draw, 8) else 0
    return found


def _made_to_fit(draw: st.DrawFn, found: dict[str, Any]) -> Drawn:
    """Most of what would be refused is put right, so that enough of the calls run."""
    case = Drawn(**found)
    if often(draw, 12):
        return case
    if case.queries != case.keys or (case.kind == "cross" and case.world_size > 1):
        found |= {"causal": False, "window": None}
    if case.backend == "TORCH_SDPA":
        found |= {"window": None, "soft_cap": None, "sinks": False, "documents": 0}
    if case.backend == "FLEX_ATTENTION":
        found |= {"bias": "none", "sinks": False}
        if case.queries and case.keys and case.strategy in ("auto", "ulysses") and case.seed % 3 == 0:
            found |= {"mask": "block", "causal": False, "window": None, "documents": 0}
    return Drawn(**found)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Drawn, ...]:
    """Up to BATCH calls. Each may be nothing, which is what the innocent ones shrink to."""
    drawn = [draw(calls()) if draw(st.integers(0, 31)) else None for _ in range(BATCH)]
    return tuple(case for case in drawn if case is not None)
