"""The attention layer: one call site of a model, with its backend and its strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from backends.entries import resolve_entry
from backends.execution import ExecutionPath, Fallback, compilation_of, support_of
from backends.interface import AttentionBackend, AttentionImpl, AttentionMetadata, CallShape, Features, Variant
from backends.options import Place, layer_options
from backends.requirements import NO_FEATURES, Kind, Requirements
from backends.selection import Rejected, Selection
from backends.variant import EVERYTHING
from configs.faults import Fault, FaultError
from parallel.calls import CallRules, of_heads
from parallel.context import AttentionContext, current_context
from parallel.events import AttentionRan
from parallel.plan import ShardPlan
from parallel.planner import requirements_of
from parallel.strategies.ulysses import ulysses_attention
from parallel.transport.torch_dist import QueryKeyValue

CUSTOM = "custom_attention"
NO_METADATA = AttentionMetadata()
PLANS_KEPT = 32
"""By a layer, of the shapes that it met; of packed calls every set of lengths is one."""


class Attention(torch.nn.Module):
    """Attention of one role, sequence-parallel where its kind asks for it.

    num_heads, head_size: of the whole model, not of a rank. role: free-form, dotted; kind: `self` exchanges heads for
    rows, `cross` expects all keys on every rank. role_category: what the role falls back to in the configuration
    (default: the kind). value_head_size: of V, if it is another one. softmax_scale: default head_size ** -0.5.
    features: what its calls will carry, so that an automatic choice takes it.

    impl_overrides: backend name -> the model's own subclass of that backend's implementation, used if that backend is
    chosen. custom_attention: a module(query, key, value, metadata) that computes instead of any backend; it owns its
    communication, so it needs skip_sequence_parallel. skip_sequence_parallel: compute on the rows at hand, whatever
    the mesh. allow_trtllm_default: an automatic choice may be a backend that asks for the model's permission. name,
    model: where the layer stands, for the report.

    The backend is chosen at construction; FaultError tells why none serves. TypeError for an override of another kind.
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
        value_head_size: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        features: Features = NO_FEATURES,
        impl_overrides: Mapping[str, type[AttentionImpl]] | None = None,
        custom_attention: torch.nn.Module | None = None,
        skip_sequence_parallel: bool = False,
        allow_trtllm_default: bool = False,
        context: AttentionContext | None = None,
        name: str = "attention",
        model: str = "model",
    ) -> None:
        super().__init__()
        self.context = context if context is not None else current_context()
        self.name, self.model = name, model
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.strategy, required = requirements_of(
            kind,
            num_heads,
            kv_heads,
            head_size,
            self.context.dtype,
            self.context.mesh.world_size,
            causal=causal,
            value_head_size=value_head_size,
            skip_sequence_parallel=skip_sequence_parallel,
        )
        required = required.carrying(features)
        self.custom = custom_attention
        self.impl: AttentionImpl | None = None
        if custom_attention is not None:
            self.selection = self._own_selection(role, role_category or kind, required, custom_attention)
            variant = Variant("own", self.selection.class_path, takes=EVERYTHING)
            option_faults: Callable[[Requirements], Iterable[Fault]] = _no_faults
        else:
            self.selection = self.context.selector.select(
                role, required, category=role_category, allow_trtllm_default=allow_trtllm_default
            )
            backend = self.context.registry.get_class(self.selection.backend)
            variant = next(variant for variant in backend.variants if variant.name == self.selection.variant)
            blocks = self.selection.options
            option_faults = lambda asked: backend.option_faults(variant, asked, blocks)  # noqa: E731
            scale = head_size**-0.5 if softmax_scale is None else softmax_scale
            impl_class = _overridden(backend.get_impl_cls(variant), backend, impl_overrides or {})
            place = Place(self.selection.key, self.context.config.origins)
            options = layer_options(backend.blocks, blocks, self.context.layer_facts(model, name), place)
            self.impl = impl_class(softmax_scale=scale, causal=causal, options=options)
            self.impl.prepare(self.context.mesh.device, getattr(torch, self.context.dtype))
        if custom_attention is not None and not skip_sequence_parallel:
            raise ValueError(f"{name}: custom_attention owns its communication; pass skip_sequence_parallel=True")
        self.rules = CallRules(
            name=name,
            role=role,
            backend=self.selection.backend,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            value_head_size=required.value_head_size or head_size,
            causal=causal,
            strategy=self.strategy,
            required=required,
            variant=variant,
            option_faults=option_faults,
            shards_rows=kind == "cross" and self.context.mesh.world_size > 1 and not skip_sequence_parallel,
            rank=self.context.mesh.rank,
            world_size=self.context.mesh.world_size,
        )
        self._plans: dict[CallShape, Any] = {}
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

        query [B, Sq, H, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv]: this rank's rows, or all keys where they are
        replicated. metadata: of the full sequence and all heads. plan: of the sharded sequence; needed under Ulysses.
        Returns [B, Sq, H, Dv]. Raises, before any exchange, ValueError if the tensors do not match the layer or the
        plan, and FaultError for what the backend does not take.
        """
        metadata = NO_METADATA if metadata is None else metadata
        self.rules.check(query, key, value, metadata, plan)
        seen: QueryKeyValue = (query, key, value)
        if self.strategy == "ulysses" and plan is not None:
            mine = of_heads(metadata, plan.heads.query[self.rules.rank])
            out, seen = ulysses_attention(seen, partial(self._compute, mine), plan, self.context.transport)
        else:
            out = self._compute(metadata, query, key, value)
        if not self._reported and not torch.compiler.is_compiling():
            self._report(query, seen)
        return out

    def execution_path(self, features: Features | None = None) -> ExecutionPath:
        """How a call with these features (default: those of the layer) runs. Raises as the call itself would."""
        required = self.rules.required
        asked = required if features is None else required.carrying(features)
        if features is not None:
            self.rules.check_features(features)
        chosen, variant, device = self.selection, self.rules.variant, self.context.device
        replaced = chosen.requested is not None and chosen.source in ("platform", "agreed")
        trigger = tuple(f.rule for r in chosen.rejected if r.backend == chosen.requested for f in r.faults)
        return ExecutionPath(
            backend=chosen.backend,
            variant=chosen.variant,
            kernel=self.kernel,
            strategy=self.strategy,
            platform=device.label,
            mask=asked.mask,
            packed=asked.packed,
            compilation=compilation_of(variant, self.strategy),
            support=support_of(variant, asked, device),
            fallback=Fallback(chosen.requested, chosen.backend, trigger) if replaced and chosen.requested else None,
        )

    @property
    def kernel(self) -> str:
        """The dotted name of what computes."""
        return self.impl.kernel if self.impl is not None else self.selection.class_path

    def _compute(
        self, metadata: AttentionMetadata, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if self.impl is None:
            out = self.custom(query, key, value, metadata)  # type: ignore[misc]
        else:
            planned = self._plan_of(metadata, query, key)
            extra = () if planned is None else (planned,)  # kernels that plan nothing need no argument for it
            out = self.impl.forward(query, key, value, metadata, *extra)
        expected = (*query.shape[:3], self.rules.value_head_size)
        if out.shape != expected or out.dtype != query.dtype:
            raise ValueError(
                f"{self.name}: {self.kernel} of {self.selection.backend} returned {out.dtype} {tuple(out.shape)}; "
                f"a backend returns what its query is, {query.dtype} {expected}"
            )
        return out  # type: ignore[no-any-return]

    def _plan_of(self, metadata: AttentionMetadata, query: torch.Tensor, key: torch.Tensor) -> Any:
        batch, rows, heads, size = query.shape
        keys, kv_heads = key.shape[1], key.shape[2]
        shape = CallShape(batch, rows, keys, heads, kv_heads, size, metadata.features, metadata.packed)
        if self.impl is None or type(self.impl).plan is AttentionImpl.plan:
            return None  # also so that a compiler need not follow the shapes
        if shape not in self._plans:
            if len(self._plans) >= PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[shape] = self.impl.plan(shape)
        return self._plans[shape]

    def _own_selection(self, role: str, category: str, required: Requirements, module: torch.nn.Module) -> Selection:
        """The record of a layer that no backend serves. Raises FaultError if the configuration chose one for it."""
        entry = resolve_entry(role, category, self.context.config)
        path = f"{type(module).__module__}.{type(module).__qualname__}"
        if entry.explicit is not None and entry.source in ("role", "parent"):
            rule = f"{role} computes with the model's own {path}, and nothing would use a backend"
            raise FaultError([Fault(entry.key, entry.explicit.backend, rule, "leave it out", origin=entry.origin)])
        passed_over: tuple[Rejected, ...] = ()
        if entry.explicit is not None:  # a category or the default, which other roles may have too: it is told
            rule = f"{role} computes with the model's own {path}"
            fault = Fault(entry.key, entry.explicit.backend, rule, "set it for roles that use a backend")
            passed_over = (Rejected(entry.explicit.backend, (fault,)),)
        return Selection(
            role=role,
            kind=required.kind,
            category=category,
            requirements=required,
            requested=None if entry.explicit is None else entry.explicit.backend,
            backend=CUSTOM,
            variant="own",
            class_path=path,
            source="model",
            key=entry.key if passed_over else "",
            origin=entry.origin if passed_over else "",
            exactness="exact",
            rejected=passed_over,
        )

    def _report(self, query: torch.Tensor, seen: QueryKeyValue) -> None:
        self._reported = True
        self.context.emit(
            AttentionRan(
                model=self.model,
                layer=self.name,
                selection=self.selection,
                strategy=self.strategy,
                kernel=self.kernel,
                query_rows=tuple(query.shape),
                query=tuple(seen[0].shape),
                key=tuple(seen[1].shape),
            )
        )


def _no_faults(asked: Requirements) -> Iterable[Fault]:
    return ()


def _overridden(
    selected: type[AttentionImpl], backend: type[AttentionBackend], overrides: Mapping[str, type[AttentionImpl]]
) -> type[AttentionImpl]:
    """The model's own implementation for the selected backend, if it has one; it keeps the backend's contract."""
    own = overrides.get(backend.get_name())
    if own is None:
        return selected
    if not (isinstance(own, type) and issubclass(own, selected)):
        raise TypeError(
            f"impl_overrides[{backend.get_name()!r}] is {own!r}; it must be a subclass of "
            f"{selected.__module__}.{selected.__qualname__}, which was selected"
        )
    return own
