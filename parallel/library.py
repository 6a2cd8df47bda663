"""Sequence parallelism for those who bring their own ranks and process groups: no Ray, and no driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
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
from parallel.argument_types import raise_wrong_arguments
from parallel.context import AttentionContext
from parallel.devices import facts_of
from parallel.events import Event, Traffic
from parallel.models import FAMILIES, family_of
from parallel.models.autocast import autocast_dtype
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

    def __init__(self, model: torch.nn.Module, sharded: ShardedModel) -> None:
        self.model = model
        self.context = sharded.context
        self._sharded = sharded

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """This rank's place in the mesh."""
        return self.context.mesh.rank

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has."""
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
        """Give the model back as it was. It may be called twice.

        Process groups that were formed stay for the next call with the same ranks;
        `torch.distributed.destroy_process_group()` ends them.
        """
        self._sharded.remove()
        self.context.close()


def sequence_parallel(
    model: torch.nn.Module,
    mesh: MeshArgument = None,
    *,
    attention: AttentionArgument = None,
    strategy: str | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
    exchange_dtype: str | None = None,
    transport: str | None = None,
    dtype: torch.dtype | None = None,
    control: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    name: str = "transformer",
    denoising: DenoisingTime | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> SequenceParallel:
    """Let the ranks of a mesh share the sequence of a diffusers transformer; every one of them makes the same call.

    The model is changed in place: its forward still takes and returns whole tensors, the same on all ranks, and each
    rank computes its own rows.

    Gradients: with a loss that every rank computes on the whole output, the mean over the ranks of a parameter's
    gradients is its gradient, as with data parallelism.

    Args:
        model: A `WanTransformer3DModel`, or what `torch.compile` returned for one, on this rank's device, with the same
            weights on every rank.
        mesh: A `DeviceMesh` of one dimension, or of two that are named ring and ulysses; a `ProcessGroup`; None for
            the default group.
        attention: Any form that `configs.arguments.attention_settings` reads, such as a backend's name, an
            `AttentionConfig`, or "attention.per_role.self=TORCH_SDPA".
        strategy: As `parallel.strategy`; by default it is chosen.
        ulysses: As `parallel.ulysses`; by default the mesh's degree, or chosen.
        ring: As `parallel.ring`; by default the mesh's degree, or chosen.
        exchange_dtype: As `parallel.exchange_dtype`.
        transport: As `parallel.transport`.
        dtype: The dtype of Q, K and V; by default that of `torch.autocast` if the call is made under it, else the
            model's own.
        control: A gloo group of the same ranks; by default one is formed.
        timeout: The timeout of groups that are formed; None is torch's own.
        name: The model's name in messages and events.
        denoising: The time of the denoising, for options that depend on the step. The caller's loop updates it.
        on_event: Called with what each layer ran (`AttentionRan`), on its first call.

    Returns:
        The handle that gives the model back when it is closed.

    Raises:
        FaultError: For arguments of another type, and for what cannot be served. Whatever is raised, the model is then
            as it was.
    """
    raise_wrong_arguments(
        dtype=dtype, control=control, timeout=timeout, name=name, denoising=denoising, on_event=on_event
    )
    passed, model = model, getattr(model, "_orig_mod", model)  # torch.compile returns a wrapper
    class_name = _class_name(model)
    _refuse_wired(model)
    family = family_of({"_class_name": class_name})
    facts = family.describe(model.config)
    given = {
        "strategy": strategy,
        "ulysses": ulysses,
        "ring": ring,
        "exchange_dtype": exchange_dtype,
        "transport": transport,
    }
    config, parallel = library_settings(attention, given)
    faults = name_faults(config, {name: facts}, Registry(config.register))
    if faults:
        raise FaultError(faults)
    device = _device_of(model)
    adopted = adopt(mesh, device=device, control=control, timeout=timeout, transport=parallel.transport)
    parallel = _with_degrees(parallel, adopted)
    if dtype is None:
        dtype = autocast_dtype(device.type) or _dtype_of(model)
    context = _context(adopted, config, parallel, dtype, on_event)
    with ExitStack() as undo:
        undo.callback(context.close)
        context = replace(context, calibrations={name: facts.calibration}, denoising=denoising)
        shared = SequenceParallel(passed, family.wire(model, context, name))
        undo.pop_all()
    return shared


def attention_context_of(
    mesh: MeshArgument = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    attention: AttentionArgument = None,
    strategy: str | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
    exchange_dtype: str | None = None,
    transport: str | None = None,
    control: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> AttentionContext:
    """Make what `Attention` layers of a model of one's own need, on the ranks of a mesh; every one of them calls it.

    Give it to the layers, or construct them inside `with attention_context(context):`. Call its `close()` when the
    layers are gone. Process groups that were formed stay for the next call with the same ranks;
    `torch.distributed.destroy_process_group()` ends them.

    Args:
        mesh: As in `sequence_parallel`.
        dtype: The dtype of Q, K and V.
        device: Where this rank's tensors live; by default the current GPU if the group serves GPUs, else the CPU.
        attention: As in `sequence_parallel`.
        strategy: As in `sequence_parallel`.
        ulysses: As in `sequence_parallel`.
        ring: As in `sequence_parallel`.
        exchange_dtype: As in `sequence_parallel`.
        transport: As in `sequence_parallel`.
        control: As in `sequence_parallel`.
        timeout: As in `sequence_parallel`.
        on_event: As in `sequence_parallel`.

    Returns:
        The context of this rank's layers.

    Raises:
        FaultError: For arguments of another type, and for groups and settings that cannot be used.
    """
    if dtype is None:
        raise FaultError([Fault("dtype", None, "it is missing", "pass a torch.dtype, such as torch.bfloat16")])
    raise_wrong_arguments(dtype=dtype, control=control, timeout=timeout, on_event=on_event)
    given = {
        "strategy": strategy,
        "ulysses": ulysses,
        "ring": ring,
        "exchange_dtype": exchange_dtype,
        "transport": transport,
    }
    config, parallel = library_settings(attention, given)
    adopted = adopt(mesh, device=device, control=control, timeout=timeout, transport=parallel.transport)
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
    facts = facts_of(adopted.mesh.device, registry)
    return AttentionContext(
        mesh=adopted.mesh,
        transport=open_transport(parallel, adopted.mesh),
        registry=registry,
        config=attention,
        device=facts,
        dtype=str(dtype).removeprefix("torch."),
        emit=_ignore if on_event is None else on_event,
        parallel=parallel,
    )


def _ignore(event: Event) -> None:
    """The observer of a caller that passes none."""


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
    # The hooks tell, as the caller may have replaced the attention processors since.
    if any(isinstance(getattr(hook, "__self__", None), ShardedModel) for hook in model._forward_pre_hooks.values()):
        rule = "its sequence is shared already"
        remedy = "call close() of what sequence_parallel returned, or leave its with block, first"
        raise FaultError([Fault("model", type(model).__name__, rule, remedy)])
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
