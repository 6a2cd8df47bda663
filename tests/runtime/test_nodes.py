"""Several nodes, simulated on this machine: one group over all of them, in node order; resources that others hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from configs.compose import compose
from runtime.errors import PlacementError
from runtime.session import Session
from tests.runtime.command import raylysses, selection, summary
from tests.runtime.report_values import check_schema

pytestmark = pytest.mark.ray

SMALL = ("generate.steps=2", "generate.frames=5", "generate.height=64", "generate.width=64", "run.outputs=[]")


@pytest.fixture(scope="module")
def two_nodes(starting_ray: Callable[[], AbstractContextManager[Any]]) -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    with starting_ray():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def test_a_group_spans_nodes(two_nodes: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = raylysses(
        "generate",
        "--prompt",
        "a cat",
        "parallel.world_size=2",
        f"cluster.address={two_nodes}",
        f"run.dir={folder}",
        *SMALL,
    )

    assert outcome.code == 0, outcome.err
    assert selection(folder)["agreed"]
    (request,) = summary(folder)["requests"]
    assert all(traffic["planned"] == traffic["measured"] for traffic in request["traffic"].values())


def test_a_bench_spans_nodes(two_nodes: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = raylysses(
        *("bench", "attention", "--shapes", "1x37x5x16", "--plans", "ulysses,ring", "--backends", "REFERENCE"),
        *("--rounds", "2", "parallel.world_size=2", f"cluster.address={two_nodes}", f"run.dir={folder}"),
    )

    assert outcome.code == 0, outcome.err
    content = json.loads((folder / "bench.json").read_text())
    check_schema("bench", content)
    assert content["nodes"] == 2
    assert [(row["plan"], row["outcome"]) for row in content["rows"]] == [
        ("kernel", "timed"),
        ("ulysses", "timed"),
        ("ring", "timed"),
    ]


@pytest.mark.usefixtures("ray_cluster")
def test_resources_that_others_hold_are_waited_for_until_the_deadline() -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    held = placement_group([{"CPU": 1.0}] * int(ray.available_resources()["CPU"]))
    assert held.wait(30)
    settings = ["generate.prompt=x", "parallel.world_size=2", "cluster.start_timeout_s=2", "run.device=cpu"]
    config, faults = compose(settings, environ={})
    assert config is not None, faults
    try:
        with pytest.raises(PlacementError, match=r"parallel\.world_size=2: .* taken for 2 s; wait"), Session(config):
            pass
    finally:
        remove_placement_group(held)


def test_gloo_listens_where_the_other_nodes_look(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.worker import bind_to_interface

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    bind_to_interface("127.0.0.1")

    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "chosen"
