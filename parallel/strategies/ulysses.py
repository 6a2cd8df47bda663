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

    kernel takes Q, K and V, and returns [B, S, H/P, D].
    Returns the output [B, S_r, H, D] and what the kernel got: Q, K and V as [B, S, H/P, D].
    """
    full = transport.scatter_heads(*qkv, plan)
    return transport.gather_heads(kernel(*full), plan), full
