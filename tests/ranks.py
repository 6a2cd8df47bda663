"""Live gloo ranks for tests: Ray actors that stay up between cases and run any importable function on their mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from parallel.mesh import Mesh


class _RankActor:
    """One gloo rank. Functions get its mesh first, then the arguments."""

    def open_store(self) -> int:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self.store.port)

    def join(self, port: int, rank: int, world_size: int, timeout_s: float, ranks_per_gpu: int) -> None:
        import torch
        from torch.distributed import TCPStore

        from parallel.mesh import open_mesh

        if ranks_per_gpu > 1:  # NCCL refuses two ranks of one host on one GPU; other hosts it reaches by sockets
            os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        device = torch.device("cuda:0" if ranks_per_gpu else "cpu")
        if not hasattr(self, "store"):
            self.store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.mesh: Mesh = open_mesh(self.store, rank, world_size, device, timeout_s)
        self.meshes: dict[int, Mesh] = {}

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(self.mesh, *arguments)

    def form(self, size: int) -> None:
        """The mesh of the first ranks, with the groups of all its grids; every rank calls it."""
        import torch
        import torch.distributed as dist

        from parallel.plan import Grid

        torch.set_num_threads(1)
        rank, mesh = self.mesh.rank, self.mesh
        grids = [Grid(degree, size // degree) for degree in range(2, size) if size % degree == 0]

        def group_of(ranks: list[int], backend: str = dist.get_backend()) -> Any:
            return dist.new_group(ranks, timeout=mesh.timeout, backend=backend, use_local_synchronization=True)

        if rank >= size:
            # torch 2.13 names a group by how many there are, so those who are not in one need another.
            for _ in range(2 + 2 * len(grids)):
                group_of([rank])
            return
        if size != mesh.world_size:
            data, control = group_of(list(range(size))), group_of(list(range(size)), "gloo")
            alone = size == 1
            mesh = replace(
                mesh, world_size=size, data=None if alone else data, control=None if alone else control, _grids={}
            )
        for grid in grids:
            mesh.groups(grid)
        self.meshes[size] = mesh

    def run_among_first(self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """`run` on the mesh of the first ranks."""
        return function(self.meshes[size], *arguments)


class Ranks:
    """`world_size` gloo ranks on CPU, or NCCL ranks of which so many share a GPU. cpus: what each takes of the
    cluster's. timeout_s: of their exchanges.
    """

    def __init__(self, world_size: int, *, cpus: int = 1, timeout_s: float = 30.0, ranks_per_gpu: int = 0) -> None:
        self.world_size = world_size
        self.device_type = "cuda" if ranks_per_gpu else "cpu"
        self._options = {"cpus": cpus, "timeout_s": timeout_s, "ranks_per_gpu": ranks_per_gpu}
        self._formed: set[int] = set()
        actor = ray.remote(_RankActor)
        gpus = 1 / ranks_per_gpu if ranks_per_gpu else 0
        self._actors = [actor.options(num_cpus=cpus, num_gpus=gpus).remote() for _ in range(world_size)]
        port = ray.get(self._actors[0].open_store.remote(), timeout=60)
        joined = [
            actor.join.remote(port, rank, world_size, timeout_s, ranks_per_gpu)
            for rank, actor in enumerate(self._actors)
        ]
        ray.get(joined, timeout=120)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(mesh, *arguments) on every rank; the results by rank. An error of any rank is raised."""
        return self.run_each(function, [arguments] * self.world_size)

    def run_each(self, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Like `run`, with arguments of its own for every rank."""
        return list(ray.get(self.start(function, arguments), timeout=120))

    def outcomes(self, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        """The result of every rank, or the exception that it raised."""
        return [_outcome(reference) for reference in self.start(function, arguments)]

    def start(self, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        """References to the results of every rank, which may never come."""
        return [actor.run.remote(function, args) for actor, args in zip(self._actors, arguments, strict=True)]

    def kill(self, rank: int) -> None:
        ray.kill(self._actors[rank])

    def start_among_first(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`run` on the first `size` ranks, which form a mesh of their own; returns at once, for `ray.get`. Calls are
        run in the order in which they are started.
        """
        if size not in self._formed:
            self._formed.add(size)
            ray.get([actor.form.remote(size) for actor in self._actors], timeout=120)
        return [actor.run_among_first.remote(size, function, arguments) for actor in self._actors[:size]]

    def again(self, world_size: int) -> Ranks:
        """Others of the kind, in place of these."""
        self.close()
        return Ranks(world_size, **self._options)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


def _outcome(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=120)
    except ray.exceptions.RayTaskError as error:
        return error.cause
