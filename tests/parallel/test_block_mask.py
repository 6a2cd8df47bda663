"""torch's BlockMask under Ulysses: as it is, or counted from the rank's own heads; refused where rows are parted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from backends.interface import AttentionMetadata, Features
from configs.faults import FaultError
from configs.schema import ParallelConfig
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream, plan_sequence
from parallel.restrict import of_heads
from tests.exact import random_qkv
from tests.parallel.cases import GlooRanks
from tests.parallel.layers import CPU, context_of, layer_with

LENGTH, HEADS, SIZE = 300, 5, 16


def of_each_head(batch: Any, head: Any, row: Any, key: Any) -> Any:
    return (row - key).abs() <= 40 * head + 3


def of_all_heads(batch: Any, head: Any, row: Any, key: Any) -> Any:
    return key <= row


def block_mask(mask_mod: Any, heads: int | None) -> BlockMask:
    return create_block_mask(mask_mod, None, heads, LENGTH, LENGTH, device="cpu")


def dense(mask_mod: Any) -> torch.Tensor:
    head, row = torch.arange(HEADS)[:, None, None], torch.arange(LENGTH)[:, None]
    seen: torch.Tensor = mask_mod(0, head, row, torch.arange(LENGTH)).expand(HEADS, LENGTH, LENGTH)
    return seen[None]


@pytest.mark.parametrize("heads", [range(0, 2), range(2, 5), range(4, 5), range(3, 3)])
def test_some_heads_of_a_block_mask_are_those_of_the_whole(heads: range) -> None:
    whole = block_mask(of_each_head, HEADS)
    cut = of_heads(AttentionMetadata(block_mask=whole), heads).block_mask
    assert cut is not None
    assert tuple(cut.shape) == (1, len(heads), LENGTH, LENGTH)
    if heads:
        expected = dense(of_each_head)[0, heads.start : heads.stop]
        own = torch.arange(len(heads))[:, None, None]
        assert torch.equal(cut.mask_mod(0, own, torch.arange(LENGTH)[:, None], torch.arange(LENGTH)), expected)
        assert torch.equal(cut.to_dense(), whole.to_dense()[:, heads.start : heads.stop])


def test_a_block_mask_of_all_heads_stays_as_it_is() -> None:
    carried = AttentionMetadata(block_mask=block_mask(of_all_heads, None))
    assert of_heads(carried, range(1, 3)) is carried


def on_rank(mesh: Mesh, by_head: bool) -> torch.Tensor:
    mask_mod, heads = (of_each_head, HEADS) if by_head else (of_all_heads, None)
    context = context_of(mesh, backend="FLEX_ATTENTION", parallel=ParallelConfig(strategy="ulysses"))
    layer = layer_with(context, HEADS, SIZE, features=Features(mask="block"))
    plan = plan_sequence(LENGTH, HEADS, mesh.world_size)
    mine = [take(t, plan.rows[mesh.rank]) for t in random_qkv(1, LENGTH, LENGTH, HEADS, HEADS, SIZE, torch.float32)]
    carried = AttentionMetadata(block_mask=block_mask(mask_mod, heads))
    return layer(mine[0], mine[1], mine[2], carried, plan=plan)


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("by_head", [False, True])
def test_a_block_mask_says_the_same_on_every_number_of_ranks(
    gloo_ranks: GlooRanks, world_size: int, by_head: bool
) -> None:
    out = torch.cat(gloo_ranks(world_size).run(on_rank, by_head), dim=1)
    qkv = random_qkv(1, LENGTH, LENGTH, HEADS, HEADS, SIZE, torch.float32)
    layer = layer_with(context_of(backend="REFERENCE"), HEADS, SIZE)
    exact = layer(*qkv, AttentionMetadata(dense(of_each_head if by_head else of_all_heads)))
    assert torch.allclose(out, exact, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ring", "gather_kv"])
def test_a_block_mask_is_refused_where_rows_are_parted(strategy: str) -> None:
    context = context_of(Mesh(0, 2, CPU), backend="FLEX_ATTENTION", parallel=ParallelConfig(strategy=strategy))
    with pytest.raises(FaultError, match="the blocks of a block_mask cannot be cut for"):
        layer_with(context, HEADS, SIZE, features=Features(mask="block"))
    layer = layer_with(context, HEADS, SIZE)
    rows = [tensor[:, :150] for tensor in random_qkv(1, LENGTH, LENGTH, HEADS, HEADS, SIZE, torch.float32)]
    carried = AttentionMetadata(block_mask=block_mask(of_all_heads, None))
    with pytest.raises(ValueError, match="the blocks of a block_mask cannot be cut for"):
        layer(rows[0], rows[1], rows[2], carried, plan=layer.plan_of(Stream("video", LENGTH)))
