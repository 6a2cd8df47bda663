"""What a block of queries, keys and heads needs of a call's metadata: pure functions of tensors and positions."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from backends.interface import AttentionMetadata, PackedLengths
from parallel.pieces import take
from parallel.rows import Rows


def of_heads(metadata: AttentionMetadata, heads: range) -> AttentionMetadata:
    """What a rank that computes these heads needs of it, on all rows."""
    mask, sinks = metadata.mask, metadata.sinks
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, heads.start : heads.stop]
    if sinks is not None:
        sinks = sinks[heads.start : heads.stop]
    if mask is metadata.mask and sinks is metadata.sinks:
        return metadata
    return replace(metadata, mask=mask, sinks=sinks)


def of_rows(
    metadata: AttentionMetadata, queries: Rows, keys: Rows, device: torch.device, *, causal: bool = False
) -> AttentionMetadata:
    """What a block of some query positions and some key positions needs of it.

    A mask is cut; a window, and causality where it is asked for, become part of a full mask, since a kernel counts from
    the block's own first row; documents keep the rows that the block has of them.
    """
    mask = metadata.mask
    if mask is not None:
        mask = take(mask, keys, dim=3)
        if mask.shape[2] > 1:
            mask = take(mask, queries, dim=2)
    if causal or metadata.window is not None:
        window = metadata.window or (None, None)
        seen = _seen(_positions(queries, device), _positions(keys, device), window, causal)
        mask = seen if mask is None else mask & seen
    return replace(metadata, mask=mask, window=None, packed=_packed(metadata.packed, queries, keys))


def _positions(rows: Rows, device: torch.device) -> torch.Tensor:
    runs = [torch.arange(run.start, run.stop, device=device) for run in rows.runs]
    return torch.cat(runs) if runs else torch.arange(0, device=device)


def _seen(
    queries: torch.Tensor, keys: torch.Tensor, window: tuple[int | None, int | None], causal: bool
) -> torch.Tensor:
    """[1, 1, Sq, Sk], True where the distance from a query to a key is within the window, and not ahead if causal."""
    before, after = window
    distance = keys - queries[:, None]
    seen = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if before is not None:
        seen &= distance >= -before
    if after is not None:
        seen &= distance <= after
    return seen[None, None]


def _packed(packed: PackedLengths | None, queries: Rows, keys: Rows) -> PackedLengths | None:
    if packed is None:
        return None
    return PackedLengths(_lengths(packed.query, queries), _lengths(packed.key, keys))


def _lengths(lengths: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    ends = tuple(accumulate(lengths, initial=0))
    return tuple(rows.count_in(range(start, stop)) for start, stop in pairwise(ends))
