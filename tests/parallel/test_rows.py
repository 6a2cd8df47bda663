"""Positions as runs, the tensors that hold them, and the parts of a block that have to be computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.blocks import BlockPart, parts_of
from parallel.pieces import assemble, take
from parallel.plan import Grid, Stream, plan_streams
from parallel.rows import Rows, Slice, chain, find, rows


@st.composite
def runs(draw: st.DrawFn) -> list[range]:
    """Disjoint runs in any order."""
    ends = sorted(draw(st.sets(st.integers(0, 40), max_size=8)))
    found = [range(low, high) for low, high in zip(ends[::2], ends[1::2], strict=False)]
    return draw(st.permutations(found))


@given(runs(), st.integers(0, 45), st.integers(0, 45))
def test_rows_are_their_positions_in_order(parts: list[range], low: int, high: int) -> None:
    listed = [position for part in parts for position in part]
    made = rows(*parts)
    assert list(made) == listed
    assert len(made) == len(listed)
    assert list(made.sorted) == sorted(listed)
    assert list(made.cut(range(low, high))) == listed[low:high]
    assert list(made.shifted(7)) == [position + 7 for position in listed]
    assert made.count_in(range(low, high)) == len([p for p in listed if low <= p < high])
    assert all(run for run in made.runs)
    assert rows(*made.runs) == made


def test_neighbouring_runs_are_one() -> None:
    assert rows(range(0, 3), range(3, 5), range(9, 9), range(5, 6)) == Rows((range(0, 6),))
    assert chain((rows(range(4, 5)), rows(range(0, 2)))) == Rows((range(4, 5), range(0, 2)))


@given(runs(), st.integers(0, 40), st.randoms())
def test_positions_are_found_wherever_tensors_hold_them(parts: list[range], cut: int, random: object) -> None:
    every = rows(*parts)
    held = (every.cut(range(cut)), every.cut(range(cut, 99)))
    tensors = [torch.tensor(list(part), dtype=torch.long)[None] for part in held]
    wanted = every.sorted
    got = assemble(wanted, list(zip(tensors, held, strict=True)))
    assert got.tolist() == [list(wanted)]


def test_one_slice_of_one_tensor_is_a_view() -> None:
    tensor = torch.arange(12).view(2, 6)
    part = take(tensor, rows(range(2, 5)))
    assert part.tolist() == [[2, 3, 4], [8, 9, 10]]
    assert part.data_ptr() == tensor[:, 2:].data_ptr()
    assert take(tensor, Rows()).shape == (2, 0)
    assert find(rows(range(2, 5)), (rows(range(0, 3)), rows(range(2, 6)))) == (Slice(0, 2, 3), Slice(1, 1, 3))


def test_a_position_that_nobody_holds_is_an_error() -> None:
    with pytest.raises(KeyError):
        find(rows(range(3)), (rows(range(2)),))


@st.composite
def streams(draw: st.DrawFn) -> tuple[Stream, ...]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=3))
    return tuple(Stream("s", length, sharded=sharded) for length, sharded in sizes)


@given(
    streams(),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
    st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
)
def test_the_parts_of_causal_blocks_are_what_may_be_seen(
    of: tuple[Stream, ...], ring: int, ulysses: int, zigzag: bool, window: tuple[int | None, int | None] | None
) -> None:
    grid = Grid(ulysses, ring)
    plan = plan_streams(of, 6, grid, "ulysses_ring", zigzag=zigzag)
    for mine in grid.ring_group(0):
        for others in grid.ring_group(0):
            queries, keys = plan.shares[mine].queries, plan.shares[others].keys
            if mine == others:
                keys = chain((keys, plan.shares[mine].fixed_keys)).sorted
            seen = set()
            for part in parts_of(queries, keys, True, window):
                assert part.queries
                assert part.keys
                assert not part.causal or list(queries.cut(part.queries)) == list(keys.cut(part.keys))
                for i, query in enumerate(queries.cut(part.queries)):
                    for j, key in enumerate(keys.cut(part.keys)):
                        if not part.causal or j <= i:
                            assert (query, key) not in seen
                            seen.add((query, key))
            before, after = window or (None, None)
            assert seen <= {(q, k) for q in queries for k in keys if k <= q}
            assert seen >= {
                (q, k)
                for q in queries
                for k in keys
                if k <= q and (before is None or k >= q - before) and (after is None or k <= q + after)
            }


def test_blocks_that_are_written_by_hand() -> None:
    early, late = rows(range(0, 2), range(6, 8)), rows(range(2, 4), range(4, 6))
    assert parts_of(early, early, True) == (BlockPart(range(4), range(4), True),)
    assert parts_of(early, late, True) == (BlockPart(range(2, 4), range(4)),)
    assert parts_of(late, early, True) == (BlockPart(range(4), range(2)),)
    assert parts_of(early, late, False) == (BlockPart(range(4), range(4)),)
    assert parts_of(rows(range(0, 2)), rows(range(8, 9)), False, (3, 3)) == ()
    assert parts_of(Rows(), early, True) == ()
    before, own = BlockPart(range(2), range(2)), BlockPart(range(2), range(2, 4), True)
    assert parts_of(rows(range(2, 6)), rows(range(4)), True) == (before, own, BlockPart(range(2, 4), range(4)))


@given(st.integers(1, 200), st.integers(2, 8))
def test_a_zigzag_balances_causal_work(length: int, ring: int) -> None:
    plan = plan_streams((Stream("s", length),), 4, Grid(1, ring), "ring", zigzag=True)
    work = [sum(row + 1 for row in held) for held in plan.rows]
    assert sorted(row for held in plan.rows for row in held) == list(range(length))
    assert max(work) - min(work) <= 2 * length  # a row more or less at most in each of two pieces
    assert all(len(held.runs) <= 2 for held in plan.rows)
