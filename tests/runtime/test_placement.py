"""Where ranks go, decided on plain facts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.compose import compose
from configs.schema import RunConfig
from runtime.errors import PlacementError
from runtime.placement import choose_world_size, feasibility_fault, fits_one_node, order_ranks
from runtime.ray_api import Node

TWO_NODES = (Node("a", "10.0.0.1", 8, 2), Node("b", "10.0.0.2", 8, 4))


def config_of(*settings: str) -> RunConfig:
    config, faults = compose(["generate.prompt=x", *settings], environ={})
    assert config is not None, faults
    return config


def answer(node: str, gpu: int | None, pid: int) -> dict[str, Any]:
    gpus = [] if gpu is None else [str(gpu)]
    ordinals = [] if gpu is None else [gpu]
    return {"node_id": node, "host": node, "hostname": node, "pid": pid, "gpus": gpus, "ordinals": ordinals}


@pytest.mark.parametrize(
    ("platform", "heads", "free", "expected"),
    [("cpu", 4, 0, 2), ("cpu", 3, 0, 1), ("cuda", 12, 8, 6), ("cuda", 40, 8, 8), ("cuda", 4, 1, 1)],
)
def test_auto_is_the_largest_usable_number(platform: str, heads: int, free: int, expected: int) -> None:
    assert choose_world_size(config_of(), platform, heads, free) == expected


def test_auto_without_a_free_gpu_is_refused() -> None:
    with pytest.raises(PlacementError, match="every GPU of the cluster is taken"):
        choose_world_size(config_of(), "cuda", 4, 0)


def test_an_explicit_number_is_taken_as_it_is() -> None:
    assert choose_world_size(config_of("parallel.world_size=7"), "cuda", 4, 0) == 7


@pytest.mark.parametrize(
    ("settings", "platform", "free", "expected"),
    [
        (("parallel.ulysses=2", "parallel.ring=3"), "cpu", 0, 6),
        (("parallel.ulysses=4",), "cpu", 0, 4),
        (("parallel.ring=1",), "cpu", 0, 2),
        (("parallel.ulysses=3",), "cuda", 8, 6),
        (("parallel.ring=2",), "cuda", 7, 6),
        (("parallel.ulysses=4",), "cuda", 2, 4),  # more than are free: waits for them, or is refused
        (("parallel.ulysses=2", "parallel.world_size=8"), "cuda", 1, 8),
    ],
)
def test_degrees_make_up_the_number(settings: tuple[str, ...], platform: str, free: int, expected: int) -> None:
    assert choose_world_size(config_of(*settings), platform, 4, free) == expected


def test_more_ranks_than_the_cluster_has_is_a_fault_that_lists_the_nodes() -> None:
    fault = feasibility_fault(7, "cuda", TWO_NODES)

    assert fault is not None
    assert "room for 6 ranks of one GPU each" in fault.rule
    assert "10.0.0.2 has 8 CPUs and 4 GPUs" in fault.rule
    assert fault.remedy == "use at most 6, or add nodes"
    assert feasibility_fault(6, "cuda", TWO_NODES) is None
    assert feasibility_fault(16, "cpu", TWO_NODES) is None
    assert feasibility_fault(17, "cpu", TWO_NODES) is not None


def test_a_group_fits_one_node_or_not() -> None:
    assert fits_one_node(4, "cuda", TWO_NODES)
    assert not fits_one_node(5, "cuda", TWO_NODES)


def test_ranks_go_by_node_then_by_gpu_as_a_number() -> None:
    answers = [answer("b", 10, 1), answer("a", 1, 2), answer("b", 9, 3), answer("a", 0, 4)]

    order, places = order_ranks(answers, driver_node="b")

    assert [(place.node_id, place.ordinal) for place in places] == [("b", 9), ("b", 10), ("a", 0), ("a", 1)]
    assert order == [2, 0, 3, 1]
    assert [place.rank for place in places] == [0, 1, 2, 3]


def test_two_ranks_on_one_gpu_are_refused() -> None:
    with pytest.raises(PlacementError, match="two ranks were given one GPU"):
        order_ranks([answer("a", 0, 1), answer("a", 0, 2)], "a")


@given(st.permutations([(node, gpu) for node in "abc" for gpu in range(4)]), st.sampled_from("abc"))
def test_the_order_does_not_depend_on_how_ray_answered(shuffled: list[tuple[str, int]], driver: str) -> None:
    answers = [answer(node, gpu, 1) for node, gpu in shuffled]

    order, places = order_ranks(answers, driver)

    assert [(place.node_id, place.ordinal) for place in places] == [shuffled[index] for index in order]
    nodes = [place.node_id for place in places]
    assert nodes == sorted(nodes, key=lambda node: (node != driver, node))
