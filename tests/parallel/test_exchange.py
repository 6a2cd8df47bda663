"""The exchanges over live gloo ranks: nothing is changed, lost, padded or sent twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.events import Traffic, sum_traffic
from parallel.mesh import Mesh
from parallel.plan import plan_sequence
from parallel.transport.torch_dist import TorchTransport
from tests.parallel.layers import CPU, rows_of, same_bits
from tests.ranks import Ranks

GlooRanks = Callable[[int], Ranks]
WORLD_SIZES = (2, 3, 4)
HEAD_SIZE, WIDTH = 8, 5

Shape = tuple[int, int, int, torch.dtype, str]
SHAPES: tuple[Shape, ...] = (
    (2, 1, 1, torch.float32, "rows first"),
    (2, 3, 3, torch.bfloat16, "heads first"),
    (2, 175, 1, torch.bfloat16, "rows first"),
    (3, 2, 3, torch.float32, "rows first"),
    (3, 7, 1, torch.bfloat16, "heads first"),
    (3, 64, 3, torch.float32, "heads first"),
    (4, 1, 3, torch.bfloat16, "rows first"),
    (4, 3, 1, torch.float32, "heads first"),
    (4, 175, 3, torch.float32, "rows first"),
)
"""World size, rows, batch, dtype and layout: fewer rows than ranks, lengths that ranks do not divide."""

over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)).replace(" ", "-"))


def whole(batch: int, length: int, heads: int, dtype: torch.dtype, layout: str, seed: int) -> torch.Tensor:
    """[B, S, H, D], equal on all ranks, with a NaN, an infinity and a negative zero; contiguous or not."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(batch, length, heads, HEAD_SIZE, generator=generator)
    tensor[0, 0, 0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    tensor = tensor.to(dtype)
    return tensor if layout == "rows first" else tensor.transpose(1, 2).contiguous().transpose(1, 2)


def exchange_heads(
    mesh: Mesh, length: int, batch: int, heads: tuple[int, int], dtype: torch.dtype, layout: str
) -> dict[str, Any]:
    plan = plan_sequence(length, heads[0], mesh.world_size, heads[1])
    transport = TorchTransport(mesh)
    counts = (heads[0], heads[1], heads[1])
    full = [whole(batch, length, count, dtype, layout, seed) for seed, count in enumerate(counts)]
    mine = [rows_of(tensor, plan, mesh.rank) for tensor in full]
    before = [tensor.clone() for tensor in mine]
    scattered = transport.scatter_heads(mine[0], mine[1], mine[2], plan)
    after_scatter = transport.take_traffic()
    back = [transport.gather_heads(scattered[0], plan)]
    after_gather = transport.take_traffic()
    of_rank = (plan.heads.query[mesh.rank], plan.heads.kv[mesh.rank], plan.heads.kv[mesh.rank])
    expected = [tensor[:, :, heads.start : heads.stop] for tensor, heads in zip(full, of_rank, strict=True)]
    return {
        "scattered": all(map(same_bits, scattered, expected)),
        "back": same_bits(back[0], mine[0]),
        "untouched": all(map(same_bits, mine, before)),
        "scatter": after_scatter,
        "gather": after_gather,
        "left": transport.take_traffic(),
    }


@pytest.mark.ray
@pytest.mark.parametrize("heads", [(8, 8), (5, 5), (2, 2), (6, 2), (7, 1)], ids=str)
@over_shapes
def test_heads_go_there_and_back_bit_for_bit(gloo_ranks: GlooRanks, shape: Shape, heads: tuple[int, int]) -> None:
    world_size, length, batch, dtype, layout = shape
    plan = plan_sequence(length, heads[0], world_size, heads[1])
    item = batch * HEAD_SIZE * dtype.itemsize
    for rank, got in enumerate(gloo_ranks(world_size).run(exchange_heads, length, batch, heads, dtype, layout)):
        assert got["scattered"], f"rank {rank} has other heads than its own"
        assert got["back"], f"rank {rank} got other rows back"
        assert got["untouched"]
        sent = sum(plan.scatter_heads(rank).sends) - plan.scatter_heads(rank).sends[rank]
        assert got["scatter"] == Traffic({"scatter_heads": 1}, {"scatter_heads": sent * item})
        returned = sum(plan.gather_heads(rank).sends) - plan.gather_heads(rank).sends[rank]
        assert got["gather"] == Traffic({"gather_heads": 1}, {"gather_heads": returned * item})
        assert sent + returned == plan.sent_pairs(rank)
        assert got["left"] == Traffic()


def gather(mesh: Mesh, length: int, batch: int, dtype: torch.dtype, layout: str) -> tuple[bool, Traffic]:
    plan = plan_sequence(length, mesh.world_size, mesh.world_size)
    full = whole(batch, length, WIDTH, dtype, layout, 7).flatten(2)
    if layout != "rows first":
        full = full.transpose(0, 1).contiguous().transpose(0, 1)
    transport = TorchTransport(mesh)
    gathered = transport.gather_rows(rows_of(full, plan, mesh.rank), plan)
    return same_bits(gathered, full), transport.take_traffic()


@pytest.mark.ray
@over_shapes
def test_gathered_rows_are_the_whole_sequence_on_every_rank(gloo_ranks: GlooRanks, shape: Shape) -> None:
    world_size, length, batch, dtype, layout = shape
    plan = plan_sequence(length, world_size, world_size)
    for rank, (equal, traffic) in enumerate(gloo_ranks(world_size).run(gather, length, batch, dtype, layout)):
        assert equal, f"rank {rank} has another sequence"
        sent = plan.sent_rows(rank) * batch * WIDTH * HEAD_SIZE * dtype.itemsize
        assert traffic == Traffic({"gather_rows": 1}, {"gather_rows": sent})


def exchange_one_head_each(mesh: Mesh) -> bool:
    got = exchange_heads(mesh, 9, 2, (mesh.world_size, mesh.world_size), torch.float32, "rows first")
    return bool(got["scattered"] and got["back"])


@pytest.mark.ray
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_one_head_for_each_rank_is_enough(gloo_ranks: GlooRanks, world_size: int) -> None:
    assert gloo_ranks(world_size).run(exchange_one_head_each) == [True] * world_size


def refuse_on_rank_0_then_exchange(mesh: Mesh) -> tuple[str, bool]:
    said = ""
    if mesh.rank == 0:
        plan = plan_sequence(8, 4, 2)
        short = torch.zeros(1, 3, 4, HEAD_SIZE)
        try:
            TorchTransport(mesh).scatter_heads(short, short, short, plan)
        except ValueError as error:
            said = str(error)
    got = exchange_heads(mesh, 9, 1, (4, 4), torch.float32, "rows first")
    return said, bool(got["back"])


@pytest.mark.ray
def test_a_refused_size_leaves_the_group_usable(gloo_ranks: GlooRanks) -> None:
    first, second = gloo_ranks(2).run(refuse_on_rank_0_then_exchange)
    assert first[0].startswith(
        "scatter_heads: (1, 3, 4, 8) at hand, the plan has (1, 4, 4, 8); give it this rank's rows"
    )
    assert first[1]
    assert second == ("", True)


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 8])
def test_sizes_that_do_not_fit_the_plan_are_refused_before_any_collective(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collective(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was started")

    monkeypatch.setattr(dist, "all_to_all_single", collective)
    transport = TorchTransport(Mesh(0, 2, CPU))
    plan = plan_sequence(8, 4, 2)  # 4 rows and 2 heads for each rank
    qkv = torch.zeros(2, rows, 4, HEAD_SIZE)
    with pytest.raises(ValueError, match=r"^scatter_heads: \(2, \d, 4, 8\) at hand, the plan has \(2, 4, 4, 8\); "):
        transport.scatter_heads(qkv, qkv, qkv, plan)
    if rows != plan.length:
        with pytest.raises(ValueError, match=r"^gather_heads: "):
            transport.gather_heads(torch.zeros(2, rows, 2, HEAD_SIZE), plan)
    with pytest.raises(ValueError, match=r"^gather_rows: "):
        transport.gather_rows(torch.zeros(2, rows, WIDTH), plan)
    with pytest.raises(ValueError, match=r"^scatter_heads: "):
        transport.scatter_heads(*[torch.zeros(2, 4, 8, HEAD_SIZE)] * 3, plan)
    with pytest.raises(ValueError, match=r"^gather_heads: "):
        transport.gather_heads(torch.zeros(2, 8, 4, HEAD_SIZE), plan)
    assert transport.take_traffic() == Traffic()


def test_traffic_of_several_models_adds_up_by_verb() -> None:
    one = Traffic({"scatter_heads": 2, "gather_rows": 1}, {"scatter_heads": 100, "gather_rows": 10})
    other = Traffic({"scatter_heads": 1}, {"scatter_heads": 5})
    total = sum_traffic([one, other, Traffic()])
    assert total == Traffic({"scatter_heads": 3, "gather_rows": 1}, {"scatter_heads": 105, "gather_rows": 10})
    assert total.to_dict()["scatter_heads"] == {"calls": 3, "bytes_sent": 105}
    assert sum_traffic([]) == Traffic()
