"""The mesh of a rank whose process groups somebody else has made: torchrun, Ray, or a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from configs.faults import Fault, FaultError
from parallel.grid import Grid
from parallel.mesh import GridGroups, Mesh, check_group_counts, form_group
from parallel.transport.guard import exchange

MeshArgument = DeviceMesh | dist.ProcessGroup | None
AXES = ("ring", "ulysses")


@dataclass(frozen=True)
class Adopted:
    """mesh: over the groups at hand. ulysses, ring: the degrees that they come with; None if they leave it open.
    made: groups that were formed here, and are to be destroyed with it.
    """

    mesh: Mesh
    ulysses: int | None = None
    ring: int | None = None
    made: tuple[dist.ProcessGroup, ...] = ()


def adopt(
    mesh: MeshArgument = None,
    *,
    device: torch.device | str | None = None,
    control: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> Adopted:
    """The mesh of the caller's ranks; every one of them has to make the call.

    mesh: a `DeviceMesh` of one dimension, or of two, ring x ulysses; a `ProcessGroup`; or None for the default group.
    device: where this rank's tensors live; by default the current GPU if the group serves GPUs, else the CPU.
    control: a gloo group of the same ranks for small facts; without it one is formed. timeout: of what is formed here.

    Raises FaultError for groups that cannot be used.
    """
    if not dist.is_initialized():
        rule = "this process is in no process group"
        raise FaultError([Fault("mesh", None, rule, "call torch.distributed.init_process_group() first")])
    group, ulysses, ring = _of_mesh(mesh, timeout) if isinstance(mesh, DeviceMesh) else (_group(mesh), None, None)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        rule = f"rank {dist.get_rank()} is not in it"
        raise FaultError([Fault("mesh", _text(mesh), rule, "make the call on the ranks of the group only")])
    here = _device(group, device)
    if world_size == 1:
        return Adopted(Mesh(rank, world_size, here), ulysses, ring)
    made: tuple[dist.ProcessGroup, ...] = ()
    if control is None:
        control = _form_control(group, timeout)
        # torch names a group after its ranks unless all take part: a second one of that name would meet the first one's
        # addresses, so such a group stays until the process leaves torch.distributed.
        made = (control,) if world_size == dist.get_world_size() else ()
    else:
        _check_control(control, group)
    adopted = Mesh(rank, world_size, here, group, control, timeout)
    if isinstance(mesh, DeviceMesh) and ulysses and ring and ulysses > 1 and ring > 1:
        adopted.adopt(Grid(ulysses, ring), GridGroups(mesh.get_group(1), mesh.get_group(0)))
    return Adopted(adopted, ulysses, ring, made)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, dist.ProcessGroup):
        rule = "it is no DeviceMesh and no ProcessGroup of which this rank is a member"
        raise FaultError([Fault("mesh", _text(group), rule, "pass one of these, or None for the default group")])
    return group


def _of_mesh(mesh: DeviceMesh, timeout: timedelta | None) -> tuple[dist.ProcessGroup, int | None, int | None]:
    """The group of all ranks of a mesh, and its degrees."""
    names, sizes = mesh.mesh_dim_names, tuple(mesh.shape)
    if len(sizes) == 1:
        ring, ulysses = ((sizes[0] if names == (axis,) else None) for axis in AXES)
        return mesh.get_group(), ulysses, ring
    text = f"{'x'.join(map(str, sizes))} {names or ''}".strip()
    if len(sizes) != 2 or names not in (None, AXES):
        rule = "a mesh is of one dimension, or of two that are named ring and ulysses, in that order"
        remedy = "pass the dimensions of the sequence, as in mesh['ring', 'ulysses'] or mesh['sp']"
        raise FaultError([Fault("mesh", text, rule, remedy)])
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        rule = f"its ranks {ranks} are not in ascending order, and a process group of torch is"
        raise FaultError([Fault("mesh", text, rule, "make it with torch.distributed.init_device_mesh")])
    ring, ulysses = sizes[0], sizes[1]
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD, ulysses, ring  # type: ignore[return-value]
    check_group_counts(ranks, mesh.get_group(1), mesh.get_group(0))
    return form_group(ranks, dist.get_backend_config(mesh.get_group(1)), timeout), ulysses, ring


def _form_control(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A gloo group of the same ranks. Raises FaultError if it could not be formed."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        check_group_counts(ranks, group)
        return form_group(ranks, "gloo", timeout)
    with exchange("forming a process group"):
        whole: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend="gloo")
    return whole


def _device(group: dist.ProcessGroup, asked: torch.device | str | None) -> torch.device:
    """Where the tensors live. Raises FaultError if the group moves no tensors of that device."""
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    served = {name for name, backend in pairs if name == "cpu" or backend != "gloo"}  # gloo exchanges on the host
    if asked is None:
        on_gpu = torch.cuda.is_available() and "cuda" in served
        asked = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    device = torch.device(asked)
    if device.type not in served:
        rule = f"the group moves tensors of {', '.join(sorted(served))} only"
        remedy = 'init_process_group("cpu:gloo,cuda:nccl") serves both'
        raise FaultError([Fault("device", str(device), rule, remedy)])
    return device


def _check_control(control: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    member = isinstance(control, dist.ProcessGroup) and dist.get_rank(control) >= 0
    wanted = dist.get_process_group_ranks(group)
    if not member or dist.get_process_group_ranks(control) != wanted:
        rule = f"it must be of the ranks {wanted}"
    elif "cpu:gloo" not in dist.get_backend_config(control):
        rule = f"it is over {dist.get_backend_config(control)}, and facts of the host need gloo"
    else:
        return
    raise FaultError([Fault("control", None, rule, "leave it out, and one is formed")])


def _text(mesh: object) -> str:
    return type(mesh).__name__
