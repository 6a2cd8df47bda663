"""Ring attention (Liu et al., 2023, arXiv:2310.01889): keys and values go round from place to place, and what each
place computes of its queries is put together by the log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from parallel.blocks import parts_of
from parallel.merge import Weighed, merge_rows, merge_sinks, nothing
from parallel.restrict import of_rows
from parallel.rows import Rows
from parallel.strategies.work import HeldKeys, Result, Work, over_nothing, reaching, without_sinks
from parallel.transport.packing import pack_keys, unpack_keys

Block = tuple[int, torch.Tensor, torch.Tensor]
"""A ring place, and its keys and values."""


def ring_attention(query: torch.Tensor, held: HeldKeys, work: Work) -> Result:
    """query [B, S, H_u, D] of my Ulysses group, to all keys; merged in fp32, or fp64."""
    plan, share = work.plan, work.share
    group = plan.grid.ring_group(work.rank)
    tensors = (query, held.key, held.value)
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    whole: Weighed | None = None
    seen = [query, held.key, held.value]
    for place, key, value in (_gathered if differentiated else _rotated)(held, work):
        if differentiated:  # else a block is let go once it is computed
            seen += [key, value]
        block, fixed = HeldKeys(key, value), Rows()
        if group[place] == work.rank:  # keys that every rank has count once, with its own
            block, fixed = HeldKeys(key, value, held.fixed_key, held.fixed_value), share.fixed_keys
        whole = _add_block(whole, query, block.joined(plan.shares[group[place]].keys, fixed), work)
        del key, value, block  # before the next but one is received
    if whole is None:
        return Result(*over_nothing(query, held.value.shape[3], work.metadata.sinks, *seen))
    if differentiated:
        whole = reaching(whole[0], *seen), reaching(whole[1], *seen)
    if work.metadata.sinks is not None:
        whole = merge_sinks(whole, work.metadata.sinks)
    return Result(whole[0].to(query.dtype), whole[1])


def _add_block(
    whole: Weighed | None, query: torch.Tensor, block: tuple[torch.Tensor, torch.Tensor, Rows], work: Work
) -> Weighed | None:
    key, value, keys = block
    queries, metadata = work.share.queries, without_sinks(work.metadata)
    for part in parts_of(queries, keys, work.causal, metadata.window):
        mine, others = slice(part.queries.start, part.queries.stop), slice(part.keys.start, part.keys.stop)
        of_part = of_rows(metadata, queries.cut(part.queries), keys.cut(part.keys), query.device, work.kept)
        out, lse = work.compute(query[:, mine], key[:, others], value[:, others], of_part, causal=part.causal, lse=True)
        if lse is None:
            raise TypeError("a kernel that was asked for the log-sum-exp returned none")
        if whole is None and len(part.queries) == query.shape[1]:
            whole = out.to(lse.dtype), lse
        else:
            whole = merge_rows(whole or nothing(query, out.shape[3]), (out, lse), part.queries)
    return whole


def _rotated(held: HeldKeys, work: Work) -> Iterator[Block]:
    """My own block first, then that of the place before mine, and so on; each is under way while the one before it is
    computed.
    """
    plan, ring = work.plan, work.plan.grid.ring
    place, group = plan.grid.place(work.rank)[0], plan.grid.ring_group(work.rank)
    (batch, _, kv_heads, size), value_size = held.key.shape, held.value.shape[3]
    key, value, message = held.key, held.value, pack_keys(held.key, held.value)
    for step in range(ring):
        source = (place - step) % ring
        if step == ring - 1:
            yield source, key, value
            return
        rows = len(plan.shares[group[(source - 1) % ring]].keys)
        rotation = work.transport.rotate(message, rows * batch * kv_heads * (size + value_size), plan)
        yield source, key, value
        message = rotation.wait()
        del rotation  # and what was sent
        key, value = unpack_keys(message, rows, (batch, kv_heads, size, value_size))


def _gathered(held: HeldKeys, work: Work) -> Iterator[Block]:
    """The same blocks out of one exchange that has a backward pass; that keeps every block until then in any case."""
    plan, place = work.plan, work.plan.grid.place(work.rank)[0]
    lengths = [len(plan.shares[other].keys) for other in plan.grid.ring_group(work.rank)]
    by_place = [
        torch.split(tensor, lengths, dim=1) for tensor in work.transport.gather_keys(held.key, held.value, plan)
    ]
    for step in range(len(lengths)):
        source = (place - step) % len(lengths)
        yield source, by_place[0][source], by_place[1][source]
