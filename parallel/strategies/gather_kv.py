"""Queries stay where they are, and the keys and values of all ring places come to them."""

from __future__ import annotations

import torch

from parallel.pieces import assemble
from parallel.restrict import of_rows
from parallel.rows import chain
from parallel.strategies.work import HeldKeys, Result, Work


def gather_kv_attention(query: torch.Tensor, held: HeldKeys, work: Work) -> Result:
    """query [B, S, H_u, D] of my Ulysses group, to all keys. One exchange, and one call of the kernel."""
    plan, share = work.plan, work.share
    by_place = work.transport.gather_keys(held.key, held.value, plan)
    orders = tuple(plan.shares[other].keys for other in plan.grid.ring_group(work.rank))
    keys = chain(orders).sorted
    key, value = (
        assemble(keys, [(blocks[index], order) for blocks, order in zip(by_place, orders, strict=True)])
        for index in (0, 1)
    )
    every = HeldKeys(key, value, held.fixed_key, held.fixed_value)
    key, value, keys = every.joined(keys, share.fixed_keys)
    metadata = of_rows(work.metadata, share.queries, keys, query.device, causal=work.causal)
    return work.compute(query, key, value, metadata, causal=False, lse=work.lse)
