"""Sequence parallelism for those who bring their own ranks and process groups: no Ray, and no driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from backends.layer_facts import DenoisingTime
from backends.registry import Registry
from backends.selection import Selection
from configs.arguments import AttentionArgument, library_settings
from configs.faults import Fault, FaultError
from configs.schema import AttentionConfig, ParallelConfig
from parallel.adopt import Adopted, MeshArgument, adopt
from parallel.context import AttentionContext
from parallel.devices import facts_of
from parallel.events import Event, Traffic
from parallel.models import FAMILIES, family_of
from parallel.models.names import name_faults
from parallel.models.sharding import ShardedModel
from parallel.planner import Way
from parallel.transport.choice import open_transport

BY_HAND = "or build its attention of raylysses.Attention layers, with a context of raylysses.attention_context_of"


@dataclass(frozen=True)
class Served:
    """What the layers of one role got. way: the strategy and its grid."""

    selection: Selection
    way: Way
    layers: int

    def __str__(self) -> str:
        chosen = self.selection
        return f"{chosen.role}: {chosen.backend}/{chosen.variant}, {self.way}, {self.layers} layers"


@dataclass(frozen=True)
class Moved:
    """What this rank sent in some forwards. planned: as the shard plans have it, without backward passes and
    recomputation; measured: as the transport counted it.
    """

    forwards: int
    planned: Traffic
    measured: Traffic


class SequenceParallel:
    """A model that runs on all ranks of a mesh, as `sequence_parallel` makes it. Leaving its context closes it."""

    def __init__(self, sharded: ShardedModel, made: tuple[dist.ProcessGroup, ...]) -> None:
        self.model = sharded.model
        self.context = sharded.context
        self._sharded = sharded
        self._made = made

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def rank(self) -> int:
        return self.context.mesh.rank

    @property
    def world_size(self) -> int:
        return self.context.mesh.world_size

    def selections(self) -> tuple[Served, ...]:
        """What every role got on this rank, and how many layers have it."""
        counted = Counter((layer.selection, layer.way) for layer in self._sharded.attention_layers())
        return tuple(Served(selection, way, layers) for (selection, way), layers in counted.items())

    def traffic(self) -> Moved:
        """What this rank sent since the last call of this method."""
        planned, forwards = self._sharded.take_planned()
        return Moved(forwards, planned, self.context.transport.take_traffic())

    def close(self) -> None:
        """Give the model back as it was, and destroy the control group if it was formed for it; every rank has to make
        the call. It may be called twice.
        """
        self._sharded.remove()
        while self._made:
            *rest, group = self._made
            dist.destroy_process_group(group)
            self._made = tuple(rest)


def sequence_parallel(
    model: torch.nn.Module,
    mesh: MeshArgument = None,
    *,
    attention: AttentionArgument = None,
    strategy: str | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
    dtype: torch.dtype | None = None,
    control: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    name: str = "transformer",
    denoising: DenoisingTime | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> SequenceParallel:
    """Let the ranks of a mesh share the sequence of a diffusers transformer; every one of them makes the same call.

    model: a `WanTransformer3DModel` on this rank's device, with the same weights on every rank. It is changed in place:
    its forward still takes and returns whole tensors, the same on all ranks, and each rank computes its own rows.

    mesh: a `DeviceMesh` of one dimension, or of two that are named ring and ulysses; a `ProcessGroup`; None for the
    default group. attention: any form that `configs.arguments.attention_settings` reads, such as a backend's name, an
    `AttentionConfig`, or "attention.per_role.self=TORCH_SDPA". strategy, ulysses, ring: as `parallel.strategy` and its
    degrees; by default they are the mesh's, or chosen. dtype: of the activations; the model's own by default. control:
    a gloo group of the same ranks, formed if there is none; timeout: of groups that are formed. name: of the model, in
    messages and events. denoising: for options that depend on the step, which the caller's loop tells it. on_event: is
    told what each layer ran (`AttentionRan`), on its first call.

    Gradients: with a loss that every rank computes on the whole output, the mean over the ranks of a parameter's
    gradients is its gradient, as with data parallelism.

    Raises FaultError for what cannot be served; the model is then as it was.
    """
    _refuse_wired(model)
    family = family_of({"_class_name": _class_name(model)})
    facts = family.describe(model.config)
    config, parallel = library_settings(attention, {"strategy": strategy, "ulysses": ulysses, "ring": ring})
    faults = name_faults(config, {name: facts}, Registry(config.register))
    if faults:
        raise FaultError(faults)
    adopted = adopt(mesh, device=_device_of(model), control=control, timeout=timeout)
    try:
        parallel = _with_degrees(parallel, adopted)
        context = _context(adopted, config, parallel, _dtype_of(model) if dtype is None else dtype, on_event)
        context = replace(context, calibrations={name: facts.calibration}, denoising=denoising)
        return SequenceParallel(family.wire(model, context, name), adopted.made)
    except FaultError:
        for group in adopted.made:
            dist.destroy_process_group(group)
        raise


def attention_context_of(
    mesh: MeshArgument = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    attention: AttentionArgument = None,
    strategy: str | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
    control: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> AttentionContext:
    """What `Attention` layers of a model of one's own need, on the ranks of a mesh; every one of them makes the call.

    Give it to the layers, or construct them inside `with attention_context(context):`. dtype: of the activations.
    device: of this rank's tensors; by default the current GPU if the group serves GPUs, else the CPU. The rest is as in
    `sequence_parallel`. Its control group is there for the layers' owner, and lasts until
    `torch.distributed.destroy_process_group()`. Raises FaultError for groups and settings that cannot be used.
    """
    config, parallel = library_settings(attention, {"strategy": strategy, "ulysses": ulysses, "ring": ring})
    adopted = adopt(mesh, device=device, control=control, timeout=timeout)
    return _context(adopted, config, _with_degrees(parallel, adopted), dtype, on_event)


def _with_degrees(parallel: ParallelConfig, adopted: Adopted) -> ParallelConfig:
    """The degrees that are asked for, and those of the mesh. Raises FaultError if they differ."""
    for name, degree in (("ulysses", adopted.ulysses), ("ring", adopted.ring)):
        given = getattr(parallel, name)
        if degree is not None and given not in (None, degree):
            rule = f"the mesh has {degree} places along {name}"
            raise FaultError([Fault(f"parallel.{name}", given, rule, "leave it out, or pass another mesh")])
    return replace(parallel, ulysses=parallel.ulysses or adopted.ulysses, ring=parallel.ring or adopted.ring)


def _context(
    adopted: Adopted,
    attention: AttentionConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    on_event: Callable[[Event], None] | None,
) -> AttentionContext:
    registry = Registry(attention.register)
    return AttentionContext(
        mesh=adopted.mesh,
        transport=open_transport(parallel, adopted.mesh),
        registry=registry,
        config=attention,
        device=facts_of(adopted.mesh.device, registry),
        dtype=str(dtype).removeprefix("torch."),
        emit=_ignore if on_event is None else on_event,
        parallel=parallel,
    )


def _ignore(event: Event) -> None:
    """Nobody wants to know."""


def _class_name(model: torch.nn.Module) -> str:
    """The name of the family's class that the model is an instance of (FSDP makes subclasses). Raises FaultError."""
    for base in type(model).__mro__:
        if base.__name__ in FAMILIES:
            return base.__name__
    known = tuple(FAMILIES)
    rule = f"that class is not known; known are {', '.join(known)}"
    remedy = f"pass one of these (what a wrapper such as DistributedDataParallel holds, not the wrapper), {BY_HAND}"
    raise FaultError([Fault("model", type(model).__name__, rule, remedy, known)])


def _refuse_wired(model: Any) -> None:
    processors = getattr(model, "attn_processors", {})
    if any(isinstance(getattr(each, "sharded", None), ShardedModel) for each in processors.values()):
        rule = "its sequence is shared already"
        raise FaultError([Fault("model", type(model).__name__, rule, "close() the earlier one first")])
    if getattr(model, "_parallel_config", None) is not None:
        rule = "diffusers' own context parallelism is on"
        raise FaultError([Fault("model", type(model).__name__, rule, "load it without enable_parallelism()")])


def _device_of(model: torch.nn.Module) -> torch.device:
    """Where all parameters are. Raises FaultError if they are in several places."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1:
        rule = f"its parameters are on {', '.join(devices)}"
        raise FaultError([Fault("model", type(model).__name__, rule, "move it to this rank's device")])
    return torch.device(devices[0])


def _dtype_of(model: Any) -> torch.dtype:
    """Of the activations: the library keeps some modules of a 16-bit model in fp32, and knows which."""
    dtype: torch.dtype = model.dtype
    return dtype
