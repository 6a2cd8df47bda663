"""Plain softmax attention in fp32, or in fp64 for fp64 inputs."""

from __future__ import annotations

from typing import Any

import torch

from backends.interface import AttentionImpl, AttentionMetadata
from backends.kernels.masking import repeat_kv_heads, whole_mask, zero_blind_rows


class ReferenceImpl(AttentionImpl):
    alignment = 1

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
        return plain_attention(query, key, value, **self._settings(query, key, metadata))

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return plain_attention_with_lse(query, key, value, **self._settings(query, key, metadata))

    def _settings(self, query: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata) -> dict[str, Any]:
        return {
            "scale": self.softmax_scale,
            "mask": whole_mask(query, key, metadata, causal=self.causal),
            "bias": metadata.bias,
            "soft_cap": metadata.soft_cap,
            "sinks": metadata.sinks,
        }


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(Q K^T scale) V, term by term as it is written.

    query [B, Sq, H, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv], mask a boolean [B or 1, H or 1, Sq or 1, Sk];
    returns [B, Sq, H, Dv] in the query's dtype. bias: of the mask's shape, added to the scores; `mask` is False where
    it is minus infinity. soft_cap: scores x become cap * tanh(x / cap) (Gemma 2,
    arXiv:2408.00118). sinks [H]: a logit more for each row, which has no value. Holds the [B, H, Sq, Sk] scores in
    memory.
    """
    return _weighted(_logits(query, key, scale, mask, bias, soft_cap, sinks), query, value, mask)


def plain_attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plain_attention`, and the log-sum-exp of each row's logits, [B, H, Sq]."""
    logits = _logits(query, key, scale, mask, bias, soft_cap, sinks)
    return _weighted(logits, query, value, mask), torch.logsumexp(logits, dim=-1)


def _logits(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, Sq, Sk], and with sinks a column more; in fp32, or fp64."""
    heads, wide = query.shape[2], _wide(query)
    q, k = (x.to(wide).transpose(1, 2) for x in (query, repeat_kv_heads(key, heads)))
    scores = (q @ k.transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.to(wide)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores
    column = sinks.to(wide).view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), dim=-1)


def _weighted(
    logits: torch.Tensor, query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    v = repeat_kv_heads(value, query.shape[2]).to(_wide(query)).transpose(1, 2)
    if mask is not None:  # rows that see nothing become zeros below; until then they are numbers, for gradients too
        logits = logits.masked_fill(~mask.any(dim=-1, keepdim=True), 0)
    weights = torch.softmax(logits, dim=-1)[..., : value.shape[1]]
    return zero_blind_rows((weights @ v).transpose(1, 2), mask).to(query.dtype)


def _wide(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
