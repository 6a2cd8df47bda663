"""Who holds which rows and heads: partitions, and exchanges that two ranks see alike."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.plan import ExchangeCounts, ShardPlan, plan_sequence, split, split_heads, usable_world_sizes

PLANS = st.builds(
    lambda length, world_size, kv_heads, group: plan_sequence(length, kv_heads * group, world_size, kv_heads),
    st.integers(0, 500),
    st.integers(1, 12),
    st.integers(1, 20),
    st.integers(1, 4),
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
    assert [head for heads in plan.heads.query for head in heads] == list(range(plan.num_heads))
    assert len(plan.rows) == len(plan.heads.query) == len(plan.heads.kv) == plan.world_size


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
        rows, heads = len(plan.rows[rank]), len(plan.heads.query[rank])
        scatter, gather, whole = plan.scatter_heads(rank), plan.gather_heads(rank), plan.gather_rows(rank)
        replicated = sum(map(len, plan.heads.kv))
        assert sum(scatter.sends) == rows * (plan.num_heads + 2 * replicated)
        assert sum(scatter.receives) == plan.length * (heads + 2 * len(plan.heads.kv[rank]))
        assert sum(gather.sends) == plan.length * heads
        assert sum(gather.receives) == rows * plan.num_heads
        assert whole.sends == (rows,) * plan.world_size
        assert sum(whole.receives) == plan.length


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
    assert [len(heads) for heads in plan.heads.query] == [2, 2, 2, 2]
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


@given(group=st.integers(1, 8), kv_heads=st.integers(1, 12), world_size=st.integers(1, 12))
def test_every_query_head_is_computed_once_and_meets_its_own_kv_head(
    group: int, kv_heads: int, world_size: int
) -> None:
    heads = split_heads(group * kv_heads, kv_heads, world_size)
    assert [head for mine in heads.query for head in mine] == list(range(group * kv_heads))
    sizes = [len(mine) for mine in heads.query]
    assert max(sizes) - min(sizes) <= 1
    for rank, (mine, kv) in enumerate(zip(heads.query, heads.kv, strict=True)):
        needed = sorted({head // group for head in mine})
        assert list(kv) == needed  # no KV head travels to a rank that does not read it
        reads = heads.kv_of(rank)
        ratio = max(len(mine) // max(len(kv), 1), 1)
        local = reads if reads is not None else tuple(i // ratio for i in range(len(mine)))
        assert [kv.start + index for index in local] == [head // group for head in mine]
    largest = heads.largest
    assert largest[0] == max(sizes)
    assert largest[0] % largest[1] == 0


def test_head_splits_that_are_written_by_hand() -> None:
    assert split_heads(12, 12, 5).query == (range(0, 3), range(3, 6), range(6, 8), range(8, 10), range(10, 12))
    many = split_heads(8, 2, 3)  # the second rank has heads of both groups
    assert many.kv == (range(0, 1), range(0, 2), range(1, 2))
    assert (many.kv_of(0), many.kv_of(1), many.kv_of(2)) == (None, (0, 1, 1), None)
    assert (many.expands, many.largest) == (True, (3, 3))
    one = split_heads(8, 1, 4)
    assert one.kv == (range(0, 1),) * 4
    assert (one.expands, one.largest) == (False, (2, 1))
    few = split_heads(2, 2, 3)
    assert few.query == few.kv == (range(0, 1), range(1, 2), range(2, 2))


@given(plan=PLANS)
def test_a_plan_is_a_value(plan: ShardPlan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan
    again = plan_sequence(plan.length, plan.num_heads, plan.world_size, plan.heads.num_kv_heads)
    assert (again, hash(again)) == (plan, hash(plan))
