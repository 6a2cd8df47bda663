"""Which strategy serves a call, and what the backend then sees. No torch here: the driver and `explain` use it too."""

from __future__ import annotations

from dataclasses import replace

from backends.requirements import Kind, Requirements
from configs.faults import Fault, FaultError
from parallel.plan import Strategy, split_heads


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
    value_head_size: int | None = None,
    skip_sequence_parallel: bool = False,
) -> tuple[Strategy, Requirements]:
    """The strategy of a call and the shapes that its backend sees: all heads when local, those of the busiest rank
    under Ulysses, so that all ranks ask alike.

    Raises FaultError for what no strategy serves.
    """
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": head_size, "value_head_size": value_head_size}
    wrong = {name: size for name, size in sizes.items() if size is not None and (type(size) is not int or size < 1)}
    if wrong:
        rule = "it is a whole number of at least 1"
        raise FaultError(Fault(name, repr(size), rule, "give the model's own") for name, size in wrong.items())
    strategy = choose_strategy(kind, world_size, skip_sequence_parallel=skip_sequence_parallel)
    if strategy == "ulysses" and value_head_size not in (None, head_size):
        rule = f"a head size of V ({value_head_size}) other than that of Q and K cannot be exchanged in one packet"
        raise FaultError([Fault("value_head_size", value_head_size, rule, "use one rank")])
    if causal and kind == "cross" and world_size > 1 and not skip_sequence_parallel:
        rule = "causal cross-attention counts from the first query row, and a rank holds others"
        raise FaultError([Fault("causal", causal, rule, "use one rank")])
    if heads % kv_heads:
        rule = f"{heads} query heads are no multiple of {kv_heads} KV heads"
        raise FaultError([Fault("num_kv_heads", kv_heads, rule, "give a number that divides the query heads")])
    mine = split_heads(heads, kv_heads, world_size).largest if strategy == "ulysses" else (heads, kv_heads)
    required = Requirements(head_size, *mine, dtype, kind, causal)
    return strategy, replace(required, value_head_size=None if value_head_size == head_size else value_head_size)
