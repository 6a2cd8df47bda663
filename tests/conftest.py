"""One Ray for the whole run of the tests, and gloo ranks that are started once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.summary import LINES
from tests.warm_workers import warm_workers

CHECKOUT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attention over live ranks")
    group.addoption("--calls", type=int, default=2000, help="how many drawn calls have to run (default: 2000)")
    group.addoption("--calls-seed", type=int, default=0, help="draw others (default: 0)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster with room for groups of up to 8 ranks side by side, whatever the machine has."""
    import ray
    import torch

    os.environ["RAY_AUTH_MODE"] = "disabled"
    with nullcontext() if torch.cuda.is_available() else warm_workers():  # a fork cannot take over a CUDA context
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


@pytest.fixture(scope="session")
def eight_ranks(ray_cluster: None) -> Iterator[Ranks]:
    """A pool: any number of its first ranks works together in groups that are formed once."""
    ranks = Ranks(8, cpus=0, timeout_s=90)  # beside those of `gloo_ranks`, whatever has been started of them
    yield ranks
    ranks.close()
