"""The ranks of a run and their process groups."""

from __future__ import annotations

import atexit
import weakref
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
        and in the same order (layers do, when they are constructed). Raises FaultError as `check_group_counts`.
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
        check_group_counts(dist.get_process_group_ranks(self.data), self.control or self.data)
        return GridGroups(self._subgroup(grid.ulysses_group(self.rank)), self._subgroup(grid.ring_group(self.rank)))

    def _subgroup(self, ranks: range) -> dist.ProcessGroup:
        of_world = [dist.get_global_rank(self.data, rank) for rank in ranks]  # type: ignore[arg-type]
        return form_group(of_world, dist.get_backend(self.data), self.timeout)


def form_group(ranks: list[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of some of the world's ranks, without the others. Call `check_group_counts` before."""
    with exchange("forming a process group"):
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )
    return group


def check_group_counts(ranks: list[int], *groups: dist.ProcessGroup) -> None:
    """Before these ranks of the world form a group without the others, or some of them do: torch (2.13) names it by how
    many groups a rank is in, and ranks that have other names for it wait for each other until they time out.

    groups: by which the ranks tell each other: one of all of them, or a row and then a column of their mesh. Raises
    FaultError, on all of these ranks, if they are in other numbers of groups. One exchange over each group.
    """
    counts = [len(_world.pg_names)]
    for group in groups:
        gathered = [counts] * dist.get_world_size(group)
        with exchange("the comparison of process groups"):
            dist.all_gather_object(gathered, counts, group=group)
        counts = [count for part in gathered for count in part]
    if len(set(counts)) > 1:
        told = ", ".join(f"rank {rank} is in {count}" for rank, count in zip(ranks, counts, strict=True))
        rule = f"torch names a group of some ranks by how many groups each of them is in, and {told}"
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
