"""One Ray for the whole run of the tests, and gloo ranks that are started once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest

from tests.ranks import Ranks
from tests.summary import LINES
from tests.warm_workers import warm_python

CHECKOUT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("raylysses", deadline=None)  # a loaded machine is slow, and not wrong
hypothesis.settings.load_profile("raylysses")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attention over live ranks")
    group.addoption("--calls", type=int, default=2000, help="how many drawn calls have to run (default: 2000)")
    group.addoption("--calls-seed", type=int, default=0, help="draw others (default: 0)")
    group.addoption("--ranks-per-gpu", type=int, default=1, help="how many NCCL ranks share a GPU (default: 1)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def starting_ray() -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """`with starting_ray():` around the start of a Ray: its workers are forked (see `tests.warm_workers`)."""
    import torch

    if torch.cuda.is_available():  # a fork cannot take over a CUDA context
        yield nullcontext
        return
    with warm_python() as python:
        yield lambda: patch.object(sys, "executable", python)


@pytest.fixture(scope="session")
def ray_cluster(starting_ray: Callable[[], AbstractContextManager[Any]]) -> Iterator[str]:
    """A local cluster with room for groups of up to 8 ranks side by side, whatever the machine has; its address."""
    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    with starting_ray():
        ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="session")
def gloo_ranks(ray_cluster: str) -> Iterator[Callable[[int], Ranks]]:
    """`gloo_ranks(P)`: live ranks in one gloo group, the same for every test that asks for P."""
    groups: dict[int, Ranks] = {}
    failures: dict[int, Exception] = {}

    def get(world_size: int) -> Ranks:
        if world_size in failures:  # trying again would cost each test the whole timeout
            raise failures[world_size]
        if world_size not in groups:
            try:
                groups[world_size] = Ranks(world_size)
            except Exception as error:
                failures[world_size] = error
                raise
        return groups[world_size]

    yield get
    for ranks in groups.values():
        ranks.close()


@pytest.fixture(scope="session")
def eight_ranks(ray_cluster: str) -> Iterator[Ranks]:
    """A pool: any number of its first ranks works together in groups that are formed once."""
    ranks = Ranks(8, cpus=0, timeout_s=90)  # beside those of `gloo_ranks`, whatever has been started of them
    yield ranks
    ranks.close()
