"""How calls for NCCL ranks with the kernels of a GPU are drawn, out of those that the backends claim on Hopper."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from parallel.plan import Stream
from tests.parallel.suite.drawing import LAYOUTS, often
from tests.parallel.suite.drawn import Drawn

BATCH = 24
KERNELS = ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA")
BACKENDS = (*KERNELS * 3, "REFERENCE", None)
LENGTHS = (17, 5, 63, 64, 128, 129, 192, 300, 1025, 2, 1, 0)


@st.composite
def calls(draw: st.DrawFn, world_size: int) -> Drawn:
    """world_size: of the ranks there are; the calls are for all of them."""
    way = draw(st.sampled_from(("ulysses", "ulysses", "ring", "gather_kv", "auto")))
    backend = draw(st.sampled_from(BACKENDS))
    if backend == "TORCH_SDPA" and way == "ring":
        way = "ulysses"
    kv_heads = draw(st.integers(1, 4))
    degrees = [degree for degree in range(1, world_size) if world_size % degree == 0]
    found: dict[str, Any] = {
        "world_size": world_size,
        "strategy": way,
        "ulysses": draw(st.sampled_from(degrees)) if way in ("ring", "gather_kv") else None,
        "backend": backend,
        "kind": draw(st.sampled_from(("self", "self", "joint") if way != "auto" else ("self", "joint", "cross"))),
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * draw(st.integers(1, 8 // kv_heads)),
        "kv_heads": kv_heads,
        "size": draw(st.sampled_from((64, 128))),
        "dtype": "bfloat16" if backend in KERNELS else draw(st.sampled_from(("bfloat16", "float32"))),
        "layouts": tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(3)),
        "seed": draw(st.integers(0, 2**20)),
    }
    found["value_size"] = found["size"]
    found |= _rows(draw, found["kind"])
    if backend != "TORCH_SDPA":
        found["lse"] = often(draw, 3)
    weighed = found.get("lse") or way == "ring"
    found["gradient"] = not (backend == "CUDNN_ATTN" and weighed) and often(
        draw, 3
    )  # it differentiates no such weights
    return Drawn(**(found | _carried(draw, Drawn(**found))))


def _rows(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    length = st.sampled_from(LENGTHS)
    if kind == "joint":
        streams = draw(st.lists(st.tuples(st.sampled_from(("sharded", "replicated", "keys")), length), max_size=3))
        text = tuple(Stream(what, n, sharded=what == "sharded", queries=what != "keys") for what, n in streams)
        return {"streams": (*text, Stream("video", draw(length)))}
    return {"streams": (Stream("video", draw(length)),), "cross_keys": draw(length) if kind == "cross" else 0}


def _carried(draw: st.DrawFn, case: Drawn) -> dict[str, Any]:
    """One of what the backend claims, sometimes beside causality."""
    masks = [{"mask": kind} for kind in ("key_padding", "full", "per_head")]
    added: list[dict[str, Any]] = [{"bias": "shared"}, {"bias": "per_head"}]
    learned: list[dict[str, Any]] = [{"soft_cap": 1.5}, {"sinks": True}]
    positions = case.kind == "self"
    rest = [*learned, *([{"window": (9, 5)}, {"documents": 3}] if positions else [])]
    among = {
        "FLASH_ATTN": rest if case.strategy == "ulysses" else learned[:1],
        "CUDNN_ATTN": masks + added,
        "TORCH_SDPA": masks + added,
    }.get(case.backend or "", [*masks, *added, *rest])
    found = dict(draw(st.sampled_from(among))) if often(draw, 2) else {}
    gathers = case.strategy == "gather_kv" and case.backend == "FLASH_ATTN"
    found["causal"] = positions and not gathers and often(draw, 3)
    if found.keys() & {"bias", "sinks"} and case.backend in ("FLASH_ATTN", "CUDNN_ATTN"):
        found["gradient"] = False  # they give none of what is learned
    return found


@st.composite
def batches(draw: st.DrawFn, world_size: int) -> tuple[Drawn, ...]:
    return tuple(draw(calls(world_size)) for _ in range(BATCH))
