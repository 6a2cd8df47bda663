"""Ulysses sequence parallelism (Jacobs et al., 2023, arXiv:2309.14509): trade a sequence shard for a head shard and
back.
"""

from __future__ import annotations

import torch

from backends.interface import AttentionImpl, AttentionMetadata
from parallel.plan import ShardPlan
from parallel.transport.torch_dist import QueryKeyValue, TorchTransport


def ulysses_attention(
    qkv: QueryKeyValue, impl: AttentionImpl, metadata: AttentionMetadata, plan: ShardPlan, transport: TorchTransport
) -> tuple[torch.Tensor, QueryKeyValue]:
    """Attention of my rows [B, S_r, H, D] over the whole sequence, exact for any length.

    Returns the output [B, S_r, H, D] and what the kernel got: Q, K and V as [B, S, H/P, D].
    """
    full = transport.scatter_heads(*qkv, plan)
    return transport.gather_heads(impl.forward(*full, metadata), plan), full
