"""One Ray for the whole run of the tests, and gloo ranks that are started once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import Ranks

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster with room for groups of up to 8 ranks side by side, whatever the machine has."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def gloo_ranks(ray_cluster: None) -> Iterator[Callable[[int], Ranks]]:
    """`gloo_ranks(P)`: live ranks in one gloo group, the same for every test that asks for P."""
    groups: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in groups:
            groups[world_size] = Ranks(world_size)
        return groups[world_size]

    yield get
    for ranks in groups.values():
        ranks.close()
