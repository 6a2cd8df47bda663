"""The attention layer over live ranks: the same answer as one process has, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata, Kind
from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.events import AttentionRan, Traffic
from parallel.mesh import Mesh
from parallel.plan import Stream, plan_sequence
from tests.exact import SAME_BACKEND, TOLERANCE, attention64, random_qkv, relative_error
from tests.parallel.layers import CPU, ONE_RANK, collecting, context_of, rows_of
from tests.ranks import Ranks

pytestmark = pytest.mark.ray

GlooRanks = Callable[[int], Ranks]
HEADS, HEAD_SIZE = 4, 32
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

on_ranks = pytest.mark.parametrize("world_size", [2, 4])
by_backend = pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])


def mask_of(kind: str, batch: int, length: int) -> torch.Tensor | None:
    """A mask on the whole sequence. `blind`: some rows of one item of the batch may look at nothing."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(5)
    if kind == "keys":
        return torch.rand(1, 1, 1, length, generator=generator) < 0.7
    mask = torch.rand(batch, 1, length, length, generator=generator) < 0.4
    if kind == "blind":
        mask[batch - 1, :, : length // 2] = False
        mask[:, :, length - 1] = False
    return mask


def layer_of(mesh: Mesh, dtype: torch.dtype, backend: str, **options: Any) -> Attention:
    kind: Kind = options.pop("kind", "self")
    context = context_of(mesh, dtype=dtype, backend=backend)
    return Attention(HEADS, HEAD_SIZE, role=kind, kind=kind, context=context, **options)


def self_attention(
    mesh: Mesh, length: int, batch: int, dtype: torch.dtype, backend: str, mask_kind: str, causal: bool
) -> tuple[torch.Tensor, Traffic]:
    """This rank's rows of the output, and what the exchange sent."""
    plan = plan_sequence(length, HEADS, mesh.world_size)
    qkv = random_qkv(batch, length, length, HEADS, HEADS, HEAD_SIZE, dtype)
    mine = [rows_of(tensor, plan, mesh.rank) for tensor in qkv]
    layer = layer_of(mesh, dtype, backend, causal=causal)
    metadata = AttentionMetadata(mask_of(mask_kind, batch, length))
    out = layer(mine[0], mine[1], mine[2], metadata, plan=plan)
    return out, layer.context.transport.take_traffic()


def gathered(ranks: Ranks, *arguments: Any) -> torch.Tensor:
    return torch.cat([out for out, _ in ranks.run(self_attention, *arguments)], dim=1)


@pytest.mark.parametrize(("world_size", "length"), [(2, 1), (4, 3), (2, 45), (4, 175)])
@by_backend
@pytest.mark.parametrize("dtype", list(SAME_BACKEND), ids=str)
def test_self_attention_is_the_same_for_any_number_of_ranks(
    gloo_ranks: GlooRanks, world_size: int, backend: str, dtype: torch.dtype, length: int
) -> None:
    case = (length, 2, dtype, backend, "none", False)
    out = gathered(gloo_ranks(world_size), *case)
    qkv = random_qkv(2, length, length, HEADS, HEADS, HEAD_SIZE, dtype)
    assert relative_error(out, attention64(*qkv, scale=HEAD_SIZE**-0.5)) <= TOLERANCE[dtype]
    assert relative_error(out, self_attention(ONE_RANK, *case)[0]) <= SAME_BACKEND[dtype]


@pytest.mark.parametrize(("world_size", "batch"), [(2, 3), (4, 1)])
@by_backend
@pytest.mark.parametrize("mask_kind", ["rows", "blind", "keys", "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_and_causality_hold_on_the_whole_sequence(
    gloo_ranks: GlooRanks, world_size: int, backend: str, mask_kind: str, causal: bool, batch: int
) -> None:
    length, dtype = 45, torch.float32
    out = gathered(gloo_ranks(world_size), length, batch, dtype, backend, mask_kind, causal)
    qkv = random_qkv(batch, length, length, HEADS, HEADS, HEAD_SIZE, dtype)
    mask = mask_of(mask_kind, batch, length)
    exact = attention64(*qkv, scale=HEAD_SIZE**-0.5, causal=causal, mask=mask)
    assert relative_error(out, exact) <= TOLERANCE[dtype]
    blind = (exact == 0).all(dim=-1)
    assert bool(blind.any()) or mask_kind != "blind"
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))


def grouped_attention(mesh: Mesh, length: int, heads: tuple[int, int], backend: str, causal: bool) -> torch.Tensor:
    plan = plan_sequence(length, heads[0], mesh.world_size, heads[1])
    query, key, value = random_qkv(2, length, length, *heads, HEAD_SIZE, torch.float32)
    context = context_of(mesh, backend=backend, parallel=ParallelConfig(strategy="ulysses"))
    layer = Attention(
        heads[0], HEAD_SIZE, role="self", kind="self", num_kv_heads=heads[1], causal=causal, context=context
    )
    metadata = AttentionMetadata(per_head_mask(heads[0], length))
    mine = [rows_of(tensor, plan, mesh.rank) for tensor in (query, key, value)]
    return layer(mine[0], mine[1], mine[2], metadata, plan=plan)


def per_head_mask(heads: int, length: int) -> torch.Tensor:
    mask = torch.rand(1, heads, length, length, generator=torch.Generator().manual_seed(6)) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize(("world_size", "length", "causal"), [(2, 45, True), (3, 45, False), (4, 2, True)])
@by_backend
@pytest.mark.parametrize("heads", [(5, 5), (2, 2), (1, 1), (8, 2), (6, 3), (7, 1), (12, 4), (9, 3)], ids=str)
def test_any_number_of_heads_and_kv_heads_is_exact_on_any_number_of_ranks(
    gloo_ranks: GlooRanks, world_size: int, backend: str, heads: tuple[int, int], length: int, causal: bool
) -> None:
    out = torch.cat(gloo_ranks(world_size).run(grouped_attention, length, heads, backend, causal), dim=1)
    query, key, value = random_qkv(2, length, length, *heads, HEAD_SIZE, torch.float32)
    wide = [tensor.repeat_interleave(heads[0] // heads[1], dim=2) for tensor in (key, value)]
    mask = per_head_mask(heads[0], length)
    exact = torch.cat(
        [
            attention64(
                *(tensor[:, :, head : head + 1] for tensor in (query, *wide)),
                scale=HEAD_SIZE**-0.5,
                causal=causal,
                mask=mask[:, head : head + 1],
            )
            for head in range(heads[0])
        ],
        dim=2,
    )
    assert relative_error(out, exact) <= TOLERANCE[torch.float32]


def test_a_plan_of_other_kv_heads_is_refused() -> None:
    layer = Attention(4, HEAD_SIZE, role="self", kind="self", num_kv_heads=2, context=context_of(Mesh(0, 2, CPU)))
    query, key, value = random_qkv(1, 5, 5, 4, 2, HEAD_SIZE, torch.float32)
    with pytest.raises(ValueError, match="4 heads and 2 KV heads, and the plan 4 and 4; make it with plan_of"):
        layer(query, key, value, plan=plan_sequence(10, 4, 2))


@on_ranks
def test_the_traffic_of_a_call_is_the_plans(gloo_ranks: GlooRanks, world_size: int) -> None:
    plan = plan_sequence(175, HEADS, world_size)
    results = gloo_ranks(world_size).run(self_attention, 175, 3, torch.bfloat16, "TORCH_SDPA", "none", False)
    for rank, (_, traffic) in enumerate(results):
        assert traffic.calls == {"scatter_heads": 1, "gather_heads": 1}
        assert sum(traffic.bytes_sent.values()) == plan.sent_pairs(rank) * 3 * HEAD_SIZE * 2


def items_of_a_batch(mesh: Mesh) -> list[torch.Tensor]:
    """The output of a batch of three at once, and of each item alone."""
    qkv = random_qkv(3, 7, 7, HEADS, HEADS, HEAD_SIZE, torch.float32)
    layer = layer_of(mesh, torch.float32, "REFERENCE")
    outs = []
    for items in (slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3)):
        plan = layer.plan_of(Stream("sequence", 7))
        mine = [rows_of(tensor[items], plan, mesh.rank) for tensor in qkv]
        outs.append(layer(mine[0], mine[1], mine[2], plan=plan))
    return outs


@on_ranks
def test_items_of_a_batch_are_not_interleaved(gloo_ranks: GlooRanks, world_size: int) -> None:
    for together, *alone in gloo_ranks(world_size).run(items_of_a_batch):
        for item, out in enumerate(alone):
            assert torch.allclose(together[item], out[0], atol=1e-6)


def head_and_row_marks(mesh: Mesh) -> torch.Tensor:
    """Each query looks at its own row only, and each value says its item, row and head."""
    batch, length = 3, 11
    plan = plan_sequence(length, HEADS, mesh.world_size)
    item = torch.arange(batch)[:, None, None, None] * 10000
    marks = item + torch.arange(length)[None, :, None, None] * 100 + torch.arange(HEADS)[None, None, :, None]
    value = rows_of(marks.expand(-1, -1, -1, HEAD_SIZE).float(), plan, mesh.rank)
    own_row = AttentionMetadata(torch.eye(length, dtype=torch.bool)[None, None])
    layer = layer_of(mesh, torch.float32, "REFERENCE")
    return layer(torch.zeros_like(value), torch.zeros_like(value), value, own_row, plan=plan) - value


@on_ranks
def test_every_row_and_head_comes_back_to_its_place(gloo_ranks: GlooRanks, world_size: int) -> None:
    for difference in gloo_ranks(world_size).run(head_and_row_marks):
        assert not bool(difference.any())


def cross_attention(mesh: Mesh, skip: bool) -> tuple[torch.Tensor, Traffic, list[AttentionRan]]:
    """45 query rows, sharded, to 19 keys that every rank has; with two KV heads for the four of the queries."""
    plan = plan_sequence(45, HEADS, mesh.world_size)
    query, key, value = random_qkv(2, 45, 19, HEADS, 2, HEAD_SIZE, torch.float32)
    context, events = collecting(mesh)
    layer = Attention(
        HEADS, HEAD_SIZE, role="cross", kind="cross", num_kv_heads=2, skip_sequence_parallel=skip, context=context
    )
    out = layer(rows_of(query, plan, mesh.rank), key, value, plan=plan)
    return out, context.transport.take_traffic(), events


@on_ranks
@pytest.mark.parametrize("skip", [False, True])
def test_cross_attention_to_replicated_keys_exchanges_nothing(
    gloo_ranks: GlooRanks, world_size: int, skip: bool
) -> None:
    plan = plan_sequence(45, HEADS, world_size)
    results = gloo_ranks(world_size).run(cross_attention, skip)
    qkv = random_qkv(2, 45, 19, HEADS, 2, HEAD_SIZE, torch.float32)
    out = torch.cat([part for part, _, _ in results], dim=1)
    assert relative_error(out, attention64(*qkv, scale=HEAD_SIZE**-0.5)) <= TOLERANCE[torch.float32]
    for rank, (_, traffic, (event,)) in enumerate(results):
        assert traffic == Traffic()
        assert event.strategy == "local"
        rows = len(plan.rows[rank])
        assert event.query_rows == event.query == (2, rows, HEADS, HEAD_SIZE)
        assert event.key == (2, 19, 2, HEAD_SIZE)


def attention_of_rows_at_hand(mesh: Mesh) -> tuple[torch.Tensor, Traffic]:
    plan = plan_sequence(45, HEADS, mesh.world_size)
    qkv = random_qkv(2, 45, 45, HEADS, HEADS, HEAD_SIZE, torch.float32)
    layer = layer_of(mesh, torch.float32, "TORCH_SDPA", skip_sequence_parallel=True, causal=True)
    out = layer(*[rows_of(tensor, plan, mesh.rank) for tensor in qkv])
    return out, layer.context.transport.take_traffic()


@on_ranks
def test_skipping_sequence_parallelism_computes_on_the_rows_at_hand(gloo_ranks: GlooRanks, world_size: int) -> None:
    plan = plan_sequence(45, HEADS, world_size)
    qkv = random_qkv(2, 45, 45, HEADS, HEADS, HEAD_SIZE, torch.float32)
    for rank, (out, traffic) in enumerate(gloo_ranks(world_size).run(attention_of_rows_at_hand)):
        mine = [rows_of(tensor, plan, rank) for tensor in qkv]
        exact = attention64(mine[0], mine[1], mine[2], scale=HEAD_SIZE**-0.5, causal=True)
        assert relative_error(out, exact) <= TOLERANCE[torch.float32]
        assert traffic == Traffic()


def reported(mesh: Mesh) -> list[AttentionRan]:
    plan = plan_sequence(45, HEADS, mesh.world_size)
    qkv = random_qkv(2, 45, 45, HEADS, HEADS, HEAD_SIZE, torch.float32)
    context, events = collecting(mesh, backend="REFERENCE")
    layer = Attention(HEADS, HEAD_SIZE, role="self", kind="self", context=context, name="blocks.0", model="transformer")
    for _ in range(2):
        layer(*[rows_of(tensor, plan, mesh.rank) for tensor in qkv], plan=plan)
    return events


@on_ranks
def test_the_report_has_the_shapes_before_and_after_the_exchange(gloo_ranks: GlooRanks, world_size: int) -> None:
    plan = plan_sequence(45, HEADS, world_size)
    for rank, (event,) in enumerate(gloo_ranks(world_size).run(reported)):
        share = HEADS // world_size
        assert (event.strategy, event.layer, event.model) == ("ulysses", "blocks.0", "transformer")
        assert event.query_rows == (2, len(plan.rows[rank]), HEADS, HEAD_SIZE)
        assert event.query == event.key == (2, 45, share, HEAD_SIZE)
        assert event.selection.requirements.num_heads == share
