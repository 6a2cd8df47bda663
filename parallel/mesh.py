"""The ranks of a run and their process groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store


@dataclass(frozen=True)
class Mesh:
    """This rank's place and groups.

    device: where its tensors live. data: carries activations (gloo on CPU, NCCL on GPU). control: gloo, host side,
    for small facts. Both are None for a single rank.
    """

    rank: int
    world_size: int
    device: torch.device
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None


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
    return Mesh(rank, world_size, device, data, control)
