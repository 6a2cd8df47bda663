"""The ranks of a run and their process groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from parallel.plan import Grid


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

    def groups(self, grid: Grid) -> GridGroups:
        """The groups of a grid. The first call for a grid that has both degrees forms them: every rank has to make it,
        and in the same order (layers do, when they are constructed).
        """
        if grid not in self._grids:
            self._grids[grid] = self._form(grid)
        return self._grids[grid]

    def _form(self, grid: Grid) -> GridGroups:
        if self.data is None or grid.ring == 1 or grid.ulysses == 1:
            return GridGroups(self.data if grid.ring == 1 else None, self.data if grid.ulysses == 1 else None)
        return GridGroups(self._subgroup(grid.ulysses_group(self.rank)), self._subgroup(grid.ring_group(self.rank)))

    def _subgroup(self, ranks: range) -> dist.ProcessGroup:
        of_world = [dist.get_global_rank(self.data, rank) for rank in ranks]  # type: ignore[arg-type]
        backend = dist.get_backend(self.data)
        group: dist.ProcessGroup = dist.new_group(
            of_world, timeout=self.timeout, backend=backend, use_local_synchronization=True
        )
        return group


def open_mesh(store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Mesh:
    """Form the groups of all ranks over a store that one of them keeps; blocks until all have joined."""
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        return Mesh(rank, world_size, device)
    backend = "gloo" if device.type == "cpu" else "nccl"
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
