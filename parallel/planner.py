"""Which strategy serves a call, and what the backend then sees. No torch here: the driver and `explain` use it too."""

from __future__ import annotations

from backends.interface import Kind, Requirements
from configs.faults import Fault, FaultError
from parallel.plan import Strategy, head_fault


def choose_strategy(kind: Kind, world_size: int, *, skip_sequence_parallel: bool = False) -> Strategy:
    """`ulysses` for sharded keys, `local` where every key is on the rank already. Raises FaultError for joint
    attention.

    Cross-attention keys are replicated: each rank's queries meet all of them without an exchange.
    """
    if kind == "joint":
        raise FaultError([Fault("kind", kind, "no strategy serves joint attention yet", "use self or cross")])
    if world_size == 1 or kind == "cross" or skip_sequence_parallel:
        return "local"
    return "ulysses"


def requirements_of(
    kind: Kind,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: str,
    world_size: int,
    *,
    causal: bool = False,
    skip_sequence_parallel: bool = False,
) -> tuple[Strategy, Requirements]:
    """The strategy of a call and the shapes that its backend sees: all heads when local, H/P of them under Ulysses.

    Raises FaultError for what no strategy serves.
    """
    strategy = choose_strategy(kind, world_size, skip_sequence_parallel=skip_sequence_parallel)
    if strategy == "ulysses" and heads != kv_heads:
        rule = f"{heads} query heads on {kv_heads} KV heads cannot be exchanged in one packet"
        raise FaultError([Fault("num_kv_heads", kv_heads, rule, "use one rank, or as many KV heads as query heads")])
    if causal and kind == "cross" and world_size > 1 and not skip_sequence_parallel:
        rule = "causal cross-attention counts from the first query row, and a rank holds others"
        raise FaultError([Fault("causal", causal, rule, "use one rank")])
    fault = head_fault(heads, world_size) if strategy == "ulysses" else None
    if fault is not None:
        raise FaultError([fault])
    share = world_size if strategy == "ulysses" else 1
    return strategy, Requirements(head_size, heads // share, kv_heads // share, dtype, kind, causal)
