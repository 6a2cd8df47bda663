"""How rows and heads lie in the flat buffers of an exchange.

Buffers are laid out sequence first, [rows, B, heads, D], so that the blocks of all ranks join along dim 0 without a
permutation on the receiving side.
"""

from __future__ import annotations

import torch

from parallel.exchange import row_numbers
from parallel.plan import ExchangeCounts, HeadSplit, ShardPlan

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def pack_heads(qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> torch.Tensor:
    """Q [B, S_r, H, D], K [B, S_r, Hkv, D] and V [B, S_r, Hkv, Dv] as one block for each rank: [rows, B, the numbers of
    its Q, K and V heads].
    """
    send = qkv[0].new_empty(sum(counts.sends))
    (_pack_evenly if heads.even else _pack_unevenly)(send, qkv, heads, counts)
    return send


def _pack_evenly(send: torch.Tensor, qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> None:
    """One copy for each tensor."""
    batch, rows = qkv[0].shape[:2]
    ranks, at = len(heads.query), 0
    blocks = send.view(ranks, rows, batch, _width(heads, 0, qkv))
    for tensor in qkv:
        share, size = tensor.shape[2] // ranks, tensor.shape[3]
        part = _by_head(blocks.narrow(3, at, share * size), size)
        part.copy_(tensor.view(batch, rows, ranks, share, size).permute(2, 1, 0, 3, 4))
        at += share * size


def _pack_unevenly(send: torch.Tensor, qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> None:
    """The same blocks where ranks have other numbers of heads, or share KV heads."""
    batch, rows = qkv[0].shape[:2]
    start = 0
    for rank, count in enumerate(counts.sends):
        block, at = send[start : start + count].view(rows, batch, _width(heads, rank, qkv)), 0
        for tensor, mine in zip(qkv, (heads.query[rank], heads.kv[rank], heads.kv[rank]), strict=True):
            width = len(mine) * tensor.shape[3]
            part = _by_head(block.narrow(2, at, width), tensor.shape[3])
            part.copy_(tensor[:, :, mine.start : mine.stop].transpose(0, 1))
            at += width
        start += count


def _width(heads: HeadSplit, rank: int, qkv: QueryKeyValue) -> int:
    return row_numbers(len(heads.query[rank]), len(heads.kv[rank]), qkv[1].shape[3], qkv[2].shape[3])


def unpack_heads(
    received: torch.Tensor, shape: tuple[int, int, int, int], heads: HeadSplit, place: int
) -> QueryKeyValue:
    """All rows of a place's heads, as views: Q [B, S, H_u, D], K [B, S, Hkv_u, D] and V [B, S, Hkv_u, Dv]; shape: B, S,
    D, Dv.
    """
    batch, rows, size, value_size = shape
    query, kv = len(heads.query[place]), len(heads.kv[place])
    full = received.view(rows, batch, row_numbers(query, kv, size, value_size)).transpose(0, 1)
    of_query, of_key, of_value = torch.split(full, [query * size, kv * size, kv * value_size], dim=2)
    return _by_head(of_query, size), _by_head(of_key, size), _by_head(of_value, value_size)


def pack_results(out: torch.Tensor, plan: ShardPlan, rank: int) -> torch.Tensor:
    """A Ulysses group's rows of my heads, [B, rows of all its ranks then the fixed rows, H_u, D], as one block for each
    rank that gets some.
    """
    fixed = len(plan.shares[rank].fixed_queries)
    if not fixed:
        blocks = out
    else:
        sent, shared = out[:, : out.shape[1] - fixed], out[:, out.shape[1] - fixed :]
        parts, start, group = [], 0, plan.grid.ulysses_group(rank)
        for other in plan.return_group(rank):
            if other in group:
                count = len(plan.shares[other].sent_queries)
                parts.append(sent[:, start : start + count])
                start += count
            parts.append(shared)
        blocks = torch.cat(parts, dim=1)
    return blocks.transpose(0, 1).contiguous().view(-1)


def unpack_results(received: torch.Tensor, batch: int, size: int, plan: ShardPlan, rank: int) -> torch.Tensor:
    """My rows, then the fixed rows of all ring places, of all heads: [B, S_r + fixed, H, D]."""
    if plan.heads.even and not plan.returns_to_all:
        degree, share = plan.grid.ulysses, plan.num_heads // plan.grid.ulysses
        rows = plan.returned_rows(rank, rank)
        evenly = received.view(degree, rows, batch, share, size)
        return evenly.permute(2, 1, 0, 3, 4).reshape(batch, rows, plan.num_heads, size)
    sent = len(plan.shares[rank].sent_queries)
    mine: list[torch.Tensor] = []
    fixed: dict[int, list[torch.Tensor]] = {}
    blocks = torch.split(received, list(plan.gather_heads(rank).times(batch * size).receives))
    for other, flat in zip(plan.return_group(rank), blocks, strict=True):
        ring, place = plan.grid.place(other)
        heads = len(plan.heads.query[place])
        block = flat.view(plan.returned_rows(other, rank), batch, heads, size).transpose(0, 1)
        if ring == plan.grid.place(rank)[0]:
            mine.append(block[:, :sent])
            block = block[:, sent:]
        if block.shape[1]:
            fixed.setdefault(ring, []).append(block)
    by_ring = [torch.cat(mine, dim=2), *(torch.cat(blocks, dim=2) for _, blocks in sorted(fixed.items()))]
    return by_ring[0] if len(by_ring) == 1 else torch.cat(by_ring, dim=1)


def pack_keys(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """K [B, S, Hkv, D] and V [B, S, Hkv, Dv] as one flat message, [S, B, the numbers of K then those of V]."""
    batch, rows, kv_heads, size = key.shape
    of_keys, of_values = kv_heads * size, kv_heads * value.shape[3]
    message = key.new_empty(rows, batch, of_keys + of_values)
    _by_head(message.narrow(2, 0, of_keys), size).copy_(key.transpose(0, 1))
    _by_head(message.narrow(2, of_keys, of_values), value.shape[3]).copy_(value.transpose(0, 1))
    return message.view(-1)


def unpack_keys(
    message: torch.Tensor, rows: int, shape: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a message of so many rows, as views; shape: B, Hkv, D, Dv."""
    batch, kv_heads, size, value_size = shape
    both = message.view(rows, batch, kv_heads * (size + value_size)).transpose(0, 1)
    of_keys, of_values = torch.split(both, [kv_heads * size, kv_heads * value_size], dim=2)
    return _by_head(of_keys, size), _by_head(of_values, value_size)


def _by_head(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """[..., heads * D] as [..., heads, D], a view."""
    return numbers.view(*numbers.shape[:-1], numbers.shape[-1] // size, size)
