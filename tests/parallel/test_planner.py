"""Which strategy serves a role, the shapes that its backend then sees, and what is turned down on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Capabilities, Features, Kind, Requirements
from backends.platforms.facts import DeviceFacts
from backends.registry import Registry
from backends.requirements import NO_FEATURES
from backends.selection import Agreed, Choice
from backends.selector import Selector
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec, ParallelConfig
from parallel.plan import Grid
from parallel.planner import Planned, RoleCall, Way, choose

AUTO = ParallelConfig()


def planned(
    kind: Kind, heads: int, kv_heads: int, world_size: int, parallel: ParallelConfig = AUTO, **asked: Any
) -> Planned:
    backend = asked.pop("backend", None)
    config = AttentionConfig(default=None if backend is None else AttentionSpec(backend))
    selector = Selector(DeviceFacts("cpu"), config, Registry())
    call = RoleCall(kind, heads, kv_heads, 64, "float32", **{"features": NO_FEATURES} | asked)
    return choose(call, world_size, parallel, lambda required: selector.select("role", required))


@pytest.mark.parametrize(
    ("kind", "world_size", "skip", "strategy"),
    [
        ("self", 1, False, "local"),
        ("self", 2, False, "ulysses"),
        ("self", 8, False, "ulysses"),
        ("self", 2, True, "local"),
        ("joint", 1, False, "local"),
        ("joint", 4, False, "ulysses"),
        ("cross", 1, False, "local"),
        ("cross", 4, False, "local"),
        ("cross", 4, True, "local"),
    ],
)
def test_only_sharded_keys_are_exchanged(kind: Kind, world_size: int, skip: bool, strategy: str) -> None:
    found = planned(kind, 8, 8, world_size, skip=skip)
    share = world_size if strategy == "ulysses" else 1
    assert found.way == Way(strategy, Grid(share))  # type: ignore[arg-type]
    assert found.selection.requirements == Requirements(64, 8 // share, 8 // share, "float32", kind)
    assert found.selection.degrees == (share, 1)


def test_fewer_kv_heads_are_served_where_nothing_is_exchanged() -> None:
    for kind, world_size, skip in (("self", 1, False), ("cross", 4, False), ("self", 4, True)):
        required = planned(kind, 8, 2, world_size, skip=skip).selection.requirements  # type: ignore[arg-type]
        assert (required.num_heads, required.num_kv_heads) == (8, 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "seen"),
    [
        (8, 2, 2, (4, 1)),  # whole groups
        (8, 2, 4, (2, 1)),  # parts of groups
        (8, 2, 3, (3, 3)),  # a rank with heads of two groups: each query head gets a KV head of its own
        (5, 5, 3, (2, 2)),
        (2, 2, 4, (1, 1)),
        (7, 1, 4, (2, 1)),
    ],
)
def test_a_backend_is_asked_for_the_heads_of_the_busiest_rank(
    heads: int, kv_heads: int, world_size: int, seen: tuple[int, int]
) -> None:
    found = planned("self", heads, kv_heads, world_size, backend="TORCH_SDPA")
    assert found.way == Way("ulysses", Grid(world_size))
    assert (found.selection.requirements.num_heads, found.selection.requirements.num_kv_heads) == seen


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "way"),
    [
        (12, 12, 8, Way("ulysses_ring", Grid(4, 2))),
        (14, 14, 4, Way("ulysses_ring", Grid(2, 2))),
        (5, 5, 3, Way("ring", Grid(1, 3))),
        (6, 2, 4, Way("ulysses_ring", Grid(2, 2))),
        (9, 1, 6, Way("ulysses_ring", Grid(3, 2))),
        (12, 4, 6, Way("ulysses", Grid(6))),
        (4, 4, 6, Way("ulysses_ring", Grid(2, 3))),
    ],
)
def test_ranks_that_do_not_divide_the_heads_get_a_ring_where_the_backend_has_the_log_sum_exp(
    heads: int, kv_heads: int, world_size: int, way: Way
) -> None:
    found = planned("self", heads, kv_heads, world_size, backend="REFERENCE")
    assert found.way == way
    assert found.selection.requirements.lse == (way.grid.ring > 1)
    assert found.selection.rejected_strategies == ()


def test_a_ring_that_would_cost_the_better_backend_is_turned_down_and_recorded() -> None:
    found = planned("self", 5, 5, 3)
    assert (found.way, found.selection.backend) == (Way("ulysses", Grid(3)), "TORCH_SDPA")
    (rejected,) = found.selection.rejected_strategies
    assert rejected.strategy == "ring 1x3"
    assert "would get REFERENCE instead of TORCH_SDPA" in rejected.faults[0].rule


def test_a_ring_that_the_named_backend_cannot_serve_is_turned_down_and_recorded() -> None:
    found = planned("self", 12, 12, 8, backend="TORCH_SDPA")
    assert found.way == Way("ulysses", Grid(8))
    (rejected,) = found.selection.rejected_strategies
    assert rejected.strategy == "ulysses_ring 4x2"
    assert rejected.faults[0].rule == "returning the log-sum-exp is not supported"


@pytest.mark.parametrize(
    ("parallel", "world_size", "way"),
    [
        (ParallelConfig(strategy="ulysses"), 4, Way("ulysses", Grid(4))),
        (ParallelConfig(ulysses=4), 4, Way("ulysses", Grid(4))),
        (ParallelConfig(ulysses=3), 3, Way("ulysses", Grid(3))),
        (ParallelConfig(ulysses=2), 4, Way("ulysses_ring", Grid(2, 2))),
        (ParallelConfig(ring=2), 4, Way("ulysses_ring", Grid(2, 2))),
        (ParallelConfig(ring=4), 4, Way("ring", Grid(1, 4))),
        (ParallelConfig(ring=1), 4, Way("ulysses", Grid(4))),
        (ParallelConfig(strategy="ring"), 4, Way("ring", Grid(1, 4))),
        (ParallelConfig(strategy="ring", ulysses=2), 4, Way("ulysses_ring", Grid(2, 2))),
        (ParallelConfig(strategy="gather_kv"), 4, Way("gather_kv", Grid(1, 4))),
        (ParallelConfig(strategy="gather_kv", ring=2), 4, Way("ulysses_gather_kv", Grid(2, 2))),
        (ParallelConfig(ulysses=3, ring=2), 6, Way("ulysses_ring", Grid(3, 2))),
        (ParallelConfig(strategy="ring"), 1, Way()),
        (ParallelConfig(strategy="local"), 1, Way()),
    ],
)
def test_what_is_asked_for_runs(parallel: ParallelConfig, world_size: int, way: Way) -> None:
    assert planned("self", 8, 8, world_size, parallel).way == way
    assert planned("cross", 8, 8, world_size, parallel).way == Way()


@pytest.mark.parametrize(
    ("parallel", "world_size", "said"),
    [
        (ParallelConfig(ulysses=3), 4, "parallel.ulysses=3: degrees of 3 do not make up 4 ranks"),
        (ParallelConfig(ulysses=2, ring=3), 4, "parallel.ulysses=2: degrees of 2x3 do not make up 4 ranks"),
        (ParallelConfig(ulysses=2, ring=1), 4, "parallel.ulysses=2: degrees of 2x1 do not make up 4 ranks"),
        (ParallelConfig(ring=3), 4, "parallel.ring=3: degrees of 3 do not make up 4 ranks"),
        (ParallelConfig(strategy="ulysses", ring=2), 4, "parallel.strategy=ulysses: with degrees of 2x2"),
        (ParallelConfig(strategy="ring", ulysses=4), 4, "parallel.strategy=ring: with degrees of 4x1"),
        (ParallelConfig(strategy="local"), 4, "parallel.strategy=local: self attention reads the rows of all ranks"),
    ],
)
def test_settings_that_fit_neither_ranks_nor_role_are_refused(
    parallel: ParallelConfig, world_size: int, said: str
) -> None:
    with pytest.raises(FaultError) as caught:
        planned("self", 8, 8, world_size, parallel)
    assert str(caught.value).startswith(said)


def test_a_strategy_that_no_backend_serves_is_refused_with_the_reason() -> None:
    with pytest.raises(FaultError) as caught:
        planned("self", 8, 8, 2, ParallelConfig(strategy="ring"), backend="TORCH_SDPA")
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("attention.default", "TORCH_SDPA")
    assert fault.rule == "for ring 1x2, returning the log-sum-exp is not supported"
    assert "REFERENCE" in fault.remedy


@pytest.mark.parametrize(
    ("strategy", "asked", "needs"),
    [
        ("ulysses", {"causal": True, "features": Features(window=True, sinks=True)}, {"window": True, "sinks": True}),
        ("ring", {"causal": True}, {"causal": True, "lse": True}),
        ("ring", {"features": Features(window=True, sinks=True)}, {"mask": "full", "lse": True}),
        ("ring", {"features": Features(window=True, mask="per_head")}, {"mask": "per_head", "lse": True}),
        ("ring", {"features": Features(mask="key_padding")}, {"mask": "key_padding", "lse": True}),
        ("gather_kv", {"causal": True}, {"mask": "full"}),
        ("gather_kv", {"features": Features(window=True, sinks=True)}, {"mask": "full", "sinks": True}),
        ("gather_kv", {"lse": True, "features": Features(packed=True)}, {"lse": True, "packed": True}),
    ],
)
def test_a_backend_is_asked_for_what_its_blocks_need(
    strategy: str, asked: dict[str, Any], needs: dict[str, Any]
) -> None:
    found = planned("self", 8, 8, 2, ParallelConfig(strategy=strategy), backend="REFERENCE", **asked)
    heads = 4 if strategy == "ulysses" else 8
    causal = bool(asked.get("causal")) and strategy != "gather_kv"
    assert found.selection.requirements == replace(
        Requirements(64, heads, heads, "float32", "self", causal=causal), **needs
    )


def test_kv_heads_that_do_not_divide_the_query_heads_are_refused() -> None:
    with pytest.raises(FaultError, match="8 query heads are no multiple of 3 KV heads"):
        planned("self", 8, 3, 2)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_size"])
def test_sizes_that_no_layer_has_are_refused(name: str, value: Any) -> None:
    call = replace(RoleCall("self", 8, 8, 64, "float32", features=NO_FEATURES), **{name: value})
    with pytest.raises(FaultError) as caught:
        choose(call, 2, AUTO, lambda required: pytest.fail("a backend was asked"))
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == (name if name == "head_size" else f"num_{name}", repr(value))
    assert (fault.rule, fault.remedy) == ("it is a whole number of at least 1", "give the model's own")


def test_kv_heads_that_do_not_divide_the_query_heads_are_a_fault_of_every_backend() -> None:
    (fault,) = Capabilities().faults(Requirements(64, 8, 3, "float32", "self"))
    assert (fault.key, fault.value) == ("num_kv_heads", 3)


def test_a_strategy_on_whose_backend_the_ranks_settled_stays() -> None:
    call = RoleCall("self", 5, 5, 64, "float32", features=NO_FEATURES)
    uneven = call.required(Way("ulysses", Grid(3)))
    agreement = {("role", uneven): Agreed(Choice("REFERENCE", "plain", "backends.declared.reference.ReferenceBackend"))}
    selector = Selector(DeviceFacts("cpu"), AttentionConfig(), Registry(), agreement)
    found = choose(call, 3, AUTO, lambda required: selector.select("role", required))
    assert (found.way, found.selection.backend) == (Way("ulysses", Grid(3)), "REFERENCE")


def test_causal_cross_attention_is_refused_on_ranks_that_hold_part_of_the_rows() -> None:
    with pytest.raises(FaultError, match="causal cross-attention"):
        planned("cross", 4, 4, 2, causal=True)
    for kind, world_size, skip in (("cross", 1, False), ("cross", 2, True), ("self", 2, False)):
        found = planned(kind, 4, 4, world_size, causal=True, skip=skip)  # type: ignore[arg-type]
        assert found.selection.requirements.causal


@given(share=st.integers(1, 16), world_size=st.integers(2, 8))
def test_the_heads_of_all_ranks_together_are_the_layers(share: int, world_size: int) -> None:
    heads = share * world_size
    found = planned("self", heads, heads, world_size)
    assert found.way == Way("ulysses", Grid(world_size))
    required = found.selection.requirements
    assert (required.num_heads * world_size, required.num_kv_heads * world_size) == (heads, heads)
