"""The attention layer: one call site of a model, with its backend and its strategy."""

from __future__ import annotations

from functools import partial

import torch

from backends.interface import AttentionMetadata, Kind
from backends.selector import select
from parallel.context import AttentionContext, current_context
from parallel.events import AttentionRan
from parallel.plan import ShardPlan
from parallel.planner import requirements_of
from parallel.strategies.ulysses import ulysses_attention
from parallel.transport.torch_dist import QueryKeyValue


class Attention(torch.nn.Module):
    """Attention of one role, sequence-parallel where its kind asks for it.

    num_heads, head_size: of the whole model, not of a rank. role: free-form, dotted; kind: `self` exchanges heads for
    rows, `cross` expects all keys on every rank. role_category: what the role falls back to in the configuration
    (default: the kind). softmax_scale: default head_size ** -0.5. skip_sequence_parallel: compute on the rows at
    hand, whatever the mesh. name, model: where the layer stands, for the report.

    The backend is chosen at construction; FaultError tells why none serves. The layer computes inference only.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        role: str,
        kind: Kind,
        role_category: str | None = None,
        num_kv_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        skip_sequence_parallel: bool = False,
        context: AttentionContext | None = None,
        name: str = "attention",
        model: str = "model",
    ) -> None:
        super().__init__()
        self.context = context if context is not None else current_context()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.causal = causal
        self.name = name
        self.model = model
        self.strategy, requirements = requirements_of(
            kind,
            num_heads,
            self.num_kv_heads,
            head_size,
            self.context.dtype,
            self.context.mesh.world_size,
            causal=causal,
            skip_sequence_parallel=skip_sequence_parallel,
        )
        context_ = self.context
        self.selection = select(
            role, requirements, context_.device, context_.config, context_.registry, category=role_category
        )
        backend = context_.registry.get_class(self.selection.backend)
        self.variant = next(variant for variant in backend.variants if variant.name == self.selection.variant)
        scale = head_size**-0.5 if softmax_scale is None else softmax_scale
        self.impl = backend.get_impl_cls(self.variant)(softmax_scale=scale, causal=causal)
        self._reported = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata | None = None,
        *,
        plan: ShardPlan | None = None,
    ) -> torch.Tensor:
        """Attention of the rows at hand.

        query [B, Sq, H, D], key and value [B, Sk, Hkv, D]: this rank's rows, or all keys where they are replicated.
        plan: of the sharded sequence; needed under Ulysses. Returns [B, Sq, H, D]. Raises ValueError, before any
        exchange, if the tensors do not match the layer or the plan.
        """
        metadata = AttentionMetadata() if metadata is None else metadata
        self._check(query, key, value, metadata, plan)
        seen: QueryKeyValue = (query, key, value)
        if self.strategy == "ulysses" and plan is not None:
            out, seen = ulysses_attention(seen, partial(self._compute, metadata), plan, self.context.transport)
        else:
            out = self._compute(metadata, query, key, value)
        if not self._reported:
            self._report(query, seen)
        return out

    def _compute(
        self, metadata: AttentionMetadata, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = self.impl.forward(query, key, value, metadata)
        if out.shape != query.shape or out.dtype != query.dtype:
            raise ValueError(
                f"{self.name}: {self.impl.kernel} of {self.selection.backend} returned {out.dtype} {tuple(out.shape)}; "
                f"a backend returns what its query is, {query.dtype} {tuple(query.shape)}"
            )
        return out

    def _check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: ShardPlan | None,
    ) -> None:
        batch = query.shape[0]
        if query.shape[2:] != (self.num_heads, self.head_size):
            raise ValueError(
                f"{self.name}: query is {tuple(query.shape)}; the layer has {self.num_heads} heads of {self.head_size}"
            )
        expected = (batch, key.shape[1], self.num_kv_heads, self.head_size)
        if key.shape != expected or value.shape != expected:
            raise ValueError(
                f"{self.name}: key {tuple(key.shape)} and value {tuple(value.shape)} must both be {expected}"
            )
        if not query.dtype == key.dtype == value.dtype:
            dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}"
            raise ValueError(f"{self.name}: query, key and value must have one dtype, not {dtypes}")
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise ValueError(f"{self.name}: the inputs require gradients; run under torch.no_grad()")
        if self.causal and self.strategy == "local" and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"{self.name}: causal attention of {query.shape[1]} queries to {key.shape[1]} keys is ambiguous"
            )
        rows, keys = query.shape[1], key.shape[1]
        if self.strategy == "ulysses":
            rows = keys = self._check_plan(query, key, plan).length
        if metadata.mask is not None:
            self._check_mask(metadata.mask, batch, rows, keys)

    def _check_plan(self, query: torch.Tensor, key: torch.Tensor, plan: ShardPlan | None) -> ShardPlan:
        if plan is None:
            raise ValueError(
                f"{self.name}: a sharded sequence needs plan=...; without it nobody knows the other ranks' rows"
            )
        mesh = self.context.mesh
        if plan.world_size != mesh.world_size:
            raise ValueError(f"{self.name}: the plan is of {plan.world_size} ranks, and there are {mesh.world_size}")
        mine = len(plan.rows[mesh.rank])
        if (query.shape[1], key.shape[1], plan.num_heads) != (mine, mine, self.num_heads):
            raise ValueError(
                f"{self.name}: {query.shape[1]} query rows, {key.shape[1]} key rows, {self.num_heads} heads at hand; "
                f"the plan gives this rank {mine} rows of {plan.num_heads} heads"
            )
        return plan

    def _check_mask(self, mask: torch.Tensor, batch: int, rows: int, keys: int) -> None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
            raise ValueError(
                f"{self.name}: a mask is boolean, [B or 1, 1, Sq or 1, Sk], not {mask.dtype} {tuple(mask.shape)}"
            )
        if mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, rows) or mask.shape[3] != keys:
            raise ValueError(
                f"{self.name}: the mask is {tuple(mask.shape)}; the call is of batch {batch}, with {rows} query rows "
                f"and {keys} keys"
            )
        if "boolean" not in self.variant.masks:
            raise ValueError(
                f"{self.name}: {self.selection.backend} takes no mask; choose TORCH_SDPA for {self.selection.role}"
            )

    def _report(self, query: torch.Tensor, seen: QueryKeyValue) -> None:
        self._reported = True
        self.context.emit(
            AttentionRan(
                model=self.model,
                layer=self.name,
                selection=self.selection,
                strategy=self.strategy,
                kernel=self.impl.kernel,
                query_rows=tuple(query.shape),
                query=tuple(seen[0].shape),
                key=tuple(seen[1].shape),
            )
        )
