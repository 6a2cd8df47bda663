"""Which strategy serves a call, and the shapes that its backend then sees."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Capabilities, Kind, Requirements
from configs.faults import FaultError
from parallel.planner import choose_strategy, requirements_of


@pytest.mark.parametrize(
    ("kind", "world_size", "skip", "strategy"),
    [
        ("self", 1, False, "local"),
        ("self", 2, False, "ulysses"),
        ("self", 8, False, "ulysses"),
        ("self", 2, True, "local"),
        ("cross", 1, False, "local"),
        ("cross", 4, False, "local"),
        ("cross", 4, True, "local"),
    ],
)
def test_only_sharded_keys_are_exchanged(kind: Kind, world_size: int, skip: bool, strategy: str) -> None:
    assert choose_strategy(kind, world_size, skip_sequence_parallel=skip) == strategy
    chosen, required = requirements_of(kind, 8, 8, 64, "bfloat16", world_size, skip_sequence_parallel=skip)
    assert chosen == strategy
    assert skip or choose_strategy(kind, world_size) == strategy
    share = world_size if strategy == "ulysses" else 1
    assert required == Requirements(64, 8 // share, 8 // share, "bfloat16", kind)


@pytest.mark.parametrize("world_size", [1, 2])
def test_joint_attention_is_refused(world_size: int) -> None:
    with pytest.raises(FaultError) as caught:
        requirements_of("joint", 8, 8, 64, "float32", world_size)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value, fault.remedy) == ("kind", "joint", "use self or cross")


def test_fewer_kv_heads_are_served_where_nothing_is_exchanged() -> None:
    for kind, world_size, skip in (("self", 1, False), ("cross", 4, False), ("self", 4, True)):
        strategy, required = requirements_of(kind, 8, 2, 64, "float32", world_size, skip_sequence_parallel=skip)  # type: ignore[arg-type]
        assert (strategy, required.num_heads, required.num_kv_heads) == ("local", 8, 2)


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
    strategy, required = requirements_of("self", heads, kv_heads, 64, "float32", world_size)
    assert (strategy, required.num_heads, required.num_kv_heads) == ("ulysses", *seen)


def test_kv_heads_that_do_not_divide_the_query_heads_are_refused() -> None:
    with pytest.raises(FaultError, match="8 query heads are no multiple of 3 KV heads"):
        requirements_of("self", 8, 3, 64, "float32", 2)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_sizes_that_no_layer_has_are_refused(position: int, value: Any) -> None:
    sizes: list[Any] = [8, 8, 64]
    sizes[position] = value
    with pytest.raises(FaultError) as caught:
        requirements_of("self", *sizes, "float32", 2)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == (("num_heads", "num_kv_heads", "head_size")[position], repr(value))
    assert (fault.rule, fault.remedy) == ("it is a whole number of at least 1", "give the model's own")


def test_no_kv_heads_are_a_fault_of_every_backend_and_no_division() -> None:
    (fault,) = Capabilities().faults(Requirements(64, 8, 0, "float32", "self"))
    assert (fault.key, fault.value) == ("num_kv_heads", 0)


def test_causal_cross_attention_is_refused_on_ranks_that_hold_part_of_the_rows() -> None:
    with pytest.raises(FaultError, match="causal cross-attention"):
        requirements_of("cross", 4, 4, 64, "float32", 2, causal=True)
    for kind, world_size, skip in (("cross", 1, False), ("cross", 2, True), ("self", 2, False)):
        required = requirements_of(
            kind,  # type: ignore[arg-type]
            4,
            4,
            64,
            "float32",
            world_size,
            causal=True,
            skip_sequence_parallel=skip,
        )[1]
        assert required.causal


@given(share=st.integers(1, 16), world_size=st.integers(2, 8), size=st.integers(1, 256))
def test_the_heads_of_all_ranks_together_are_the_layers(share: int, world_size: int, size: int) -> None:
    heads = share * world_size
    strategy, required = requirements_of("self", heads, heads, size, "float16", world_size)
    assert strategy == "ulysses"
    assert (required.num_heads * world_size, required.num_kv_heads * world_size) == (heads, heads)
    assert (required.head_size, required.dtype, required.mask) == (size, "float16", "none")
