"""Mask and head arithmetic that several kernels share."""

from __future__ import annotations

import torch


def causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[1, 1, Sq, Sk], True where query i may look at key j: j <= i, counted from the first row and the first key."""
    rows, columns = query.shape[1], key.shape[1]
    return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()[None, None]


def repeat_kv_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, S, Hkv, D] -> [B, S, heads, D], so that query head i meets KV head i // (heads / Hkv)."""
    repeats = heads // tensor.shape[2]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=2)


def zero_blind_rows(out: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Zeros for the rows of out [B, S, H, D] that may look at nothing; softmax over no keys is not a number."""
    if mask is None:
        return out
    blind = ~mask.any(dim=-1).transpose(1, 2)  # [B or 1, Sq, 1]
    return out.masked_fill(blind[..., None], 0)
