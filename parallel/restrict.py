"""What a block of queries, keys and heads needs of a call's metadata: pure functions of tensors and positions."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from backends.interface import AttentionMetadata, PackedLengths
from parallel.blocks import Window
from parallel.kept import Kept
from parallel.pieces import take
from parallel.rows import Rows


def of_heads(metadata: AttentionMetadata, heads: range) -> AttentionMetadata:
    """What a rank that computes these heads needs of it, on all rows."""
    mask, bias, sinks, blocks = metadata.mask, metadata.bias, metadata.sinks, metadata.block_mask
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, heads.start : heads.stop]
    if bias is not None and bias.shape[1] > 1:
        bias = bias[:, heads.start : heads.stop]
    if sinks is not None:
        sinks = sinks[heads.start : heads.stop]
    if blocks is not None and blocks.shape[1] > 1:
        blocks = _blocks_of(blocks, heads)
    if mask is metadata.mask and bias is metadata.bias and sinks is metadata.sinks and blocks is metadata.block_mask:
        return metadata
    return replace(metadata, mask=mask, bias=bias, sinks=sinks, block_mask=blocks)


def _blocks_of(blocks: BlockMask, heads: range) -> BlockMask:
    """Some heads of a mask that says other things of other heads; its function still counts from the first of all."""
    mask_mod, first = blocks.mask_mod, heads.start

    def of_mine(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return mask_mod(batch, head + first, row, key)

    mine = slice(heads.start, heads.stop)
    full_count, full = blocks.full_kv_num_blocks, blocks.full_kv_indices
    return blocks.from_kv_blocks(
        blocks.kv_num_blocks[:, mine],
        blocks.kv_indices[:, mine],
        None if full_count is None else full_count[:, mine],
        None if full is None else full[:, mine],
        BLOCK_SIZE=blocks.BLOCK_SIZE,
        mask_mod=of_mine,
        seq_lengths=blocks.seq_lengths,
        compute_q_blocks=blocks.q_indices is not None,
    )


def of_rows(
    metadata: AttentionMetadata, queries: Rows, keys: Rows, device: torch.device, kept: Kept, *, causal: bool = False
) -> AttentionMetadata:
    """What a block of some query positions and some key positions needs of it.

    Masks are cut; a window, and causality where it is asked for, become part of a full mask, since a kernel counts from
    the block's own first row; documents keep the rows that the block has of them.
    """
    mask, bias, window = metadata.mask, metadata.bias, metadata.window
    if mask is not None:
        mask = _cut(mask, queries, keys)
    if causal or window is not None:
        bounds = (queries, keys, window or (None, None), causal, device)
        seen = kept.get(bounds, partial(_seen, *bounds))
        mask = seen if mask is None else mask & seen
    if bias is not None:
        bias = _cut(bias, queries, keys)
    return replace(metadata, mask=mask, bias=bias, window=None, packed=_packed(metadata.packed, queries, keys))


def _cut(table: torch.Tensor, queries: Rows, keys: Rows) -> torch.Tensor:
    """Of [B or 1, 1 or H, Sq or 1, Sk]."""
    of_keys = take(table, keys, dim=3)
    return take(of_keys, queries, dim=2) if table.shape[2] > 1 else of_keys


def _positions(rows: Rows, device: torch.device) -> torch.Tensor:
    runs = [torch.arange(run.start, run.stop, device=device) for run in rows.runs]
    return torch.cat(runs) if runs else torch.arange(0, device=device)


def _seen(queries: Rows, keys: Rows, window: Window, causal: bool, device: torch.device) -> torch.Tensor:
    """[1, 1, Sq, Sk], True where the distance from a query to a key is within the window, and not ahead if causal."""
    places = _positions(keys, device)
    before, after = window
    if causal:
        after = 0 if after is None else min(after, 0)
    rows = _positions(queries, device)[:, None]
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    if before is not None:
        seen &= places >= rows - before
    if after is not None:
        seen &= places <= rows + after
    return seen[None, None]


def _packed(packed: PackedLengths | None, queries: Rows, keys: Rows) -> PackedLengths | None:
    if packed is None:
        return None
    return PackedLengths(_lengths(packed.query, queries), _lengths(packed.key, keys))


@lru_cache(maxsize=1024)
def _lengths(lengths: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    ends = tuple(accumulate(lengths, initial=0))
    return tuple(rows.count_in(range(start, stop)) for start, stop in pairwise(ends))
