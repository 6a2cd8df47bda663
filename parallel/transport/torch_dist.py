"""The exchanges over torch.distributed: gloo on CPU, NCCL on GPU.

Splits come from the plan; nothing is padded and no sizes are exchanged. Exchanges of tensors that require gradients
have a backward pass, which is the reverse exchange: every rank has to run it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallel.events import Traffic
from parallel.mesh import Mesh
from parallel.pieces import assemble
from parallel.plan import ExchangeCounts, ShardPlan
from parallel.rows import chain
from parallel.transport.packing import (
    QueryKeyValue,
    pack_heads,
    pack_keys,
    pack_results,
    unpack_heads,
    unpack_keys,
    unpack_results,
)

__all__ = ["QueryKeyValue", "Rotation", "TorchTransport"]

KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rotation:
    """A message of a ring that is on its way. Call `wait` before the message is read, and before the one that is sent
    is written to.
    """

    message: torch.Tensor
    works: tuple[Any, ...]

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.message


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
        """My rows of sharded streams of all heads, [B, S_r, H, D] and twice [B, S_r, Hkv, D], to all rows of my Ulysses
        group, of my heads; one rank's rows after another's. One exchange.
        """
        batch, _, _, size = query.shape
        rank, heads = self.mesh.rank, plan.heads
        for tensor, count in ((query, heads.num_heads), (key, heads.num_kv_heads), (value, heads.num_kv_heads)):
            expected = (batch, len(plan.shares[rank].sent_keys), count, size)
            if tensor.shape != expected:
                raise ValueError(f"scatter_heads: {tuple(tensor.shape)} at hand, the plan has {expected}")
        counts = plan.scatter_heads(rank).times(batch * size)
        send = pack_heads((query, key, value), heads, counts)
        received = self._exchange("scatter_heads", send, counts, self.mesh.groups(plan.grid).ulysses)
        shape = batch, len(plan.shares[rank].keys), size
        return unpack_heads(received, shape, heads, plan.grid.place(rank)[1])

    def gather_heads(self, out: torch.Tensor, plan: ShardPlan) -> torch.Tensor:
        """What my Ulysses group computed of my heads, [B, rows of one rank after another then those of replicated
        streams, H_u, D], back to my rows then all of replicated streams, [B, S_r, H, D]. One exchange.
        """
        batch, _, _, size = out.shape
        rank = self.mesh.rank
        counts = plan.gather_heads(rank).times(batch * size)
        group = self.mesh.data if plan.returns_to_all else self.mesh.groups(plan.grid).ulysses
        received = self._exchange("gather_heads", pack_results(out, plan, rank), counts, group)
        return unpack_results(received, batch, size, plan, rank)

    def gather_keys(self, key: torch.Tensor, value: torch.Tensor, plan: ShardPlan) -> list[KeyValue]:
        """The travelling keys and values of all ring places, [B, S, Hkv_u, D] each, by place. One exchange."""
        batch, _, kv_heads, size = key.shape
        counts = plan.gather_keys(self.mesh.rank).times(batch * size)
        message = pack_keys(key, value).repeat(plan.grid.ring)
        received = self._exchange("gather_keys", message, counts, self.mesh.groups(plan.grid).ring)
        blocks, start = [], 0
        for count in counts.receives:
            blocks.append(unpack_keys(received[start : start + count], batch, kv_heads, size))
            start += count
        return blocks

    def rotate(self, message: torch.Tensor, receives: int, plan: ShardPlan) -> Rotation:
        """Send a message to the next place of my ring, and receive one of so many elements from the previous one. It
        returns at once. An empty message is not sent.
        """
        ring, group = plan.grid.ring, self.mesh.groups(plan.grid).ring
        place = plan.grid.place(self.mesh.rank)[0]
        received = message.new_empty(receives)
        operations = []
        if message.numel():
            operations.append(dist.P2POp(dist.isend, message, group=group, group_peer=(place + 1) % ring))
        if receives:
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(place - 1) % ring))
        works = tuple(dist.batch_isend_irecv(operations)) if operations else ()
        self._count("rotate_keys", message.numel() * message.element_size())
        return Rotation(received, works)

    def gather_rows(self, rows: torch.Tensor, plan: ShardPlan) -> torch.Tensor:
        """My rows [B, S_r, C] of the first sharded stream to all of its rows in order, on every rank: [B, S, C]. One
        exchange, exact for unequal shards.
        """
        batch, _, width = rows.shape
        counts = plan.gather_rows(self.mesh.rank).times(batch * width)
        mine = rows.transpose(0, 1).contiguous().view(-1)
        received = self._exchange("gather_rows", mine.repeat(plan.world_size), counts, self.mesh.data)
        by_rank = received.view(plan.length, batch, width).transpose(0, 1)
        held = chain(plan.rows)
        return assemble(held.sorted, [(by_rank, held)])

    def _exchange(
        self, verb: str, send: torch.Tensor, counts: ExchangeCounts, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        # gloo neither checks sizes nor refuses strided outputs; it returns garbage (torch 2.13), so the check is ours.
        if send.numel() != sum(counts.sends) or not send.is_contiguous():
            raise ValueError(f"{verb}: {send.numel()} elements at hand, the plan sends {sum(counts.sends)}")
        if send.requires_grad and torch.is_grad_enabled():
            moved: torch.Tensor = _Exchange.apply(send, self, verb, counts, group)  # type: ignore[no-untyped-call]
            return moved
        return self.move(verb, send, counts, group)

    def move(
        self, verb: str, send: torch.Tensor, counts: ExchangeCounts, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """One all-to-all of a flat tensor, without a backward pass."""
        received = send.new_empty(sum(counts.receives))
        dist.all_to_all_single(
            received,
            send,
            output_split_sizes=list(counts.receives),
            input_split_sizes=list(counts.sends),
            group=group,
        )
        own = counts.sends[dist.get_rank(group)]
        self._count(verb, (sum(counts.sends) - own) * send.element_size())
        return received

    def _count(self, verb: str, sent: int) -> None:
        self._calls[verb] += 1
        self._bytes[verb] += sent


class _Exchange(torch.autograd.Function):
    """An all-to-all whose backward pass sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        send: torch.Tensor,
        transport: TorchTransport,
        verb: str,
        counts: ExchangeCounts,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.way_back = (transport, f"{verb}_backward", counts.reversed, group)
        return transport.move(verb, send, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transport, verb, counts, group = ctx.way_back
        return (transport.move(verb, gradients[0].contiguous(), counts, group), None, None, None, None)
