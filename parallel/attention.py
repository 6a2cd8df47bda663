"""The attention layer: one call site of a model, with its backend and its strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum

import torch

from backends.execution import ExecutionPath, Fallback, compilation_of, support_of
from backends.interface import AttentionImpl, AttentionMetadata, Features, Variant
from backends.options import Blocks, Place, layer_options
from backends.requirements import NO_FEATURES, Kind, Requirements
from backends.variant import EVERYTHING
from configs.faults import Fault
from parallel.agreement import Carried
from parallel.argument_types import layer_problem, wrong_streams
from parallel.calls import CallRules, records_gradient
from parallel.context import AttentionContext, current_context
from parallel.events import AttentionRan
from parallel.kernel import BackendKernel, OwnKernel, checked_overrides, overridden, own_selection, wrong_result
from parallel.opaque import outside_graphs
from parallel.plan import Grid, ShardPlan, Strategy, Stream, plan_streams
from parallel.planner import RoleCall, Way, choose
from parallel.restrict import of_rows
from parallel.rows import rows
from parallel.strategies.sharded import Attended, sharded_attention
from parallel.strategies.work import Result
from parallel.transport.errors import ExchangeError
from parallel.transport.packing import QueryKeyValue

NO_METADATA = AttentionMetadata()


class Attention(torch.nn.Module):
    """Attention of one role, sequence-parallel where its kind asks for it.

    num_heads, head_size: of the whole model, not of a rank. role: free-form, dotted; kind: `self` and `joint` attend to
    rows of all ranks, `cross` expects all keys on every rank. role_category: what the role falls back to in the
    configuration (default: the kind). value_head_size: of V, if it is another one. softmax_scale: default
    head_size ** -0.5. features, lse, gradient: what its calls will carry and ask for, so that an automatic choice takes
    it.

    impl_overrides: backend name (or a member of an Enum) -> the model's own subclass of that backend's implementation,
    used if that backend is chosen. custom_attention: a module(query, key, value, metadata) that computes instead of
    any backend; it owns its communication, so it needs skip_sequence_parallel. skip_sequence_parallel: compute on
    the rows at hand, whatever the mesh. allow_trtllm_default: an automatic choice may be a backend that asks for
    the model's permission. name, model: where the layer stands, for the report.

    The strategy and the backend are chosen at construction, on all ranks alike. Raises FaultError if none serves,
    ValueError for an argument that no layer has, and TypeError for an override that is not such a class.
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
        lse: bool = False,
        gradient: bool = False,
        learned_gradient: bool = False,
        impl_overrides: Mapping[str | Enum, type[AttentionImpl]] | None = None,
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
        sizes = {"num_heads": num_heads, "head_size": head_size}
        optional_sizes = {"num_kv_heads": num_kv_heads, "value_head_size": value_head_size}
        sizes |= {key: size for key, size in optional_sizes.items() if size is not None}
        problem = layer_problem(kind, features, softmax_scale, sizes)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        overrides = checked_overrides(impl_overrides, self.context.registry)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        mesh, category = self.context.mesh, role_category or kind
        call = RoleCall(
            kind=kind,
            heads=num_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            dtype=self.context.dtype,
            causal=causal,
            value_head_size=value_head_size,
            features=features,
            lse=lse,
            gradient=gradient,
            learned_gradient=learned_gradient,
            skip=skip_sequence_parallel,
        )
        option_faults: Callable[[Requirements], Iterable[Fault]] = lambda asked: ()  # noqa: E731
        scale: float | None = None
        if custom_attention is not None:
            if overrides:
                raise ValueError(f"{name}: custom_attention computes, and nothing would use impl_overrides; pass one")
            if not skip_sequence_parallel:
                raise ValueError(f"{name}: custom_attention owns its communication; pass skip_sequence_parallel=True")
            self.way = Way()
            self.selection = own_selection(
                role, category, call.required(self.way), custom_attention, self.context.config
            )
            variant = Variant("own", self.selection.class_path, takes=EVERYTHING)
            self.custom = custom_attention  # its parameters are the layer's
            self.kernel_call: BackendKernel | OwnKernel = OwnKernel(custom_attention, self.selection.class_path)
        else:
            planned = choose(
                call,
                mesh.world_size,
                self.context.parallel,
                lambda required: self.context.selector.select(
                    role, required, category=role_category, allow_trtllm_default=allow_trtllm_default
                ),
            )
            self.way, self.selection = planned.way, planned.selection
            backend = self.context.registry.get_class(self.selection.backend)
            variant = next(variant for variant in backend.variants if variant.name == self.selection.variant)
            blocks = self.selection.options
            option_faults = lambda asked: backend.option_faults(variant, asked, blocks)  # noqa: E731
            scale = head_size**-0.5 if softmax_scale is None else float(softmax_scale)
            impl_class = overridden(backend.get_impl_cls(variant), backend, overrides)
            place = Place(self.selection.key, self.context.config.origins)
            options = layer_options(backend.blocks, blocks, self.context.layer_facts(model, name), place)
            make = self._maker(impl_class, scale, options)
            compilation = compilation_of(variant, self.strategy)
            self.kernel_call = BackendKernel(make, call.required(self.way).causal, compilation)
            if mesh.data is not None:
                mesh.groups(self.way.grid)
        self.rules = CallRules(
            name=name,
            role=role,
            backend=self.selection.backend,
            class_path=self.selection.class_path,
            call=call,
            way=self.way,
            required=call.required(self.way),
            variant=variant,
            softmax_scale=scale,
            option_faults=option_faults,
            shards_rows=kind == "cross" and mesh.world_size > 1 and not skip_sequence_parallel,
            rank=mesh.rank,
            world_size=mesh.world_size,
            device=mesh.device,
        )
        self._admissions, self._kept = self.context.admissions, self.context.kept
        self._reported = False
        self.announced: Carried | None = None  # set by Forwards.plan_for, for the call that follows

    @property
    def strategy(self) -> Strategy:
        return self.way.strategy

    @property
    def impl(self) -> AttentionImpl | None:
        """The backend's implementation; None where the model's own module computes."""
        return self.kernel_call.impl

    @outside_graphs
    def plan_of(self, *streams: Stream) -> ShardPlan:
        """Return the plan of calls over these streams, which says what rows each rank holds.

        Keep it for calls of one batch, dtype, device and `AttentionMetadata`, of this layer and of layers that were
        constructed like it; the ranks agree on its first call. For cross-attention the streams are those of the
        queries, and no rows are exchanged.

        Args:
            streams: All rows of a call, one stream after another.

        Raises:
            ValueError: For no streams, and for an argument that is not a `Stream`.
        """
        problem = wrong_streams(streams)
        if problem is not None:
            raise ValueError(f"{self.name}: plan_of: {problem}")
        return replace(self.plan_among(*streams))

    def plan_among(self, *streams: Stream, agreed: bool = False) -> ShardPlan:
        """The same object for the same streams. agreed: they are those of a forward that all ranks have agreed on."""
        call, way = self.rules.call, self.way
        return plan_streams(
            streams,
            call.heads,
            way.grid if way.strategy != "local" else Grid(self.rules.world_size),
            way.strategy,
            kv_heads=call.kv_heads,
            zigzag=self.rules.zigzag,
            exchange=way.exchange,
            agreed=agreed,
        )

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

        query [B, Sq, H, D], key [B, Sk, Hkv, D], value [B, Sk, Hkv, Dv]: this rank's rows of the plan's streams, one
        stream after another, or all keys where they are replicated. metadata: of all rows of all streams, and all
        heads. plan: of the sharded sequence, made with `plan_of`; needed where rows are exchanged.
        Returns [B, Sq, H, Dv], contiguous. Raises, before any exchange, ValueError, FaultError and
        RankDisagreementError as `Admissions.admit` does; ExchangeError for one that fails.
        """
        return self._attend((query, key, value), metadata, plan, lse=False).out

    def forward_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata | None = None,
        *,
        plan: ShardPlan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and the log-sum-exp of each of this rank's rows and all heads, [B, H, Sq], contiguous,
        as `AttentionImpl.forward_with_lse` defines it. Construct the layer with lse=True, or a choice may not have it.
        """
        attended = self._attend((query, key, value), metadata, plan, lse=True)
        if attended.lse is None:
            raise TypeError(f"{self.name}: {self.kernel} returned no log-sum-exp")
        return attended.out, attended.lse

    def _attend(
        self, qkv: QueryKeyValue, metadata: AttentionMetadata | None, plan: ShardPlan | None, *, lse: bool
    ) -> Attended:
        metadata = NO_METADATA if metadata is None else metadata
        # A graph must not look at the plan: it would hold for the lengths of this one alone.
        if self.strategy != "local" or self.rules.needs_plan(metadata):
            return self._attend_outside(qkv, metadata, plan, lse=lse)
        return self._attend_here(qkv, metadata, plan, lse=lse)

    def _attend_here(
        self, qkv: QueryKeyValue, metadata: AttentionMetadata, plan: ShardPlan | None, *, lse: bool
    ) -> Attended:
        announced = None if self.strategy == "local" else self.announced  # a graph would guard on it
        self._admissions.admit(self.rules, qkv, metadata, plan, lse=lse, announced=announced)
        query, key, value = qkv
        causal, kept = self.rules.call.causal, self._kept
        if self.strategy == "local":
            if self.rules.cuts_rows(metadata) and plan is not None:
                mine = plan.shares[self.rules.rank].query_rows
                metadata = of_rows(metadata, mine, rows(range(key.shape[1])), query.device, kept)
            result = self._compute(query, key, value, metadata, causal=causal, lse=lse)
            attended = Attended(*result, tuple(query.shape), tuple(key.shape))
        elif plan is not None:
            carrier = self.context.transport
            if records_gradient(*qkv, metadata):  # all ranks run the backward pass of every exchange, or none does
                qkv = _learning(query), _learning(key), _learning(value)
            try:
                attended = sharded_attention(qkv, self._compute, metadata, plan, carrier, kept, causal=causal, lse=lse)
            except ExchangeError as error:
                error.layer = self.name
                raise
        if not torch.compiler.is_compiling() and not self._reported:  # in this order, or it is part of a graph
            self._report(query, attended)
        return attended.contiguous()

    _attend_outside = outside_graphs(_attend_here)

    def execution_path(self, features: Features | None = None) -> ExecutionPath:
        """How a call with these features (default: those of the layer) runs. Raises as the call itself would."""
        asked = self.rules.required if features is None else self.rules.asked(features)
        self.rules.check_asked(asked)
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
        return self.kernel_call.name

    def _compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        causal: bool,
        lse: bool,
    ) -> Result:
        result = self.kernel_call(query, key, value, metadata, causal=causal, lse=lse)
        problem = wrong_result(result, query, self.rules.value_head_size, lse)
        if problem is not None:
            raise ValueError(f"{self.name}: {self.kernel} of {self.rules.backend} {problem}")
        return result

    def _maker(self, impl_class: type[AttentionImpl], scale: float, options: Blocks) -> Callable[[bool], AttentionImpl]:
        device, dtype = self.context.mesh.device, getattr(torch, self.context.dtype)

        def make(causal: bool) -> AttentionImpl:
            impl = impl_class(softmax_scale=scale, causal=causal, options=options)
            if not isinstance(impl, AttentionImpl):  # a class may have a __new__ of its own
                rule = "constructing an implementation returns an AttentionImpl"
                raise TypeError(f"{self.name}: {impl_class.__qualname__} returned {impl!r}; {rule}")
            impl.prepare(device, dtype)
            return impl

        return make

    def _report(self, query: torch.Tensor, attended: Attended) -> None:
        self._reported = True
        self.context.emit(
            AttentionRan(
                model=self.model,
                layer=self.name,
                selection=self.selection,
                strategy=self.strategy,
                kernel=self.kernel,
                query_rows=tuple(query.shape),
                query=attended.query_shape,
                key=attended.key_shape,
            )
        )


def _learning(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with a gradient, if only one that nobody asks for."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
