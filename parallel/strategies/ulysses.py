"""Ulysses sequence parallelism (Jacobs et al., 2023, arXiv:2309.14509): trade a sequence shard for a head shard and
back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from parallel.plan import ShardPlan
from parallel.transport.torch_dist import QueryKeyValue, TorchTransport


def ulysses_attention(
    qkv: QueryKeyValue, kernel: Callable[..., torch.Tensor], plan: ShardPlan, transport: TorchTransport
) -> tuple[torch.Tensor, QueryKeyValue]:
    """Attention of my rows [B, S_r, H, D] over the whole sequence, exact for any length.

    kernel takes Q, K and V of my heads on all rows, and returns [B, S, H_r, D].
    Returns the output [B, S_r, H, D] and what the kernel got. Where the ranks part the KV heads otherwise than query
    head i of a rank reading its KV head i // (H_r / Hkv_r), each query head gets a KV head of its own.
    """
    query, key, value = transport.scatter_heads(*qkv, plan)
    rank, heads = transport.mesh.rank, plan.heads
    if heads.expands and heads.query[rank]:
        reads = heads.kv_of(rank) or _kernel_reads(len(heads.query[rank]), len(heads.kv[rank]))
        index = torch.tensor(reads, device=key.device)
        key, value = key.index_select(2, index), value.index_select(2, index)
    # A rank with fewer heads than there are ranks for computes nothing, and takes part in both exchanges.
    out = kernel(query, key, value) if heads.query[rank] else query
    return transport.gather_heads(out, plan), (query, key, value)


def _kernel_reads(heads: int, kv_heads: int) -> tuple[int, ...]:
    return tuple(head // (heads // kv_heads) for head in range(heads))
