"""Who holds which rows and heads: partitions, and exchanges that two ranks see alike."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.faults import FaultError
from parallel.plan import QKV, ExchangeCounts, ShardPlan, head_fault, plan_sequence, split, usable_world_sizes

PLANS = st.builds(
    lambda length, world_size, share: plan_sequence(length, world_size * share, world_size),
    st.integers(0, 500),
    st.integers(1, 12),
    st.integers(1, 8),
)
VERBS = ("scatter_heads", "gather_heads", "gather_rows")


def counts_of(plan: ShardPlan, verb: str) -> list[ExchangeCounts]:
    return [getattr(plan, verb)(rank) for rank in range(plan.world_size)]


@given(length=st.integers(0, 1000), parts=st.integers(1, 40))
def test_a_split_has_every_item_once_in_order_and_evenly(length: int, parts: int) -> None:
    ranges = split(length, parts)
    assert [item for owned in ranges for item in owned] == list(range(length))
    sizes = [len(owned) for owned in ranges]
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_splits_that_are_written_by_hand() -> None:
    assert split(7, 3) == (range(0, 3), range(3, 5), range(5, 7))
    assert split(2, 4) == (range(0, 1), range(1, 2), range(2, 2), range(2, 2))
    assert split(0, 2) == (range(0, 0), range(0, 0))


@given(plan=PLANS)
def test_rows_and_heads_are_partitioned_without_padding(plan: ShardPlan) -> None:
    assert [row for rows in plan.rows for row in rows] == list(range(plan.length))
    assert [head for heads in plan.heads for head in heads] == list(range(plan.num_heads))
    assert len(plan.rows) == len(plan.heads) == plan.world_size
    assert len({len(heads) for heads in plan.heads}) == 1


@pytest.mark.parametrize("verb", VERBS)
@given(plan=PLANS)
def test_what_one_rank_sends_another_expects(verb: str, plan: ShardPlan) -> None:
    counts = counts_of(plan, verb)
    for sender in range(plan.world_size):
        for receiver in range(plan.world_size):
            assert counts[sender].sends[receiver] == counts[receiver].receives[sender]


@given(plan=PLANS)
def test_an_exchange_moves_every_item_of_the_layer_once(plan: ShardPlan) -> None:
    for rank in range(plan.world_size):
        rows, heads = len(plan.rows[rank]), len(plan.heads[rank])
        scatter, gather, whole = plan.scatter_heads(rank), plan.gather_heads(rank), plan.gather_rows(rank)
        assert sum(scatter.sends) == QKV * rows * plan.num_heads
        assert sum(scatter.receives) == QKV * plan.length * heads
        assert sum(gather.sends) == plan.length * heads
        assert sum(gather.receives) == rows * plan.num_heads
        assert whole.sends == (rows,) * plan.world_size
        assert sum(whole.receives) == plan.length
        assert tuple(QKV * count for count in gather.receives) == scatter.sends


@given(plan=PLANS)
def test_what_leaves_a_rank_is_what_it_sends_to_others(plan: ShardPlan) -> None:
    for rank in range(plan.world_size):
        away = {
            verb: sum(counts.sends) - counts.sends[rank] for verb in VERBS for counts in [getattr(plan, verb)(rank)]
        }
        assert plan.sent_pairs(rank) == away["scatter_heads"] + away["gather_heads"]
        assert plan.sent_rows(rank) == away["gather_rows"]


@given(length=st.integers(0, 500), heads=st.integers(1, 40))
def test_a_single_rank_sends_nothing(length: int, heads: int) -> None:
    plan = plan_sequence(length, heads, 1)
    assert (plan.sent_pairs(0), plan.sent_rows(0)) == (0, 0)


@given(plan=PLANS, factor=st.integers(0, 10))
def test_counts_scale(plan: ShardPlan, factor: int) -> None:
    counts = plan.scatter_heads(0)
    assert counts.times(factor).sends == tuple(factor * count for count in counts.sends)
    assert counts.times(factor).receives == tuple(factor * count for count in counts.receives)


def test_fewer_rows_than_ranks_leave_some_ranks_without_rows_but_not_without_heads() -> None:
    plan = plan_sequence(2, 8, 4)
    assert [len(rows) for rows in plan.rows] == [1, 1, 0, 0]
    assert [len(heads) for heads in plan.heads] == [2, 2, 2, 2]
    assert plan.scatter_heads(3) == ExchangeCounts((0, 0, 0, 0), (6, 6, 0, 0))
    assert plan.gather_heads(3) == ExchangeCounts((2, 2, 0, 0), (0, 0, 0, 0))
    assert plan.gather_rows(3) == ExchangeCounts((0, 0, 0, 0), (1, 1, 0, 0))
    assert (plan.sent_pairs(3), plan.sent_rows(3)) == (4, 0)


def test_counts_that_are_written_by_hand() -> None:
    plan = plan_sequence(175, 4, 2)
    assert (plan.length, plan.num_heads, plan.world_size) == (175, 4, 2)
    assert plan.scatter_heads(0) == ExchangeCounts((3 * 88 * 2, 3 * 88 * 2), (3 * 88 * 2, 3 * 87 * 2))
    assert plan.gather_heads(1) == ExchangeCounts((88 * 2, 87 * 2), (87 * 2, 87 * 2))
    assert plan.gather_rows(1) == ExchangeCounts((87, 87), (88, 87))
    assert plan.sent_pairs(0) == 3 * 88 * 2 + 87 * 2
    assert plan.sent_rows(1) == 87


@given(heads=st.integers(1, 128), limit=st.none() | st.integers(0, 200))
def test_the_usable_numbers_of_ranks_are_the_divisors_of_the_heads(heads: int, limit: int | None) -> None:
    usable = usable_world_sizes(heads, limit)
    top = heads if limit is None else limit
    assert usable == tuple(size for size in range(1, 129) if heads % size == 0 and size <= top)
    for size in range(1, 130):
        assert (head_fault(heads, size) is None) == (size in usable_world_sizes(heads))


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_with_those_that_do() -> None:
    fault = head_fault(12, 5, "command line")
    assert fault is not None
    assert str(fault) == (
        "parallel.world_size=5: 5 ranks do not divide the model's 12 attention heads; "
        "use 1 or 2 or 3 or 4 or 6 or 12 [command line]"
    )
    assert fault.allowed == ("1", "2", "3", "4", "6", "12")
    with pytest.raises(FaultError) as caught:
        plan_sequence(100, 12, 5)
    assert caught.value.faults == (head_fault(12, 5),)


@given(plan=PLANS)
def test_a_plan_is_a_value(plan: ShardPlan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan_sequence(plan.length, plan.num_heads, plan.world_size) == plan
    assert hash(plan) == hash(plan_sequence(plan.length, plan.num_heads, plan.world_size))
