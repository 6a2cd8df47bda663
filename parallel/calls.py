"""What an attention call must be like: checked on every rank before the call's first exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from backends.interface import AttentionMetadata, Features, Variant
from backends.requirements import Requirements
from configs.faults import Fault, FaultError
from parallel.metadata_types import check_types
from parallel.plan import ShardPlan, Strategy


@dataclass(frozen=True)
class CallRules:
    """The facts of a layer that its calls have to match; num_heads, num_kv_heads and head_size of the whole model.

    required: what its backend was chosen for, on this rank's share of the heads. option_faults: what the backend's
    options keep it from taking. shards_rows: a local call sees this rank's rows out of a longer sequence.
    """

    name: str
    role: str
    backend: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_head_size: int
    causal: bool
    strategy: Strategy
    required: Requirements
    variant: Variant
    shards_rows: bool
    option_faults: Callable[[Requirements], Iterable[Fault]]
    rank: int
    world_size: int

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: ShardPlan | None,
    ) -> None:
        """Raises ValueError if the tensors do not match the layer, the plan or each other, and FaultError for what the
        backend does not take.
        """
        check_types(self.name, metadata)
        self._check_tensors(query, key, value)
        rows, keys = query.shape[1], key.shape[1]
        if self.strategy == "ulysses":
            rows = keys = self._check_plan(query, key, plan).length
        learned = [tensor for tensor in (query, key, value, metadata.sinks, metadata.bias) if tensor is not None]
        gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned)
        if gradient and self.strategy != "local":
            raise ValueError(f"{self.name}: the inputs require gradients; run under torch.no_grad()")
        self._check_metadata(metadata, query, rows, keys)
        self.check_features(metadata.features, gradient=gradient, dtype=str(query.dtype).removeprefix("torch."))

    def check_features(self, features: Features, *, gradient: bool = False, dtype: str | None = None) -> None:
        """Raises FaultError, about the role, for what the layer's backend does not take."""
        asked = replace(self.required.carrying(features, gradient=gradient), dtype=dtype or self.required.dtype)
        if asked == self.required:
            return
        remedy = f"choose another backend for {self.role}, or construct the layer with features={features}"
        found = [*self.variant.takes.faults(asked), *self.option_faults(asked)]
        if found:
            raise FaultError(
                replace(fault, key=f"{self.name}: {fault.key}", rule=f"{self.backend}: {fault.rule}", remedy=remedy)
                for fault in found
            )

    def _check_tensors(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.shape[2:] != (self.num_heads, self.head_size):
            raise ValueError(
                f"{self.name}: query is {tuple(query.shape)}; the layer has {self.num_heads} heads of {self.head_size}"
            )
        expected = (query.shape[0], key.shape[1], self.num_kv_heads, self.head_size)
        of_value = (*expected[:3], self.value_head_size)
        if key.shape != expected or value.shape != of_value:
            must = f"both be {expected}" if of_value == expected else f"be {expected} and {of_value}"
            raise ValueError(f"{self.name}: key {tuple(key.shape)} and value {tuple(value.shape)} must {must}")
        if not query.dtype == key.dtype == value.dtype:
            dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}"
            raise ValueError(f"{self.name}: query, key and value must have one dtype, not {dtypes}")

    def _check_plan(self, query: torch.Tensor, key: torch.Tensor, plan: ShardPlan | None) -> ShardPlan:
        if plan is None:
            raise ValueError(
                f"{self.name}: a sharded sequence needs plan=...; without it nobody knows the other ranks' rows"
            )
        if plan.world_size != self.world_size:
            raise ValueError(f"{self.name}: the plan is of {plan.world_size} ranks, and there are {self.world_size}")
        mine = len(plan.rows[self.rank])
        if (query.shape[1], key.shape[1], plan.num_heads) != (mine, mine, self.num_heads):
            raise ValueError(
                f"{self.name}: {query.shape[1]} query rows, {key.shape[1]} key rows, {self.num_heads} heads at hand; "
                f"the plan gives this rank {mine} rows of {plan.num_heads} heads"
            )
        if plan.heads.num_kv_heads != self.num_kv_heads:
            raise ValueError(
                f"{self.name}: the layer has {self.num_kv_heads} KV heads, and the plan {plan.heads.num_kv_heads}; "
                f"make it with kv_heads={self.num_kv_heads}"
            )
        return plan

    def _check_metadata(self, metadata: AttentionMetadata, query: torch.Tensor, rows: int, keys: int) -> None:
        if rows != keys and (self.causal or metadata.window is not None):
            kind = "causal attention" if self.causal else "a window"
            raise ValueError(f"{self.name}: {kind} of {rows} queries to {keys} keys is ambiguous")
        given = [mask for mask in (metadata.mask, metadata.bias) if mask is not None]
        by_row = metadata.block_mask is not None or any(mask.dim() == 4 and mask.shape[2] > 1 for mask in given)
        if self.shards_rows and (by_row or metadata.window is not None or metadata.packed is not None):
            raise ValueError(
                f"{self.name}: what is told of each query row is of the whole sequence, and this rank has {rows} rows "
                "of it; give keys a mask [B or 1, 1 or H, 1, Sk], or use one rank"
            )
        if metadata.mask is not None:
            self._check_mask("mask", metadata.mask, torch.bool, (query.shape[0], rows, keys))
        if metadata.bias is not None:
            self._check_mask("bias", metadata.bias, query.dtype, (query.shape[0], rows, keys))
        if metadata.block_mask is not None:
            self._check_block_mask(metadata, query.shape[0], rows, keys)
        if metadata.sinks is not None and tuple(metadata.sinks.shape) != (self.num_heads,):
            shape = tuple(metadata.sinks.shape)
            raise ValueError(f"{self.name}: sinks are {shape}; they are one for each of {self.num_heads} heads")
        if metadata.soft_cap is not None and not 0 < metadata.soft_cap < float("inf"):
            raise ValueError(f"{self.name}: soft_cap is {metadata.soft_cap}; it is a finite number above 0")
        if any(side is not None and side < 0 for side in metadata.window or ()):
            raise ValueError(f"{self.name}: window is {metadata.window}; its sides are None or at least 0")
        if metadata.packed is not None:
            self._check_packed(metadata, rows, keys)

    def _check_packed(self, metadata: AttentionMetadata, rows: int, keys: int) -> None:
        lengths = metadata.packed
        if lengths is None:
            return
        if (sum(lengths.query), sum(lengths.key)) != (rows, keys) or len(lengths.query) != len(lengths.key):
            raise ValueError(
                f"{self.name}: the documents have {lengths.query} query rows and {lengths.key} keys; the call has "
                f"{rows} and {keys}"
            )
        if min((*lengths.query, *lengths.key), default=0) < 0:
            raise ValueError(f"{self.name}: a document has a negative length: {lengths.query}, {lengths.key}")
        if (self.causal or metadata.window is not None) and lengths.query != lengths.key:
            raise ValueError(f"{self.name}: documents with other query than key lengths have no common positions")

    def _check_mask(self, name: str, mask: torch.Tensor, dtype: torch.dtype, call: tuple[int, int, int]) -> None:
        batch, rows, keys = call
        if mask.dtype != dtype or mask.dim() != 4:
            raise ValueError(
                f"{self.name}: a {name} is {dtype}, [B or 1, 1 or H, Sq or 1, Sk], not {mask.dtype} {tuple(mask.shape)}"
            )
        fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, self.num_heads) and mask.shape[2] in (1, rows)
        if not fits or mask.shape[3] != keys:
            raise ValueError(
                f"{self.name}: the {name} is {tuple(mask.shape)}; the call is of batch {batch}, with {self.num_heads} "
                f"heads, {rows} query rows and {keys} keys"
            )

    def _check_block_mask(self, metadata: AttentionMetadata, batch: int, rows: int, keys: int) -> None:
        beside = [name for name in ("mask", "window", "packed") if getattr(metadata, name) is not None]
        if beside or self.causal:
            raise ValueError(
                f"{self.name}: a block_mask beside {', '.join(beside) or 'causal attention'}: it says alone who looks "
                "at whom; put the rest into its mask_mod"
            )
        shape = tuple(metadata.block_mask.shape) if metadata.block_mask is not None else ()
        if shape[0] not in (1, batch) or shape[1] not in (1, self.num_heads) or shape[2:] != (rows, keys):
            raise ValueError(
                f"{self.name}: the block_mask is {shape}; the call is of batch {batch}, with {self.num_heads} heads, "
                f"{rows} query rows and {keys} keys"
            )
        if self.strategy != "local":
            raise ValueError(f"{self.name}: a block_mask is not served under {self.strategy} yet; give a mask")


def of_heads(metadata: AttentionMetadata, heads: range) -> AttentionMetadata:
    """What a rank that computes these heads needs of it."""
    mask, bias, sinks = metadata.mask, metadata.bias, metadata.sinks
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, heads.start : heads.stop]
    if bias is not None and bias.shape[1] > 1:
        bias = bias[:, heads.start : heads.stop]
    if sinks is not None:
        sinks = sinks[heads.start : heads.stop]
    if mask is metadata.mask and bias is metadata.bias and sinks is metadata.sinks:
        return metadata
    return replace(metadata, mask=mask, bias=bias, sinks=sinks)
