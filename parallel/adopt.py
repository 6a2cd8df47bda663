"""The mesh of a rank whose process groups somebody else has made: torchrun, Ray, or a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from configs.faults import Fault, FaultError
from configs.schema import AUTO
from parallel.grid import Grid
from parallel.mesh import GridGroups, Mesh, shared_groups, shared_world_group
from parallel.transport.choice import check_transport

MeshArgument = DeviceMesh | dist.ProcessGroup | None
AXES = ("ring", "ulysses")


@dataclass(frozen=True)
class Adopted:
    """The mesh over the caller's groups, and the degrees that they come with.

    ulysses, ring: None where the groups leave the degree open.
    """

    mesh: Mesh
    ulysses: int | None = None
    ring: int | None = None


def adopt(
    mesh: MeshArgument = None,
    *,
    device: torch.device | str | None = None,
    control: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    transport: str = AUTO,
) -> Adopted:
    """Make a mesh of the caller's ranks; every one of them has to make the call.

    Groups that are formed here are kept for the next call with the same ranks, backend and timeout, until
    `torch.distributed.destroy_process_group()`.

    Args:
        mesh: A `DeviceMesh` of one dimension, or of two, ring x ulysses; a `ProcessGroup`; or None for the default
            group.
        device: Where this rank's tensors live; by default the current GPU if the group serves GPUs, else the CPU.
        control: A gloo group of the same ranks for small facts; without it one is formed.
        timeout: The timeout of groups that are formed.
        transport: As `parallel.transport`.

    Returns:
        The mesh, and the degrees of the groups.

    Raises:
        FaultError: For groups, a device or a transport that cannot be used; no group was formed then.
    """
    if not dist.is_initialized():
        rule = "this process is in no process group"
        raise FaultError([Fault("mesh", None, rule, "call torch.distributed.init_process_group() first")])
    if isinstance(mesh, DeviceMesh):
        _check_mesh(mesh)
        group = mesh.get_group(mesh.ndim - 1)
    else:
        group = _group(mesh)
    if dist.get_rank(group) < 0:
        rule = f"rank {dist.get_rank()} is not in it"
        raise FaultError([Fault("mesh", _text(mesh), rule, "make the call on the ranks of the group only")])
    here = _device(group, device)
    ranks = dist.get_process_group_ranks(group)
    if isinstance(mesh, DeviceMesh):
        ranks = mesh.mesh.flatten().tolist()
    if control is not None and len(ranks) > 1:
        _check_control(control, ranks)
    if len(ranks) > 1:
        check_transport(transport, here)
    ulysses = ring = None
    if isinstance(mesh, DeviceMesh):
        group, ulysses, ring = _of_mesh(mesh, timeout)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1:
        return Adopted(Mesh(rank, world_size, here), ulysses, ring)
    if control is None:
        control = _control_of(group, timeout)
    adopted = Mesh(rank, world_size, here, group, control, timeout)
    if isinstance(mesh, DeviceMesh) and ulysses and ring and ulysses > 1 and ring > 1:
        adopted.adopt(Grid(ulysses, ring), GridGroups(mesh.get_group(1), mesh.get_group(0)))
    return Adopted(adopted, ulysses, ring)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, dist.ProcessGroup):
        rule = "expected a DeviceMesh or a ProcessGroup that contains this rank"
        raise FaultError([Fault("mesh", _text(group), rule, "pass one of these, or None for the default group")])
    return group


def _check_mesh(mesh: DeviceMesh) -> None:
    """Raises FaultError for dimensions that are not those of a sequence."""
    names, sizes = mesh.mesh_dim_names, tuple(mesh.shape)
    if len(sizes) == 1:
        return
    text = f"{'x'.join(map(str, sizes))} {names or ''}".strip()
    if len(sizes) != 2 or names not in (None, AXES):
        rule = "a mesh is of one dimension, or of two that are named ring and ulysses, in that order"
        remedy = "pass the dimensions of the sequence, as in mesh['ring', 'ulysses'] or mesh['sp']"
        raise FaultError([Fault("mesh", text, rule, remedy)])
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        rule = f"its ranks {ranks} are not in ascending order, and a process group of torch is"
        raise FaultError([Fault("mesh", text, rule, "make it with torch.distributed.init_device_mesh")])


def _of_mesh(mesh: DeviceMesh, timeout: timedelta | None) -> tuple[dist.ProcessGroup, int | None, int | None]:
    """The group of all ranks of a mesh, and its degrees."""
    names, sizes = mesh.mesh_dim_names, tuple(mesh.shape)
    if len(sizes) == 1:
        ring, ulysses = ((sizes[0] if names == (axis,) else None) for axis in AXES)
        return mesh.get_group(), ulysses, ring
    ring, ulysses = sizes
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD, ulysses, ring  # type: ignore[return-value]
    row, column = mesh.get_group(1), mesh.get_group(0)
    (whole,) = shared_groups(ranks, [ranks], dist.get_backend_config(row), timeout, row, column)
    return whole, ulysses, ring


def _control_of(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A gloo group of the same ranks. Raises FaultError if it could not be formed."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return shared_world_group("gloo", timeout)
    (control,) = shared_groups(ranks, [ranks], "gloo", timeout, group)
    return control


def _device(group: dist.ProcessGroup, asked: torch.device | str | None) -> torch.device:
    """Where the tensors live. Raises FaultError if the group moves no tensors of that device."""
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    served = {name for name, backend in pairs if name == "cpu" or backend != "gloo"}  # gloo exchanges on the host
    if asked is None:
        on_gpu = torch.cuda.is_available() and "cuda" in served
        asked = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        rule = "torch knows no such device"
        raise FaultError([Fault("device", asked, rule, 'give one such as "cuda:0" or "cpu"')]) from error
    if device.type not in served:
        rule = f"the group moves tensors of {', '.join(sorted(served))} only"
        remedy = 'init_process_group("cpu:gloo,cuda:nccl") serves both'
        raise FaultError([Fault("device", str(device), rule, remedy)])
    return device


def _check_control(control: dist.ProcessGroup, wanted: list[int]) -> None:
    member = isinstance(control, dist.ProcessGroup) and dist.get_rank(control) >= 0
    if not member or dist.get_process_group_ranks(control) != wanted:
        rule = f"it must be of the ranks {wanted}"
    elif "cpu:gloo" not in dist.get_backend_config(control):
        rule = f"it is over {dist.get_backend_config(control)}, and facts of the host need gloo"
    else:
        return
    raise FaultError([Fault("control", None, rule, "leave it out, and one is formed")])


def _text(mesh: object) -> str:
    return type(mesh).__name__
