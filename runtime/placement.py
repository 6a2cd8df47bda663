"""How many ranks, on which nodes, in which order: pure decisions on what the cluster reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from configs.faults import Fault
from configs.schema import ParallelConfig, RunConfig
from parallel.plan import usable_world_sizes
from runtime.errors import PlacementError, RankPlace

if TYPE_CHECKING:  # `explain` imports this module and loads no Ray
    from runtime.ray_api import Node

CPU_RANKS = 2
KEY = "parallel.world_size"


def choose_world_size(config: RunConfig, platform: str, heads: int, free_gpus: int) -> int:
    """The number asked for; else the largest usable number of free GPUs, or 2 on CPU. Raises PlacementError without a
    free GPU.
    """
    if platform != "cpu" and config.parallel.world_size is None and not free_gpus:
        rule = "every GPU of the cluster is taken"
        raise PlacementError([Fault(KEY, "auto", rule, "wait for one, or use run.device=cpu")])
    return default_world_size(config.parallel, heads, CPU_RANKS if platform == "cpu" else free_gpus)


def default_world_size(parallel: ParallelConfig, heads: int, limit: int) -> int:
    """The number asked for; else the product of both degrees if they are; else the largest multiple up to `limit` of
    the one that is, or the largest number that divides the heads.
    """
    least = least_world_size(parallel)
    if parallel.world_size is not None or (parallel.ulysses is not None and parallel.ring is not None):
        return least
    if parallel.ulysses is None and parallel.ring is None:
        return usable_world_sizes(heads, max(limit, 1))[-1]
    return max(limit // least, 1) * least


def least_world_size(parallel: ParallelConfig) -> int:
    """The number asked for, or the smallest that the degrees make up."""
    return parallel.world_size or (parallel.ulysses or 1) * (parallel.ring or 1)


def feasibility_fault(world_size: int, platform: str, nodes: Sequence[Node]) -> Fault | None:
    """The fault of asking for more than the cluster has, busy or not."""
    resource = "CPU" if platform == "cpu" else "GPU"
    counts = [(node, node.cpus if platform == "cpu" else min(node.gpus, node.cpus)) for node in nodes]
    room = sum(int(count) for _, count in counts)
    if world_size <= room:
        return None
    listed = ", ".join(f"{node.host} has {node.cpus:g} CPUs and {node.gpus:g} GPUs" for node, _ in counts) or "no node"
    rule = f"the cluster has room for {room} ranks of one {resource} each ({listed})"
    way_out = f"use at most {room}" if room else "use run.device=cpu"
    return Fault(KEY, world_size, rule, f"{way_out}, or add nodes")


def fits_one_node(world_size: int, platform: str, nodes: Sequence[Node]) -> bool:
    return any(world_size <= (node.cpus if platform == "cpu" else min(node.gpus, node.cpus)) for node in nodes)


def order_ranks(answers: Sequence[dict[str, Any]], driver_node: str) -> tuple[list[int], tuple[RankPlace, ...]]:
    """The order in which actors become ranks, as indices into `answers`, and the ranks' places.

    The driver's node first, then nodes by id; GPUs by number within a node. Ray's own bundle order interleaves nodes.
    Raises PlacementError if two ranks were given one GPU.
    """

    def place_in_order(index: int) -> tuple[bool, str, int, int]:
        answer = answers[index]
        ordinal = answer["ordinals"][0] if answer["ordinals"] else 0
        return (answer["node_id"] != driver_node, answer["node_id"], ordinal, answer["pid"])

    order = sorted(range(len(answers)), key=place_in_order)
    places = tuple(_place(rank, answers[index]) for rank, index in enumerate(order))
    taken = [(place.node_id, place.gpu) for place in places if place.gpu]
    if len(set(taken)) < len(taken):
        rule = f"two ranks were given one GPU: {', '.join(map(str, places))}"
        raise PlacementError([Fault("parallel.world_size", len(places), rule, "give each rank a whole GPU")])
    return order, places


def _place(rank: int, answer: dict[str, Any]) -> RankPlace:
    return RankPlace(
        rank=rank,
        node_id=answer["node_id"],
        host=answer["host"],
        hostname=answer["hostname"],
        pid=answer["pid"],
        gpu=str(answer["gpus"][0]) if answer["gpus"] else "",
        ordinal=answer["ordinals"][0] if answer["ordinals"] else 0,
    )
