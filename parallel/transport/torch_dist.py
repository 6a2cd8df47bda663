"""The exchanges over torch.distributed: gloo on CPU, NCCL on GPU.

Buffers are laid out sequence first, [rows, B, ..., heads, D], so that the blocks of all ranks join along dim 0
without a permutation on the receiving side. Splits come from the plan; nothing is padded and no sizes are exchanged.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from parallel.events import Traffic
from parallel.mesh import Mesh
from parallel.plan import ExchangeCounts, HeadSplit, ShardPlan

QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TorchTransport:
    """Moves shards between the ranks of a mesh, and counts what it moves."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def take_traffic(self) -> Traffic:
        """What was moved since the last call of this method."""
        traffic = Traffic(dict(self._calls), dict(self._bytes))
        self._calls.clear()
        self._bytes.clear()
        return traffic

    def scatter_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ShardPlan
    ) -> QueryKeyValue:
        """My rows of all heads, [B, S_r, H, D] and twice [B, S_r, Hkv, D], to all rows of my heads. One exchange."""
        batch, _, _, size = query.shape
        heads = plan.heads
        for tensor, count in ((query, heads.num_heads), (key, heads.num_kv_heads), (value, heads.num_kv_heads)):
            expected = (batch, len(plan.rows[self.mesh.rank]), count, size)
            if tensor.shape != expected:
                raise ValueError(f"scatter_heads: {tuple(tensor.shape)} at hand, the plan has {expected}")
        counts = plan.scatter_heads(self.mesh.rank).times(batch * size)
        send = query.new_empty(sum(counts.sends))
        (_pack_evenly if heads.even else _pack)(send, (query, key, value), heads, counts)
        received = self._exchange("scatter_heads", send, counts)
        full = received.view(plan.length, batch, heads.heads_at(self.mesh.rank), size).transpose(0, 1)
        q, kv = len(heads.query[self.mesh.rank]), len(heads.kv[self.mesh.rank])
        return full[:, :, :q], full[:, :, q : q + kv], full[:, :, q + kv :]

    def gather_heads(self, out: torch.Tensor, plan: ShardPlan) -> torch.Tensor:
        """All rows of my heads, [B, S, H_r, D], back to my rows of all heads, [B, S_r, H, D]. One exchange."""
        batch, _, _, size = out.shape
        rows = len(plan.rows[self.mesh.rank])
        counts = plan.gather_heads(self.mesh.rank).times(batch * size)
        received = self._exchange("gather_heads", out.transpose(0, 1).contiguous().view(-1), counts)
        if plan.heads.even:
            evenly = received.view(plan.world_size, rows, batch, plan.num_heads // plan.world_size, size)
            return evenly.permute(2, 1, 0, 3, 4).reshape(batch, rows, plan.num_heads, size)
        by_rank = [
            block.view(rows, batch, len(heads), size)
            for block, heads in zip(torch.split(received, list(counts.receives)), plan.heads.query, strict=True)
        ]
        return torch.cat(by_rank, dim=2).transpose(0, 1)

    def gather_rows(self, rows: torch.Tensor, plan: ShardPlan) -> torch.Tensor:
        """My rows [B, S_r, C] to all rows [B, S, C], on every rank. One exchange, exact for unequal shards."""
        batch, _, width = rows.shape
        counts = plan.gather_rows(self.mesh.rank).times(batch * width)
        mine = rows.transpose(0, 1).contiguous().view(-1)
        received = self._exchange("gather_rows", mine.repeat(plan.world_size), counts)
        return received.view(plan.length, batch, width).transpose(0, 1)

    def _exchange(self, verb: str, send: torch.Tensor, counts: ExchangeCounts) -> torch.Tensor:
        # gloo neither checks sizes nor refuses strided outputs; it returns garbage (torch 2.13), so the check is ours.
        if send.numel() != sum(counts.sends) or not send.is_contiguous():
            raise ValueError(f"{verb}: {send.numel()} elements at hand, the plan sends {sum(counts.sends)}")
        received = send.new_empty(sum(counts.receives))
        dist.all_to_all_single(
            received,
            send,
            output_split_sizes=list(counts.receives),
            input_split_sizes=list(counts.sends),
            group=self.mesh.data,
        )
        self._calls[verb] += 1
        self._bytes[verb] += (sum(counts.sends) - counts.sends[self.mesh.rank]) * send.element_size()
        return received


def _pack_evenly(send: torch.Tensor, qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> None:
    """The blocks of all ranks, [rows, B, Q heads then K heads then V heads, D] each, one copy for each tensor."""
    batch, rows, _, size = qkv[0].shape
    ranks, at = len(heads.query), 0
    blocks = send.view(ranks, rows, batch, heads.heads_at(0), size)
    for tensor in qkv:
        share = tensor.shape[2] // ranks
        blocks[:, :, :, at : at + share] = tensor.view(batch, rows, ranks, share, size).permute(2, 1, 0, 3, 4)
        at += share


def _pack(send: torch.Tensor, qkv: QueryKeyValue, heads: HeadSplit, counts: ExchangeCounts) -> None:
    """The same blocks where ranks have other numbers of heads, or share KV heads."""
    batch, rows, _, size = qkv[0].shape
    for rank, flat in enumerate(torch.split(send, list(counts.sends))):
        block, at = flat.view(rows, batch, heads.heads_at(rank), size), 0
        for tensor, mine in zip(qkv, (heads.query[rank], heads.kv[rank], heads.kv[rank]), strict=True):
            block[:, :, at : at + len(mine)] = tensor[:, :, mine.start : mine.stop].transpose(0, 1)
            at += len(mine)
