"""Queries stay where they are, and the keys and values of all ring places come to them."""

from __future__ import annotations

import torch

from parallel.blocks import reach_of
from parallel.restrict import of_rows
from parallel.rows import chain
from parallel.strategies.work import HeldKeys, Result, Work, reaching


def gather_kv_attention(query: torch.Tensor, held: HeldKeys, work: Work) -> Result:
    """query [B, S, H_u, D] of my Ulysses group, to those of all keys that one of them may look at. One exchange, and
    one call of the kernel.
    """
    plan, share = work.plan, work.share
    key, value = work.transport.gather_keys(held.key, held.value, plan)
    query = reaching(query, key, value)
    order = chain(tuple(plan.shares[other].keys for other in plan.grid.ring_group(work.rank)))
    reach = reach_of(share.queries, work.causal, work.metadata.window)
    # Of one stream these are views of what was received; of several they are copies, and that is let go.
    gathered = HeldKeys(key, value, held.fixed_key, held.fixed_value)
    key, value, keys = gathered.joined(order, share.fixed_keys, reach)
    del gathered
    metadata = of_rows(work.metadata, share.queries, keys, query.device, work.kept, causal=work.causal)
    return work.compute(query, key, value, metadata, causal=False, lse=work.lse)
