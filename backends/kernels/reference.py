"""Plain softmax attention in fp32, or in fp64 for fp64 inputs."""

from __future__ import annotations

import torch

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels.masking import causal_mask, repeat_kv_heads, zero_blind_rows


class ReferenceImpl(AttentionImpl):
    @property
    def kernel(self) -> str:
        return f"{plain_attention.__module__}.{plain_attention.__qualname__}"

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        mask = metadata.mask
        if self.causal:
            lower = causal_mask(query, key)
            mask = lower if mask is None else mask & lower
        return plain_attention(query, key, value, scale=self.softmax_scale, mask=mask)


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(Q K^T scale) V, term by term as it is written.

    query [B, Sq, H, D], key and value [B, Sk, Hkv, D], mask a boolean [B or 1, 1, Sq, Sk]; returns [B, Sq, H, D] in the
    query's dtype. Holds the [B, H, Sq, Sk] scores in memory.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads = query.shape[2]
    q, k, v = (x.to(wide).transpose(1, 2) for x in (query, repeat_kv_heads(key, heads), repeat_kv_heads(value, heads)))
    scores = (q @ k.transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    out = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)
    return zero_blind_rows(out, mask).to(query.dtype)
