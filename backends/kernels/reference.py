"""Plain softmax attention in fp32, or in fp64 for fp64 inputs."""

from __future__ import annotations

from typing import Any

import torch

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels.masking import repeat_kv_heads, whole_mask, zero_blind_rows


class ReferenceImpl(AttentionImpl):
    @property
    def kernel(self) -> str:
        return f"{plain_attention.__module__}.{plain_attention.__qualname__}"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        return plain_attention(
            query,
            key,
            value,
            scale=self.softmax_scale,
            mask=whole_mask(query, key, metadata, causal=self.causal),
            soft_cap=metadata.soft_cap,
            sinks=metadata.sinks,
        )


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(Q K^T scale) V, term by term as it is written.

    query [B, Sq, H, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv], mask a boolean [B or 1, H or 1, Sq or 1, Sk];
    returns [B, Sq, H, Dv] in the query's dtype. soft_cap: scores x become cap * tanh(x / cap) (Gemma 2,
    arXiv:2408.00118). sinks [H]: a logit more for each row, which has no value. Holds the [B, H, Sq, Sk] scores in
    memory.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads = query.shape[2]
    q, k, v = (x.to(wide).transpose(1, 2) for x in (query, repeat_kv_heads(key, heads), repeat_kv_heads(value, heads)))
    scores = (q @ k.transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide).view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return zero_blind_rows((weights @ v).transpose(1, 2), mask).to(query.dtype)
