"""One call's work on a rank: its kernel, and what surrounds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from backends.interface import AttentionMetadata
from parallel.kept import Kept
from parallel.merge import nothing
from parallel.pieces import assemble
from parallel.plan import ShardPlan
from parallel.rows import Rows, chain
from parallel.transport.base import Transport


class Result(NamedTuple):
    """out [B, S, H, Dv]; lse [B, H, S], None unless it was asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


class Kernel(Protocol):
    """Computes one block on this device, [B, S, H, D] in and out. metadata: of the block."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        causal: bool,
        lse: bool,
    ) -> Result: ...


@dataclass(frozen=True)
class HeldKeys:
    """Keys [B, S, Hkv, D] and values [B, S, Hkv, Dv] of a rank's heads: of sharded streams, which travel, and of
    replicated streams, if there are any.
    """

    key: torch.Tensor
    value: torch.Tensor
    fixed_key: torch.Tensor | None = None
    fixed_value: torch.Tensor | None = None

    def joined(self, keys: Rows, fixed: Rows, reach: range | None = None) -> tuple[torch.Tensor, torch.Tensor, Rows]:
        """Both in the order of their positions, and these; reach: those within this span."""
        every = chain((keys, fixed)).sorted
        if reach is not None:
            every = every.within(reach)
        if every == keys:
            return self.key, self.value, keys
        of_keys, of_values = [(self.key, keys)], [(self.value, keys)]
        if self.fixed_key is not None and self.fixed_value is not None:
            of_keys.append((self.fixed_key, fixed))
            of_values.append((self.fixed_value, fixed))
        return assemble(every, of_keys), assemble(every, of_values), every


class Work:
    """shapes: of query and key as the kernel got them first; None before. metadata: of all rows, and of this rank's
    heads.
    """

    def __init__(
        self,
        kernel: Kernel,
        metadata: AttentionMetadata,
        plan: ShardPlan,
        transport: Transport,
        kept: Kept,
        *,
        causal: bool,
        lse: bool,
    ) -> None:
        self._kernel = kernel
        self.metadata, self.plan, self.transport, self.kept = metadata, plan, transport, kept
        self.causal, self.lse = causal, lse
        self.rank = transport.mesh.rank
        self.share = plan.shares[self.rank]
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        expansion = plan.heads.expansion[plan.grid.place(self.rank)[1]]
        device = transport.mesh.device
        # A copy to a GPU waits for it, so it is made once.
        self._expansion = (
            None if expansion is None else kept.get((expansion, device), lambda: _index(expansion, device))
        )

    def compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        causal: bool,
        lse: bool,
    ) -> Result:
        """The kernel's result. Where the ranks part the KV heads otherwise than query head i of a rank reading its KV
        head i // (H_u / Hkv_u), each query head gets a KV head of its own.
        """
        if self._expansion is not None:
            key, value = key.index_select(2, self._expansion), value.index_select(2, self._expansion)
        if self.shapes is None:
            self.shapes = tuple(query.shape), tuple(key.shape)
        return self._kernel(query, key, value, metadata, causal=causal, lse=lse)

    def whole(self, query: torch.Tensor, held: HeldKeys) -> Result:
        """All queries to all keys, at once."""
        key, value, _ = held.joined(self.share.keys, self.share.fixed_keys)
        return self.compute(query, key, value, self.metadata, causal=self.causal, lse=self.lse)


def over_nothing(
    query: torch.Tensor, value_size: int, sinks: torch.Tensor | None, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a query over no keys, or of no query. others: what they depend on as well."""
    out, lse = nothing(query, value_size)
    if sinks is not None:
        lse = sinks.to(lse.dtype)[None, :, None].expand_as(lse).clone()
    return reaching(out, query, *others).to(query.dtype), reaching(lse, query, *others)


def _index(places: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, device=device)


def reaching(numbers: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """The same numbers, whose backward pass reaches all the tensors, used or not: every rank has to run that of an
    exchange, also one that needed nothing of what it got, or computed nothing of what it sends.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return numbers
    return numbers + sum(tensor.narrow(0, 0, 0).sum() for tensor in tensors)


def without_sinks(metadata: AttentionMetadata) -> AttentionMetadata:
    return metadata if metadata.sinks is None else replace(metadata, sinks=None)
