"""Ranks that are in other numbers of process groups would wait for each other forever: they are refused instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import raylysses
from configs.faults import FaultError
from parallel.mesh import Mesh
from tests.ranks import Ranks

pytestmark = pytest.mark.ray

Build = Callable[[], Any]


def square() -> Any:
    """A ring of Ulysses groups, over all ranks."""
    context = raylysses.attention_context_of(dtype=torch.float64, attention="REFERENCE", ulysses=2)
    return raylysses.Attention(4, 8, role="self", kind="self", context=context)


def part() -> Any:
    """A group of some ranks, which needs a control group."""
    return raylysses.attention_context_of(_pair(), dtype=torch.float64)


def square_of_a_larger_world() -> Any:
    """A mesh of two dimensions over the first 4 of 6 ranks."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("ring", "ulysses"), _init_backend=True)
    return None if dist.get_rank() > 3 else raylysses.attention_context_of(mesh, dtype=torch.float64)


def _pair() -> dist.ProcessGroup:
    """Of neighbours, made by all ranks, so that every rank is in as many groups."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "sp"))
    return mesh.get_group("sp")


BUILDS: dict[str, tuple[Build, int]] = {
    "square": (square, 6),
    "square of a larger world": (square_of_a_larger_world, 4),
    "part": (part, 2),
}
"""With how many ranks depend on the first one. In this order: afterwards ranks are in other numbers of groups."""


@pytest.fixture(scope="module")
def six_ranks(ray_cluster: None) -> Iterator[Ranks]:
    """Ranks of their own, as they keep their groups."""
    ranks = Ranks(6, cpus=0)
    yield ranks
    ranks.close()


def refused(mesh: Mesh, name: str) -> list[str]:
    """What a rank is told while the first one is in a group more, and then."""
    build, found = BUILDS[name][0], []
    extra = dist.new_group([0], use_local_synchronization=True) if mesh.rank == 0 else None
    try:
        found.append(_told(build))
    finally:
        if extra is not None:
            dist.destroy_process_group(extra)
    return [*found, _told(build)]


def _told(build: Build) -> str:
    try:
        build()
    except FaultError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", BUILDS)
def test_ranks_in_other_numbers_of_groups_are_refused_on_every_rank(six_ranks: Ranks, name: str) -> None:
    for rank, (first, then) in enumerate(six_ranks.run(refused, name)):
        if rank < BUILDS[name][1]:
            assert first.startswith("mesh: torch names a group of some ranks by how many groups each of them is in, ")
            assert "and rank 0 is in " in first
            assert "; make the same calls of torch.distributed.new_group on all of these ranks, or pass" in first
        else:
            assert first == ""
        assert then == ""
