"""What a call's exchanges carry: numbers as they are, or as fp8 with a scale for each row and head. No torch here.

Of an fp8 exchange a row of one head of Q, V or the output is head_size bytes and a scale of `SCALE_BYTES`. K is never
quantised, since a few of its channels are far larger than the rest and decide the softmax; nor are log-sum-exps. What
goes between the groups of a grid (keys and values) is not, either.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.plan import ExchangeCounts, ShardPlan

SCALE_BYTES = 4


def scattered_numbers(
    plan: ShardPlan, rank: int, *, batch: int, head_size: int, value_head_size: int
) -> ExchangeCounts:
    """`ShardPlan.scatter_heads` of an exchange that quantises nothing, in numbers."""
    if value_head_size == head_size:
        return plan.scatter_heads(rank).times(batch * head_size)
    split = zip(plan.heads.query, plan.heads.kv, strict=True)
    return _scattered(plan, rank, [batch * row_numbers(len(q), len(kv), head_size, value_head_size) for q, kv in split])


def scattered_bytes(
    plan: ShardPlan, rank: int, *, batch: int, head_size: int, value_head_size: int, element_size: int
) -> ExchangeCounts:
    """`ShardPlan.scatter_heads` of an fp8 exchange, in bytes. element_size: bytes of a number of K."""
    split = zip(plan.heads.query, plan.heads.kv, strict=True)
    return _scattered(
        plan,
        rank,
        [batch * fp8_row_bytes(len(q), len(kv), head_size, value_head_size, element_size) for q, kv in split],
    )


def _scattered(plan: ShardPlan, rank: int, widths: Sequence[int]) -> ExchangeCounts:
    """widths: of one row of each place's heads."""
    held = [len(plan.shares[other].sent_keys) for other in plan.grid.ulysses_group(rank)]
    place = plan.grid.place(rank)[1]
    return ExchangeCounts(tuple(held[place] * width for width in widths), tuple(rows * widths[place] for rows in held))


def gathered_bytes(plan: ShardPlan, rank: int, *, batch: int, head_size: int) -> ExchangeCounts:
    """`ShardPlan.gather_heads` of an fp8 exchange, in bytes. head_size: of the output, which is that of V."""
    return plan.gather_heads(rank).times(batch * (head_size + SCALE_BYTES))


def row_numbers(heads: int, kv_heads: int, head_size: int, value_head_size: int) -> int:
    """Of one row of a rank's Q, K and V."""
    return (heads + kv_heads) * head_size + kv_heads * value_head_size


def fp8_row_bytes(heads: int, kv_heads: int, head_size: int, value_head_size: int, element_size: int) -> int:
    """Of one row of a rank's Q, K and V."""
    quantised = heads * (head_size + SCALE_BYTES) + kv_heads * (value_head_size + SCALE_BYTES)
    return quantised + kv_heads * head_size * element_size
