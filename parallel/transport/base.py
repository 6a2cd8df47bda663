"""The verbs of an exchange, whatever carries it: packing, checks, counting, and the way back of gradients.

Splits come from the plan; nothing is padded and no sizes are exchanged. Exchanges of tensors that require gradients
have a backward pass, which is the reverse exchange: every rank has to run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from parallel.events import Traffic
from parallel.exchange import SCALE_BYTES, gathered_bytes, scattered_bytes, scattered_numbers
from parallel.mesh import Mesh
from parallel.opaque import outside_graphs
from parallel.pieces import assemble
from parallel.plan import ExchangeCounts, ShardPlan
from parallel.rows import chain
from parallel.transport import fp8
from parallel.transport.errors import ExchangeError, ExchangeSizeError
from parallel.transport.guard import KEPT_ERRORS
from parallel.transport.packing import (
    QueryKeyValue,
    pack_heads,
    pack_keys,
    pack_results,
    unpack_heads,
    unpack_keys,
    unpack_results,
)

KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Peers:
    """Ranks of a mesh that exchange with each other, in order, and torch's group of them. place: this rank's."""

    ranks: range
    place: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Rotation:
    """A message of a ring that is on its way. Call `wait` before the message is read, and before the one that is sent
    is written to.
    """

    message: torch.Tensor
    waits: tuple[Callable[[], Any], ...] = ()

    def wait(self) -> torch.Tensor:
        try:
            for wait in self.waits:
                wait()
        except KEPT_ERRORS:
            raise
        except RuntimeError as error:
            raise ExchangeError("rotate_keys", str(error)) from error
        return self.message


class Transport(ABC):
    """Moves shards between the ranks of a mesh, and counts what it moves.

    A transport is what carries flat buffers: `_all_to_all`, `_to_all` and `_pass_on`. Everything else is here, so that
    the answer does not depend on it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @abstractmethod
    def _all_to_all(self, received: torch.Tensor, send: torch.Tensor, counts: ExchangeCounts, peers: Peers) -> None:
        """Fill `received`, blocks of `counts.receives` elements by place, with what the peers send, and send them
        `counts.sends`. Both are flat, contiguous and of these sizes.
        """

    @abstractmethod
    def _to_all(self, received: torch.Tensor, message: torch.Tensor, counts: ExchangeCounts, peers: Peers) -> None:
        """`_all_to_all` of one message, of any of `counts.sends`, to each peer: it is never repeated."""

    @abstractmethod
    def _pass_on(self, received: torch.Tensor, message: torch.Tensor, peers: Peers) -> Rotation:
        """Start to send a flat message to the next place of a ring, and to receive from the previous one. An empty
        message is not sent.
        """

    def close(self) -> None:
        """Release what this transport holds beside the mesh's groups. It may be called twice."""
        return

    def take_traffic(self) -> Traffic:
        """What was moved since the last call of this method."""
        traffic = Traffic(dict(self._calls), dict(self._bytes))
        self._calls.clear()
        self._bytes.clear()
        return traffic

    def scatter_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ShardPlan
    ) -> QueryKeyValue:
        """My rows of sharded streams of all heads, Q [B, S_r, H, D], K [B, S_r, Hkv, D] and V [B, S_r, Hkv, Dv], to all
        rows of my Ulysses group, of my heads; one rank's rows after another's. One exchange.
        """
        (batch, _, _, size), value_size = query.shape, value.shape[-1]
        rank, heads = self.mesh.rank, plan.heads
        kv_heads = heads.num_kv_heads
        for tensor, count, width in (
            (query, heads.num_heads, size),
            (key, kv_heads, size),
            (value, kv_heads, value_size),
        ):
            expected = (batch, len(plan.shares[rank].sent_keys), count, width)
            if tensor.shape != expected:
                raise ExchangeSizeError("scatter_heads", f"{tuple(tensor.shape)} at hand, the plan has {expected}")
        peers, shape = self._ulysses(plan), (batch, len(plan.shares[rank].keys), size, value_size)
        if plan.exchange == "fp8":
            element = query.element_size()
            counts = scattered_bytes(
                plan, rank, batch=batch, head_size=size, value_head_size=value_size, element_size=element
            )
            send = fp8.pack_heads((query, key, value), heads, counts)
            received = self._exchange("scatter_heads", send, counts, peers)
            return fp8.unpack_heads(received, shape, heads, peers.place, query.dtype)
        counts = scattered_numbers(plan, rank, batch=batch, head_size=size, value_head_size=value_size)
        received = self._exchange("scatter_heads", pack_heads((query, key, value), heads, counts), counts, peers)
        return unpack_heads(received, shape, heads, peers.place)

    def gather_heads(self, out: torch.Tensor, plan: ShardPlan, *, whole: bool = False) -> torch.Tensor:
        """What my Ulysses group computed of my heads, [B, rows of one rank after another then those of replicated
        streams, H_u, D], back to my rows then all of replicated streams, [B, S_r, H, D]. One exchange. whole: as it
        is, also where the plan quantises.
        """
        batch, _, _, size = out.shape
        rank, dtype = self.mesh.rank, out.dtype
        peers = self._world() if plan.returns_to_all else self._ulysses(plan)
        quantised = plan.exchange == "fp8" and not whole
        if quantised:
            counts = gathered_bytes(plan, rank, batch=batch, head_size=size)
            out, size = fp8.quantise(out), size + SCALE_BYTES
        else:
            counts = plan.gather_heads(rank).times(batch * size)
        received = self._exchange("gather_heads", pack_results(out, plan, rank), counts, peers)
        mine = unpack_results(received, batch, size, plan, rank)
        return fp8.dequantise(mine, dtype) if quantised else mine

    def gather_keys(self, key: torch.Tensor, value: torch.Tensor, plan: ShardPlan) -> KeyValue:
        """The travelling keys and values of all ring places, one place's after another's, [B, S, Hkv_u, D] and
        [B, S, Hkv_u, Dv]: views of one buffer. One exchange.
        """
        (batch, _, kv_heads, size), value_size = key.shape, value.shape[3]
        counts = plan.gather_keys(self.mesh.rank).times(batch * (size + value_size))
        received = self._exchange("gather_keys", pack_keys(key, value), counts, self._ring(plan), to_all=True)
        rows = sum(len(plan.shares[other].keys) for other in plan.grid.ring_group(self.mesh.rank))
        return unpack_keys(received, rows, (batch, kv_heads, size, value_size))

    def rotate(self, message: torch.Tensor, receives: int, plan: ShardPlan) -> Rotation:
        """Send a message to the next place of my ring, and receive one of so many elements from the previous one. It
        returns at once. An empty message is not sent.
        """
        self._count("rotate_keys", message.numel() * message.element_size())
        received = message.new_empty(receives)
        try:
            return self._pass_on(received, message, self._ring(plan))
        except KEPT_ERRORS:
            raise
        except RuntimeError as error:
            raise ExchangeError("rotate_keys", str(error)) from error

    @outside_graphs
    def gather_rows(self, rows: torch.Tensor, plan: ShardPlan, stream: str | int | None = None) -> torch.Tensor:
        """Gather the rows of one stream on every rank, by one exchange.

        Args:
            rows: This rank's rows of the stream, [B, S_r, ...].
            plan: Plan of the stream.
            stream: Its name or index; the first sharded stream by default. Rows of a replicated stream are returned as
                they are, without an exchange.

        Returns:
            All rows in order, [B, S, ...].

        Raises:
            ValueError: For an argument of another type, or rows that are not those that the plan gives this rank.
            ExchangeError: If the exchange fails.
        """
        if not isinstance(plan, ShardPlan):
            raise ValueError(f"gather_rows: plan is {plan!r:.80}; give a plan of plan_of")
        if plan.world_size != self.mesh.world_size:
            raise ValueError(f"gather_rows: the plan is for {plan.world_size} ranks; there are {self.mesh.world_size}")
        index = plan.main if stream is None else plan.index_of(stream)
        by_rank = plan.held[index]
        own = len(by_rank[self.mesh.rank])
        if not isinstance(rows, torch.Tensor) or rows.dim() < 2 or rows.shape[1] != own:
            given = tuple(rows.shape) if isinstance(rows, torch.Tensor) else repr(rows)[:80]
            name = plan.streams[index].name
            raise ValueError(f"gather_rows: rows are {given}; give [B, {own}, ...], this rank's rows of {name}")
        if not plan.streams[index].sharded:
            return rows
        batch, width = rows.shape[0], rows.shape[2:].numel()
        counts = plan.gather_rows(self.mesh.rank, index).times(batch * width)
        flat = rows.transpose(0, 1).contiguous().view(-1)
        received = self._exchange("gather_rows", flat.repeat(plan.world_size), counts, self._world())
        held = chain(by_rank)
        gathered = received.view(len(held), batch, *rows.shape[2:]).transpose(0, 1)
        return assemble(held.sorted, [(gathered, held)])

    def _ulysses(self, plan: ShardPlan) -> Peers:
        rank, grid = self.mesh.rank, plan.grid
        return Peers(grid.ulysses_group(rank), grid.place(rank)[1], self.mesh.groups(grid).ulysses)

    def _ring(self, plan: ShardPlan) -> Peers:
        rank, grid = self.mesh.rank, plan.grid
        return Peers(grid.ring_group(rank), grid.place(rank)[0], self.mesh.groups(grid).ring)

    def _world(self) -> Peers:
        return Peers(range(self.mesh.world_size), self.mesh.rank, self.mesh.data)

    def _exchange(
        self, verb: str, send: torch.Tensor, counts: ExchangeCounts, peers: Peers, *, to_all: bool = False
    ) -> torch.Tensor:
        """to_all: what is sent is one message, the same to all peers."""
        # gloo neither checks sizes nor refuses strided outputs; it returns garbage (torch 2.13), so the check is ours.
        planned = counts.sends[peers.place] if to_all else sum(counts.sends)
        if send.numel() != planned or not send.is_contiguous():
            raise ExchangeSizeError(verb, f"{send.numel()} elements at hand, the plan sends {planned}")
        if send.requires_grad and torch.is_grad_enabled():
            send = send.repeat(len(peers.ranks)) if to_all else send  # whose backward pass adds the gradients up
            moved: torch.Tensor = _Exchange.apply(send, self, verb, counts, peers)  # type: ignore[no-untyped-call]
            return moved
        return self.move(verb, send, counts, peers, to_all=to_all)

    def move(
        self, verb: str, send: torch.Tensor, counts: ExchangeCounts, peers: Peers, *, to_all: bool = False
    ) -> torch.Tensor:
        """One all-to-all of a flat tensor, without a backward pass."""
        received = send.new_empty(sum(counts.receives))
        try:
            (self._to_all if to_all else self._all_to_all)(received, send, counts, peers)
        except KEPT_ERRORS:
            raise
        except RuntimeError as error:
            raise ExchangeError(verb, str(error)) from error
        self._count(verb, (sum(counts.sends) - counts.sends[peers.place]) * send.element_size())
        return received

    def _count(self, verb: str, sent: int) -> None:
        self._calls[verb] += 1
        self._bytes[verb] += sent


class _Exchange(torch.autograd.Function):
    """An all-to-all whose backward pass sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, send: torch.Tensor, transport: Transport, verb: str, counts: ExchangeCounts, peers: Peers
    ) -> torch.Tensor:
        ctx.way_back = (transport, f"{verb}_backward", counts.reversed, peers)
        return transport.move(verb, send, counts, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transport, verb, counts, peers = ctx.way_back
        return (transport.move(verb, gradients[0].contiguous(), counts, peers), None, None, None, None)
