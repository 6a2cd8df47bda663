"""The collectives of a call, and the bytes that leave a rank in them, as the plan has them. No torch here."""

from __future__ import annotations

from collections import Counter

from parallel.events import Traffic
from parallel.exchange import gathered_bytes, scattered_bytes, scattered_numbers
from parallel.plan import ExchangeCounts, ShardPlan


def call_traffic(
    plan: ShardPlan,
    rank: int,
    *,
    batch: int,
    head_size: int,
    element_size: int,
    value_head_size: int | None = None,
    lse: bool = False,
    gradient: bool = False,
) -> Traffic:
    """Of one attention call. element_size: bytes of a number. value_head_size: of V (default: head_size). lse: with the
    log-sum-exp returned, in fp32 or fp64. gradient: the forward pass of a call that is differentiated, where the keys
    of a ring come in one exchange.
    """
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    ring, place = plan.grid.place(rank)
    value_size = head_size if value_head_size is None else value_head_size
    both = batch * (head_size + value_size) * element_size  # of a head's key and value

    def exchange(verb: str, counts: ExchangeCounts, own: int, item: int) -> None:
        calls[verb] += 1
        sent[verb] += (sum(counts.sends) - counts.sends[own]) * item

    quantised = plan.exchange == "fp8"
    if plan.grid.ulysses > 1 and quantised:
        sizes = scattered_bytes(
            plan, rank, batch=batch, head_size=head_size, value_head_size=value_size, element_size=element_size
        )
        exchange("scatter_heads", sizes, place, 1)
    elif plan.grid.ulysses > 1:
        numbers = scattered_numbers(plan, rank, batch=batch, head_size=head_size, value_head_size=value_size)
        exchange("scatter_heads", numbers, place, element_size)
    if plan.grid.ring > 1 and plan.heads.query[place]:
        if gradient or plan.strategy in ("gather_kv", "ulysses_gather_kv"):
            exchange("gather_keys", plan.gather_keys(rank), ring, both)
        else:
            group = plan.grid.ring_group(rank)
            passed_on = sum(len(plan.shares[other].keys) for other in group) - len(
                plan.shares[group[(ring + 1) % len(group)]].keys
            )
            calls["rotate_keys"] += len(group) - 1
            sent["rotate_keys"] += passed_on * len(plan.heads.kv[place]) * both
    if plan.returns:
        own = plan.return_group(rank).index(rank)
        if quantised:
            exchange("gather_heads", gathered_bytes(plan, rank, batch=batch, head_size=value_size), own, 1)
        else:
            exchange("gather_heads", plan.gather_heads(rank), own, batch * value_size * element_size)
        if lse:
            exchange("gather_heads", plan.gather_heads(rank), own, batch * max(element_size, 4))
    return Traffic(dict(calls), dict(sent))
