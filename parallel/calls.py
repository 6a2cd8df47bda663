"""What an attention call must be like: checked on every rank before the call's first exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from backends.interface import AttentionMetadata, Features, Variant
from backends.requirements import Requirements
from configs.faults import Fault, FaultError
from parallel.argument_types import wrong_types
from parallel.plan import ShardPlan
from parallel.planner import RINGS, RoleCall, Way
from parallel.transport.packing import QueryKeyValue


@dataclass(frozen=True)
class CallRules:
    """The facts of a layer that its calls have to match.

    required: what its backend was chosen for. option_faults: what the backend's options keep it from taking.
    shards_rows: a local call sees this rank's rows out of a longer sequence. softmax_scale: None if the model's own
    module computes.
    """

    name: str
    role: str
    backend: str
    class_path: str
    call: RoleCall
    way: Way
    required: Requirements
    variant: Variant
    softmax_scale: float | None
    shards_rows: bool
    option_faults: Callable[[Requirements], Iterable[Fault]]
    rank: int
    world_size: int
    device: torch.device

    @cached_property
    def told(self) -> str:
        """What all ranks must have alike of the layer."""
        size, value_size = self.call.head_size, self.value_head_size
        sizes = f"{size}" if value_size == size else f"{size} (V {value_size})"
        heads = f"{self.call.heads}/{self.call.kv_heads} heads of {sizes}"
        served = f"{self.backend}/{self.variant.name} ({self.class_path})"
        causal = "causal, " if self.call.causal else ""
        scale = f" scaled by {self.softmax_scale}" if self.softmax_scale is not None else ""
        return f"{self.role}={served}, {causal}{heads} in {self.call.dtype}{scale}, by {self.way} {self.way.exchange}"

    @property
    def zigzag(self) -> bool:
        """Whether its plans give every ring place an early and a late piece."""
        return self.call.causal and self.way.strategy in RINGS

    @property
    def value_head_size(self) -> int:
        return self.call.value_head_size or self.call.head_size

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: ShardPlan | None,
        *,
        lse: bool = False,
    ) -> None:
        """Raises ValueError if the tensors do not match the layer, the plan or each other, and FaultError for what the
        backend does not take.
        """
        problem = wrong_types(metadata)
        if problem is not None:  # a compiler makes a graph for each name that it sees handed on
            raise ValueError(f"{self.name}: {problem}")
        if plan is not None and not isinstance(plan, ShardPlan):
            raise ValueError(f"{self.name}: plan is {plan!r:.80}; make it with the layer's plan_of, or pass None")
        self._check_tensors(query, key, value)
        self._check_devices((query, key, value), metadata)
        lengths = query.shape[1], key.shape[1]
        if self.way.strategy != "local":
            lengths = self._check_plan(query, key, plan)
        elif self.cuts_rows(metadata) and plan is not None:
            lengths = self._check_held(query, plan), key.shape[1]
        gradient = records_gradient(query, key, value, metadata)
        self._check_metadata(metadata, query, lengths, plan)
        if gradient and self.way.exchange == "fp8":
            rule = "rounding to fp8 has no gradient"
            remedy = "leave parallel.exchange_dtype on same, or call under torch.no_grad()"
            raise FaultError([Fault(f"{self.name}: parallel.exchange_dtype", "fp8", rule, remedy)])
        dtype = str(query.dtype).removeprefix("torch.")
        learned = gradient and any(t is not None and t.requires_grad for t in (metadata.sinks, metadata.bias))
        self.check_asked(self.asked(metadata.features, gradient=gradient, dtype=dtype, lse=lse, learned=learned))

    def asked(
        self,
        features: Features,
        *,
        gradient: bool = False,
        dtype: str | None = None,
        lse: bool = False,
        learned: bool = False,
    ) -> Requirements:
        """What a call with these features asks of the backend."""
        call = self.call
        asked = replace(
            call,
            features=features,
            gradient=gradient,
            dtype=dtype or call.dtype,
            lse=lse,
            learned_gradient=learned,
        )
        return self.required if asked == call else asked.required(self.way)

    def check_asked(self, asked: Requirements) -> None:
        """Raises FaultError, about the role, for what the layer's backend does not take."""
        if asked == self.required:
            return
        remedy = f"choose another backend for {self.role}, or construct the layer with what its calls carry and ask for"
        found = [*self.variant.takes.faults(asked), *self.option_faults(asked)]
        if found:
            raise FaultError(
                replace(fault, key=f"{self.name}: {fault.key}", rule=f"{self.backend}: {fault.rule}", remedy=remedy)
                for fault in found
            )

    def needs_plan(self, metadata: AttentionMetadata) -> bool:
        """Whether a local call with this metadata reads its plan; False for metadata that `check` refuses."""
        return self.shards_rows and wrong_types(metadata) is None and self.cuts_rows(metadata)

    def cuts_rows(self, metadata: AttentionMetadata) -> bool:
        """Whether a local call is told of each row of a sequence of which this rank has some."""
        given = [mask for mask in (metadata.mask, metadata.bias) if mask is not None]
        by_row = metadata.block_mask is not None or any(mask.dim() == 4 and mask.shape[2] > 1 for mask in given)
        return self.shards_rows and (by_row or metadata.packed is not None)

    def _check_tensors(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                given = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)[:80]
                raise ValueError(f"{self.name}: {name} is {given}; give a tensor [B, S, H, D]")
        if query.shape[2:] != (self.call.heads, self.call.head_size):
            raise ValueError(
                f"{self.name}: query is {tuple(query.shape)}; the layer has {self.call.heads} heads of "
                f"{self.call.head_size}"
            )
        expected = (query.shape[0], key.shape[1], self.call.kv_heads, self.call.head_size)
        of_value = (*expected[:3], self.value_head_size)
        if key.shape != expected or value.shape != of_value:
            must = f"both be {expected}" if of_value == expected else f"be {expected} and {of_value}"
            raise ValueError(
                f"{self.name}: key {tuple(key.shape)} and value {tuple(value.shape)} must {must}, as the query is "
                f"{tuple(query.shape)}; give all three of one batch, and K and V of the layer's KV heads"
            )
        if not query.dtype == key.dtype == value.dtype:
            dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}"
            raise ValueError(f"{self.name}: query, key and value must have one dtype, not {dtypes}; cast them to one")

    def _check_devices(self, qkv: QueryKeyValue, metadata: AttentionMetadata) -> None:
        (query, key, value), blocks = qkv, metadata.block_mask
        device = query.device
        for name, tensor in (
            ("key", key),
            ("value", value),
            ("mask", metadata.mask),
            ("bias", metadata.bias),
            ("sinks", metadata.sinks),
            ("block_mask", None if blocks is None else blocks.kv_num_blocks),
        ):
            if tensor is not None and tensor.device != device:
                raise ValueError(
                    f"{self.name}: {name} is on {tensor.device}, and query on {device}; move them to one device"
                )
        if self.way.strategy != "local" and device.type != self.device.type:
            raise ValueError(
                f"{self.name}: query, key and value are on {device}, and the ranks exchange tensors on "
                f"{self.device}; move them there"
            )

    def _check_plan(self, query: torch.Tensor, key: torch.Tensor, plan: ShardPlan | None) -> tuple[int, int]:
        """The numbers of queries and keys of all ranks."""
        if plan is None:
            raise ValueError(
                f"{self.name}: a sharded sequence needs plan=..., which says what rows the other ranks hold; make it "
                "with the layer's plan_of"
            )
        self._check_held(query, plan)
        if plan.num_heads != self.call.heads or plan.heads.num_kv_heads != self.call.kv_heads:
            raise ValueError(
                f"{self.name}: the layer has {self.call.heads} heads and {self.call.kv_heads} KV heads, and the plan "
                f"{plan.num_heads} and {plan.heads.num_kv_heads}; make it with plan_of"
            )
        if (plan.strategy, plan.grid, plan.exchange) != (self.way.strategy, self.way.grid, self.way.exchange):
            raise ValueError(
                f"{self.name}: its calls go by {_way_text(self.way)}, and the plan is for "
                f"{_way_text(Way(plan.strategy, plan.grid, plan.exchange))}; make a plan with the plan_of of this layer"
            )
        if plan.zigzag != self.zigzag:
            kind = {True: "an early and a late piece of the rows", False: "one piece of the rows"}
            raise ValueError(
                f"{self.name}: its plans give each rank {kind[self.zigzag]}, and this one {kind[plan.zigzag]}; make it "
                "with plan_of"
            )
        if key.shape[1] != len(plan.shares[self.rank].key_rows):
            held = len(plan.shares[self.rank].key_rows)
            raise ValueError(f"{self.name}: {key.shape[1]} key rows at hand; the plan gives this rank {held}")
        return plan.query_length, plan.key_length

    def _check_held(self, query: torch.Tensor, plan: ShardPlan) -> int:
        if plan.world_size != self.world_size:
            raise ValueError(
                f"{self.name}: the plan is for {plan.world_size} ranks, and the layer has {self.world_size}; make it "
                "with the layer's plan_of"
            )
        held = len(plan.shares[self.rank].query_rows)
        if query.shape[1] != held:
            raise ValueError(f"{self.name}: {query.shape[1]} query rows at hand; the plan gives this rank {held}")
        return plan.query_length

    def _check_metadata(
        self, metadata: AttentionMetadata, query: torch.Tensor, lengths: tuple[int, int], plan: ShardPlan | None
    ) -> None:
        rows, keys = lengths
        if self.shards_rows and (metadata.window is not None or (self.cuts_rows(metadata) and plan is None)):
            raise ValueError(
                f"{self.name}: {_by_row(metadata)} covers all query rows, and this rank holds some of them; "
                + ("give a mask" if metadata.window is not None else "pass the plan of the queries (plan_of)")
                + ", or use one rank"
            )
        if rows != keys and (self.call.causal or metadata.window is not None):
            kind = "causal attention" if self.call.causal else "a window"
            rule = f"{kind} of {rows} queries to {keys} keys is ambiguous"
            raise ValueError(f"{self.name}: {rule}; tell by a mask which keys each query sees")
        if metadata.mask is not None:
            self._check_mask("mask", metadata.mask, torch.bool, (query.shape[0], rows, keys))
        if metadata.bias is not None:
            self._check_mask("bias", metadata.bias, query.dtype, (query.shape[0], rows, keys))
        if metadata.block_mask is not None:
            self._check_block_mask(metadata, query.shape[0], rows, keys)
        if metadata.sinks is not None and tuple(metadata.sinks.shape) != (self.call.heads,):
            shape = tuple(metadata.sinks.shape)
            raise ValueError(f"{self.name}: sinks are {shape}; they are one for each of {self.call.heads} heads")
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
        if any(length < 0 for length in (*lengths.query, *lengths.key)):
            raise ValueError(f"{self.name}: a document has a negative length: {lengths.query}, {lengths.key}")
        if (self.call.causal or metadata.window is not None) and lengths.query != lengths.key:
            raise ValueError(f"{self.name}: documents with other query than key lengths have no common positions")

    def _check_mask(self, name: str, mask: torch.Tensor, dtype: torch.dtype, call: tuple[int, int, int]) -> None:
        batch, rows, keys = call
        if mask.dtype != dtype or mask.dim() != 4:
            raise ValueError(
                f"{self.name}: a {name} is {dtype}, [B or 1, 1 or H, Sq or 1, Sk], not {mask.dtype} {tuple(mask.shape)}"
            )
        fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, self.call.heads) and mask.shape[2] in (1, rows)
        if not fits or mask.shape[3] != keys:
            raise ValueError(
                f"{self.name}: the {name} is {tuple(mask.shape)}; the call is of batch {batch}, with "
                f"{self.call.heads} heads, {rows} query rows and {keys} keys"
            )

    def _check_block_mask(self, metadata: AttentionMetadata, batch: int, rows: int, keys: int) -> None:
        beside = [name for name in ("mask", "window", "packed") if getattr(metadata, name) is not None]
        if beside or self.call.causal:
            raise ValueError(
                f"{self.name}: a block_mask beside {', '.join(beside) or 'causal attention'}: it says alone who looks "
                "at whom; put the rest into its mask_mod"
            )
        shape = tuple(metadata.block_mask.shape) if metadata.block_mask is not None else ()
        if shape[0] not in (1, batch) or shape[1] not in (1, self.call.heads) or shape[2:] != (rows, keys):
            raise ValueError(
                f"{self.name}: the block_mask is {shape}; the call is of batch {batch}, with {self.call.heads} heads, "
                f"{rows} query rows and {keys} keys"
            )
        if self.way.grid.ring > 1 or self.shards_rows:
            where = str(self.way) if self.way.grid.ring > 1 else "some of the rows"
            raise ValueError(
                f"{self.name}: the blocks of a block_mask cannot be cut for {where}; give a mask, or use "
                "parallel.strategy=ulysses"
            )


def _by_row(metadata: AttentionMetadata) -> str:
    """Names what a call says about each query row."""
    if metadata.window is not None:
        return "a window"
    if metadata.packed is not None:
        return "packed"
    return "the block_mask" if metadata.block_mask is not None else "a mask or bias of each row"


def _way_text(way: Way) -> str:
    return str(way) if way.exchange == "same" else f"{way} in {way.exchange}"


def records_gradient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> bool:
    """Whether a call has a backward pass."""
    learned = [tensor for tensor in (query, key, value, metadata.sinks, metadata.bias) if tensor is not None]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learned)
