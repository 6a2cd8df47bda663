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
from parallel.plan import QKV, ExchangeCounts, ShardPlan

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
        """My rows of all heads, three times [B, S_r, H, D], to all rows of my heads, three times [B, S, H/P, D]. One
        exchange.
        """
        batch, rows, heads, size = query.shape
        ranks, share = plan.world_size, heads // plan.world_size
        send = query.new_empty(ranks, rows, batch, QKV, share, size)
        for index, tensor in enumerate((query, key, value)):
            send[:, :, :, index].copy_(tensor.view(batch, rows, ranks, share, size).permute(2, 1, 0, 3, 4))
        counts = plan.scatter_heads(self.mesh.rank).times(batch * size)
        received = self._exchange("scatter_heads", send.view(-1), counts)
        full = received.view(plan.length, batch, QKV, share, size)
        return full[:, :, 0].transpose(0, 1), full[:, :, 1].transpose(0, 1), full[:, :, 2].transpose(0, 1)

    def gather_heads(self, out: torch.Tensor, plan: ShardPlan) -> torch.Tensor:
        """All rows of my heads, [B, S, H/P, D], back to my rows of all heads, [B, S_r, H, D]. One exchange."""
        batch, _, share, size = out.shape
        rows = len(plan.rows[self.mesh.rank])
        counts = plan.gather_heads(self.mesh.rank).times(batch * size)
        received = self._exchange("gather_heads", out.transpose(0, 1).contiguous().view(-1), counts)
        by_rank = received.view(plan.world_size, rows, batch, share, size)
        return by_rank.permute(2, 1, 0, 3, 4).reshape(batch, rows, plan.num_heads, size)

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
