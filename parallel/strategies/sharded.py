"""Attention over rows and heads that lie on several ranks, exact for any lengths and numbers of heads.

Ulysses (Jacobs et al., 2023, arXiv:2309.14509) trades a shard of rows for a shard of heads within a group, and back;
between the groups the keys travel (`ring`) or are gathered (`gather_kv`). Either degree may be 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from backends.interface import AttentionMetadata
from parallel.kept import Kept
from parallel.merge import wide
from parallel.pieces import assemble
from parallel.plan import ShardPlan
from parallel.restrict import of_heads
from parallel.rows import chain
from parallel.strategies.gather_kv import gather_kv_attention
from parallel.strategies.ring import ring_attention
from parallel.strategies.work import HeldKeys, Kernel, Result, Work, reaching
from parallel.transport.base import Transport
from parallel.transport.packing import QueryKeyValue


@dataclass(frozen=True)
class Attended:
    """out [B, Sq_r, H, Dv] and lse [B, H, Sq_r], None unless it was asked for, of this rank's rows. query_shape,
    key_shape: as the kernel got them, in its first part.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]

    def contiguous(self) -> Attended:
        """The same results, both contiguous; copied only where kernels or exchanges lay them out otherwise."""
        out, lse = self.out.contiguous(), None if self.lse is None else self.lse.contiguous()
        return self if out is self.out and lse is self.lse else replace(self, out=out, lse=lse)


def sharded_attention(
    qkv: QueryKeyValue,
    kernel: Kernel,
    metadata: AttentionMetadata,
    plan: ShardPlan,
    transport: Transport,
    kept: Kept,
    *,
    causal: bool = False,
    lse: bool = False,
) -> Attended:
    """Attention of this rank's rows, in the plan's order of streams: query [B, Sq_r, H, D], key [B, Sk_r, Hkv, D],
    value [B, Sk_r, Hkv, Dv]. metadata: of all rows and heads. kept: what other calls have worked out.

    Replicated streams: all ranks hold their rows and get all their results; their keys count once, and no rank computes
    what another does. Their gradients are each rank's share: the sum over ranks is the whole.
    """
    rank = transport.mesh.rank
    place = plan.grid.place(rank)[1]
    query, held = _my_heads(qkv, plan, transport)
    mine = of_heads(metadata, plan.heads.query[place])
    work = Work(kernel, mine, plan, transport, kept, causal=causal, lse=lse)
    if not plan.heads.query[place]:
        # More ranks than heads: it computes nothing, and takes part in the exchanges.
        (batch, rows), size = query.shape[:2], qkv[2].shape[3]
        of_no_head = query.new_zeros(batch, 0, rows, dtype=wide(query.dtype))
        result = Result(query.new_zeros(batch, rows, 0, size), of_no_head)
    elif plan.grid.ring == 1:
        result = work.whole(query, held)
    elif plan.strategy in ("gather_kv", "ulysses_gather_kv"):
        result = gather_kv_attention(query, held, work)
    else:
        result = ring_attention(query, held, work)
    learned = [tensor for tensor in (*qkv, metadata.sinks, metadata.bias) if tensor is not None]
    tied = (*learned, query, held.key, held.value)
    result = Result(reaching(result.out, *tied), None if result.lse is None else reaching(result.lse, *tied))
    out = _my_rows(result.out, plan, transport)
    back = None
    if lse and result.lse is not None:
        columns = result.lse.transpose(1, 2).unsqueeze(-1)
        back = _my_rows(columns, plan, transport, whole=True).squeeze(-1).transpose(1, 2)
    shapes = work.shapes or (tuple(query.shape), tuple(held.key.shape))
    return Attended(out, back, *shapes)


def _my_heads(qkv: QueryKeyValue, plan: ShardPlan, transport: Transport) -> tuple[torch.Tensor, HeldKeys]:
    """The queries that my Ulysses group asks, and its keys, of my heads."""
    exchanged = plan.grid.ulysses > 1
    if plan.ordered:
        query, key, value = transport.scatter_heads(*qkv, plan) if exchanged else qkv
        return query, HeldKeys(key, value)
    rank = transport.mesh.rank
    share, group, place = plan.shares[rank], plan.grid.ulysses_group(rank), plan.grid.place(rank)[1]
    query, key, value = qkv
    sent = (
        assemble(share.sent_queries, [(query, share.query_rows)]),
        assemble(share.sent_keys, [(key, share.key_rows)]),
        assemble(share.sent_keys, [(value, share.key_rows)]),
    )
    moved = transport.scatter_heads(*sent, plan) if exchanged else sent
    query_order = chain(tuple(plan.shares[other].sent_queries for other in group))
    key_order = chain(tuple(plan.shares[other].sent_keys for other in group))
    heads, kv_heads = plan.heads.query[place], plan.heads.kv[place]
    fixed_query = query[:, :, heads.start : heads.stop]
    fixed = (tensor[:, :, kv_heads.start : kv_heads.stop] for tensor in (key, value))
    return (
        assemble(share.queries, [(moved[0], query_order), (fixed_query, share.query_rows)]),
        HeldKeys(
            *(assemble(share.keys, [(tensor, key_order)]) for tensor in moved[1:]),
            *(assemble(share.fixed_keys, [(tensor, share.key_rows)]) for tensor in fixed),
        ),
    )


def _my_rows(out: torch.Tensor, plan: ShardPlan, transport: Transport, *, whole: bool = False) -> torch.Tensor:
    """From all queries of my Ulysses group and my heads to my rows and all heads; whole: never quantised."""
    if not plan.returns:
        return out
    if plan.ordered:
        return transport.gather_heads(out, plan, whole=whole)
    rank = transport.mesh.rank
    share, group = plan.shares[rank], plan.grid.ulysses_group(rank)
    order = chain((*(plan.shares[other].sent_queries for other in group), share.fixed_queries))
    back = transport.gather_heads(assemble(order, [(out, share.queries)]), plan, whole=whole)
    by_ring = (plan.shares[first].fixed_queries for first in plan.grid.ring_group(0))
    return assemble(share.query_rows, [(back, chain((share.sent_queries, *by_ring)))])
