"""The ranks of a run and their process groups."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _world

from configs.faults import Fault, FaultError
from parallel.plan import Grid
from parallel.transport.guard import exchange


@dataclass(frozen=True)
class GridGroups:
    """The groups that a rank belongs to on a grid; None for one of a single rank."""

    ulysses: dist.ProcessGroup | None
    ring: dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """This rank's place and groups.

    device: where its tensors live. data: carries activations (gloo on CPU, NCCL on GPU). control: gloo, host side,
    for small facts. Both are None for a single rank. timeout: of groups that are formed later; None is torch's own.
    """

    rank: int
    world_size: int
    device: torch.device
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    _grids: dict[Grid, GridGroups] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.data is not None or self.control is not None:
            # A gloo group that outlives Python ends the process with SIGABRT when one of its threads asks for the lock
            # of the interpreter (torch 2.13), and destroy_process_group lets go of torch's own references alone.
            atexit.register(_let_go, weakref.ref(self))

    def groups(self, grid: Grid) -> GridGroups:
        """The groups of a grid. The first call for a grid that has both degrees forms them: every rank has to make it,
        and in the same order (layers do, when they are constructed). Raises FaultError as `shared_groups`.
        """
        if grid not in self._grids:
            self._grids[grid] = self._form(grid)
        return self._grids[grid]

    def adopt(self, grid: Grid, groups: GridGroups) -> None:
        """Take groups that are there already for those of a grid."""
        self._grids[grid] = groups

    def _form(self, grid: Grid) -> GridGroups:
        if self.data is None or grid.ring == 1 or grid.ulysses == 1:
            return GridGroups(self.data if grid.ring == 1 else None, self.data if grid.ulysses == 1 else None)
        parent = dist.get_process_group_ranks(self.data)
        parts = [[parent[rank] for rank in part(self.rank)] for part in (grid.ulysses_group, grid.ring_group)]
        backend = dist.get_backend(self.data)
        return GridGroups(*shared_groups(parent, parts, backend, self.timeout, self.control or self.data))


def shared_groups(
    parent: Sequence[int],
    parts: Sequence[Sequence[int]],
    backend: str,
    timeout: timedelta | None,
    *over: dist.ProcessGroup,
) -> list[dist.ProcessGroup]:
    """Return this rank's groups of some of the world's ranks, formed by the first call and reused by later ones.

    torch (2.13) names such a group after its ranks and the number of groups that a rank is in. A group that is
    destroyed and formed again has the same name, and its ranks read the addresses of the first one from the store.
    So these groups are kept until `torch.distributed.destroy_process_group()`.

    Args:
        parent: The world's ranks that make this call together.
        parts: The ranks of each group that this rank is in.
        backend: The backend of the groups.
        timeout: The timeout of the groups; None is torch's own.
        over: Groups by which the ranks of `parent` compare how many groups they are in: one of all of them, or a row
            and then a column of their mesh.

    Returns:
        The groups, in the order of `parts`.

    Raises:
        FaultError: On all ranks of `parent`, if they are in different numbers of groups, or if only some of them have
            the groups already.
    """
    description = _description(parent, backend, timeout)
    groups = [_find(description, part) for part in parts]
    _check_groups(parent, sum(group is not None for group in groups), *over)
    with exchange("forming a process group"):
        return [
            group
            or dist.new_group(
                list(part), timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=description
            )
            for group, part in zip(groups, parts, strict=True)
        ]


def shared_world_group(backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a group of all ranks, formed by the first call and reused by later ones; every rank makes the call."""
    ranks = list(range(dist.get_world_size()))
    description = _description(ranks, backend, timeout)
    with exchange("forming a process group"):
        group: dist.ProcessGroup = _find(description, ranks) or dist.new_group(
            ranks, timeout=timeout, backend=backend, group_desc=description
        )
    return group


def _description(parent: Sequence[int], backend: str, timeout: timedelta | None) -> str:
    seconds = "the default" if timeout is None else f"{timeout.total_seconds():g} s"
    return f"raylysses: {backend} of ranks {','.join(map(str, parent))}, timeout {seconds}"


def _find(description: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Find a group that was formed here and not destroyed; torch's own table knows it."""
    for group in _world.pg_map:
        if group.group_desc == description and dist.get_process_group_ranks(group) == list(ranks):
            return group
    return None


def _check_groups(ranks: Sequence[int], formed: int, *over: dist.ProcessGroup) -> None:
    """Compare how many groups each rank is in, as torch names a group of some ranks by that number.

    Ranks that have different names for a group wait for each other until they time out.

    Args:
        ranks: The world's ranks that make this call, in the order of `over`.
        formed: How many of the groups in question this rank has already.
        over: As in `shared_groups`.

    Raises:
        FaultError: On all ranks, if they differ.
    """
    counts = [(len(_world.pg_names), formed)]
    for group in over:
        gathered = [counts] * dist.get_world_size(group)
        with exchange("the comparison of process groups"):
            dist.all_gather_object(gathered, counts, group=group)
        counts = [count for part in gathered for count in part]
    if len(set(counts)) > 1:
        listed = ", ".join(f"rank {rank} is in {count}" for rank, (count, _) in zip(ranks, counts, strict=True))
        rule = f"torch names a group of some ranks by how many groups each of them is in, and {listed}"
        remedy = (
            "make the same calls of torch.distributed.new_group on all of these ranks, or pass groups that are there "
            "(control=..., and a DeviceMesh of ring x ulysses over the whole default group)"
        )
        raise FaultError([Fault("mesh", None, rule, remedy)])


def _let_go(mesh: weakref.ref[Mesh]) -> None:
    """Of the groups, if the mesh is still there."""
    here = mesh()
    if here is not None:
        here._grids.clear()
        object.__setattr__(here, "data", None)
        object.__setattr__(here, "control", None)


def open_mesh(store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Mesh:
    """Form the groups of all ranks over a store that one of them keeps; blocks until all have joined."""
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        return Mesh(rank, world_size, device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    with exchange("joining the group"):
        dist.init_process_group(
            backend,
            store=PrefixStore("data", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
        data = dist.group.WORLD
        # Facts of a forward must not wait for the device, so they have a host-side group of their own.
        control = dist.new_group(backend="gloo", timeout=timeout)
    return Mesh(rank, world_size, device, data, control, timeout)
