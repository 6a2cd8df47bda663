"""How rows and heads lie in the flat buffers of an exchange.

Buffers are laid out sequence first, [rows, B, heads, D], so that the blocks of all ranks join along dim 0 without a
permutation on the receiving side.
"""

from __future__ import annotations

import torch

from parallel.plan import ExchangeCounts, HeadSplit, ShardPlan

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def pack_heads(qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> torch.Tensor:
    """[B, S_r, H, D] and twice [B, S_r, Hkv, D] as one block for each rank: [rows, B, its Q, K and V heads, D]."""
    send = qkv[0].new_empty(sum(counts.sends))
    (_pack_evenly if heads.even else _pack_unevenly)(send, qkv, heads, counts)
    return send


def _pack_evenly(send: torch.Tensor, qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> None:
    """One copy for each tensor."""
    batch, rows, _, size = qkv[0].shape
    ranks, at = len(heads.query), 0
    blocks = send.view(ranks, rows, batch, heads.heads_at(0), size)
    for tensor in qkv:
        share = tensor.shape[2] // ranks
        blocks[:, :, :, at : at + share] = tensor.view(batch, rows, ranks, share, size).permute(2, 1, 0, 3, 4)
        at += share


def _pack_unevenly(send: torch.Tensor, qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> None:
    """The same blocks where ranks have other numbers of heads, or share KV heads."""
    batch, rows, _, size = qkv[0].shape
    start = 0
    for rank, count in enumerate(counts.sends):
        block, at = send[start : start + count].view(rows, batch, heads.heads_at(rank), size), 0
        for tensor, mine in zip(qkv, (heads.query[rank], heads.kv[rank], heads.kv[rank]), strict=True):
            block[:, :, at : at + len(mine)] = tensor[:, :, mine.start : mine.stop].transpose(0, 1)
            at += len(mine)
        start += count


def unpack_heads(received: torch.Tensor, shape: tuple[int, int, int], heads: HeadSplit, place: int) -> QueryKeyValue:
    """All rows of a place's heads, as views: [B, S, H_u, D] and twice [B, S, Hkv_u, D]; shape: B, S, D."""
    batch, rows, size = shape
    query, kv = len(heads.query[place]), len(heads.kv[place])
    full = received.view(rows, batch, query + 2 * kv, size).transpose(0, 1)
    return full[:, :, :query], full[:, :, query : query + kv], full[:, :, query + kv :]


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
        block = flat.view(plan.returned_rows(other, rank), batch, heads, size)
        if ring == plan.grid.place(rank)[0]:
            mine.append(block[:sent])
            block = block[sent:]
        fixed.setdefault(ring, []).append(block)
    by_ring = [torch.cat(mine, dim=2), *(torch.cat(blocks, dim=2) for _, blocks in sorted(fixed.items()))]
    return torch.cat(by_ring, dim=0).transpose(0, 1)


def pack_keys(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, S, Hkv, D] twice as one flat message, [S, B, K heads then V heads, D]."""
    return torch.cat((key, value), dim=2).transpose(0, 1).contiguous().view(-1)


def unpack_keys(
    message: torch.Tensor, rows: int, batch: int, kv_heads: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a message of so many rows, as views."""
    both = message.view(rows, batch, 2 * kv_heads, size).transpose(0, 1)
    return both[:, :, :kv_heads], both[:, :, kv_heads:]
