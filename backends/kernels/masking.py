"""Mask and head arithmetic that several kernels share."""

from __future__ import annotations

import torch

from backends.interface import AttentionMetadata, PackedLengths


def causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[1, 1, Sq, Sk], True where query i may look at key j: j <= i, counted from the first row and the first key."""
    rows, columns = query.shape[1], key.shape[1]
    return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()[None, None]


def window_mask(query: torch.Tensor, key: torch.Tensor, window: tuple[int | None, int | None]) -> torch.Tensor:
    """[1, 1, Sq, Sk], True where key j is at most so many keys before query i and after it."""
    before, after = window
    rows, keys = (torch.arange(tensor.shape[1], device=query.device) for tensor in (query, key))
    distance = keys - rows[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if before is not None:
        seen &= distance >= -before
    if after is not None:
        seen &= distance <= after
    return seen[None, None]


def packed_mask(lengths: PackedLengths, device: torch.device) -> torch.Tensor:
    """[1, 1, Sq, Sk], True where a query and a key are of one document."""
    query, key = (
        torch.repeat_interleave(  # told how long it gets, it need not ask the device
            torch.arange(len(rows), device=device),
            torch.tensor(rows).to(device, non_blocking=True),
            output_size=sum(rows),
        )
        for rows in (lengths.query, lengths.key)
    )
    return (query[:, None] == key)[None, None]


def whole_mask(
    query: torch.Tensor, key: torch.Tensor, metadata: AttentionMetadata, *, causal: bool
) -> torch.Tensor | None:
    """Everything that keeps a query from a key, as one boolean mask; None if nothing does."""
    parts = [] if metadata.mask is None else [metadata.mask]
    if metadata.bias is not None:
        parts.append(metadata.bias != float("-inf"))
    if causal:
        parts.append(causal_mask(query, key))
    if metadata.window is not None:
        parts.append(window_mask(query, key, metadata.window))
    if metadata.packed is not None:
        parts.append(packed_mask(metadata.packed, query.device))
    whole: torch.Tensor | None = None
    for part in parts:
        whole = part if whole is None else whole & part
    return whole


def repeat_kv_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, S, Hkv, D] -> [B, S, heads, D], so that query head i meets KV head i // (heads / Hkv)."""
    repeats = heads // tensor.shape[2]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=2)


def zero_blind_rows(out: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Zeros for the rows of out [B, S, H, D] that may look at nothing; softmax over no keys is not a number."""
    if mask is None:
        return out
    blind = ~mask.any(dim=-1).transpose(1, 2)  # [B or 1, Sq or 1, H or 1]
    return out.masked_fill(blind[..., None], 0)


def blind_lse(lse: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Minus infinity for the rows of lse [B, H, Sq] that may look at nothing."""
    return lse if mask is None else lse.masked_fill(~mask.any(dim=-1), float("-inf"))
