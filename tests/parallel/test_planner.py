"""Which strategy serves a call, and the shapes that its backend then sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import Kind, Requirements
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


def test_fewer_kv_heads_are_refused_where_heads_are_exchanged() -> None:
    with pytest.raises(FaultError) as caught:
        requirements_of("self", 8, 2, 64, "float32", 2)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("num_kv_heads", 2)
    assert fault.rule.startswith("8 query heads on 2 KV heads")


def test_heads_that_the_ranks_do_not_divide_are_refused_with_the_usable_numbers() -> None:
    with pytest.raises(FaultError) as caught:
        requirements_of("self", 4, 4, 64, "float32", 3)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value, fault.remedy) == ("parallel.world_size", 3, "use 1 or 2 or 4")
    assert requirements_of("cross", 4, 4, 64, "float32", 3)[0] == "local"


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
