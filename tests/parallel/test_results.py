"""Every strategy returns contiguous results, takes a V of another head size, and gathers the rows of any stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata
from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream
from parallel.rows import Rows
from parallel.traffic import call_traffic
from tests.exact import relative_error
from tests.parallel.cases import GRIDS, GlooRanks
from tests.parallel.layers import ONE_RANK, context_of

TEXT_AND_VIDEO = (Stream("text", 5, sharded=False), Stream("video", 17), Stream("more", 4))
ROWS, HEADS, KV_HEADS, SIZE = 26, 6, 2, 8


def tensors(value_size: int = SIZE, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size)
    return [torch.randn(2, ROWS, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def layer_of(mesh: Mesh, parallel: ParallelConfig | None = None, **options: Any) -> Attention:
    options = {"kind": "joint", "num_kv_heads": KV_HEADS, **options}
    dtype = options.pop("dtype", torch.float64)
    context = context_of(mesh, dtype=dtype, backend="REFERENCE", parallel=parallel)
    return Attention(HEADS, SIZE, role=options["kind"], context=context, **options)


# --- one layout -------------------------------------------------------------------------------------------------------


def layouts_of(mesh: Mesh, parallel: ParallelConfig) -> list[bool]:
    """Whether results are contiguous, so that `view` merges their heads; inputs are laid out heads first."""
    found = []
    for streams in (TEXT_AND_VIDEO, (Stream("video", ROWS),)):
        for causal in (False, True):
            layer = layer_of(mesh, parallel, causal=causal, lse=True)
            plan = layer.plan_of(*streams)
            query, key, value = (
                take(tensor, plan.query_rows(mesh.rank)).transpose(1, 2).contiguous().transpose(1, 2)
                for tensor in tensors()
            )
            out, lse = layer.forward_with_lse(query, key, value, plan=plan)
            plain = layer(query, key, value, plan=layer.plan_of(*streams))
            assert torch.equal(out.view(*out.shape[:2], -1), plain.view(*out.shape[:2], -1))
            found += [each.is_contiguous() for each in (out, lse, plain)]
    return found


@pytest.mark.ray
@pytest.mark.parametrize("grid", GRIDS)
def test_results_are_contiguous_under_every_strategy(gloo_ranks: GlooRanks, grid: str) -> None:
    world_size, parallel = GRIDS[grid]
    for found in gloo_ranks(world_size).run(layouts_of, parallel):
        assert all(found)


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_results_on_one_rank_are_contiguous(backend: str, kind: Any) -> None:
    context = context_of(backend=backend)
    layer = Attention(4, SIZE, role="role", kind=kind, context=context)
    query, key = (torch.randn(2, 4, rows, SIZE).transpose(1, 2) for rows in (7, 9))
    for mask in (None, torch.ones(1, 1, 7, 9, dtype=torch.bool)):
        out = layer(query, key, key, AttentionMetadata(mask))
        assert out.view(2, 7, -1).shape == (2, 7, 4 * SIZE)


# --- V of another head size -------------------------------------------------------------------------------------------

VALUE_SIZES = (3, 12)


def with_value_size(mesh: Mesh, parallel: ParallelConfig, value_size: int) -> tuple[float, float, bool]:
    """Errors of results and gradients of this rank's rows against one rank; whether traffic was as planned."""
    whole = [tensor.requires_grad_() for tensor in tensors(value_size)]
    alone = layer_of(ONE_RANK, value_head_size=value_size, lse=True)
    expected = alone.forward_with_lse(*whole)
    (expected[0].square().sum() + expected[1].square().sum()).backward()
    layer = layer_of(mesh, parallel, kind="self", value_head_size=value_size, lse=True)
    plan = layer.plan_of(Stream("video", ROWS))
    held = plan.query_rows(mesh.rank)
    query, key, value = (take(tensor.detach(), held).requires_grad_() for tensor in whole)
    layer.context.transport.take_traffic()
    out, lse = layer.forward_with_lse(query, key, value, plan=plan)
    sizes: dict[str, Any] = {"batch": 2, "head_size": SIZE, "value_head_size": value_size, "element_size": 8}
    planned = call_traffic(plan, mesh.rank, **sizes, lse=True, gradient=True)
    moved = layer.context.transport.take_traffic()
    (out.square().sum() + lse.square().sum()).backward()
    layer.context.transport.take_traffic()
    plain = layer.plan_of(Stream("video", ROWS))
    unlearned = layer(query.detach(), key.detach(), value.detach(), plan=plain)
    rotated = layer.context.transport.take_traffic()
    as_planned = (moved, rotated) == (planned, call_traffic(plain, mesh.rank, **sizes))
    of_results = [
        relative_error(out, take(expected[0], held)),
        relative_error(unlearned, take(expected[0], held)),
        relative_error(lse, take(expected[1], held, dim=2)),
    ]
    pairs = zip((query, key, value), whole, strict=True)
    of_gradients = [relative_error(_grad(mine), take(_grad(all_rows), held)) for mine, all_rows in pairs]
    return max(of_results), max(of_gradients), as_planned


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.ray
@pytest.mark.parametrize("value_size", VALUE_SIZES)
@pytest.mark.parametrize("grid", GRIDS)
def test_v_may_have_another_head_size_under_every_strategy(gloo_ranks: GlooRanks, grid: str, value_size: int) -> None:
    world_size, parallel = GRIDS[grid]
    for of_results, of_gradients, as_planned in gloo_ranks(world_size).run(with_value_size, parallel, value_size):
        assert of_results < 1e-12
        assert of_gradients < 1e-11
        assert as_planned


def in_fp8(mesh: Mesh) -> tuple[float, bool]:
    whole = tensors(12, torch.float32)
    expected = layer_of(ONE_RANK, value_head_size=12, dtype=torch.float32)(*whole)
    layer = layer_of(
        mesh, ParallelConfig(strategy="ulysses", exchange_dtype="fp8"), value_head_size=12, dtype=torch.float32
    )
    plan = layer.plan_of(Stream("video", ROWS))
    held = plan.query_rows(mesh.rank)
    with torch.no_grad():
        out = layer(*(take(tensor, held) for tensor in whole), plan=plan)
    sizes: dict[str, Any] = {"batch": 2, "head_size": SIZE, "value_head_size": 12, "element_size": 4}
    moved = layer.context.transport.take_traffic() == call_traffic(plan, mesh.rank, **sizes)
    return relative_error(out, take(expected, held)), moved


@pytest.mark.ray
def test_v_of_another_head_size_goes_through_an_fp8_exchange(gloo_ranks: GlooRanks) -> None:
    for error, as_planned in gloo_ranks(2).run(in_fp8):
        assert error < 0.06
        assert as_planned


# --- cross-attention with masks of each query -------------------------------------------------------------------------


def cross_with_a_mask(mesh: Mesh, backend: str, separate: bool) -> float:
    """The error of cross-attention of this rank's queries. separate: with a plan of the layer's own."""
    generator = torch.Generator().manual_seed(5)
    query, text = (torch.randn(2, rows, HEADS, SIZE, generator=generator) for rows in (ROWS, 7))
    mask = AttentionMetadata(torch.rand(2, HEADS, ROWS, 7, generator=generator) < 0.6)
    context = context_of(mesh, backend=backend)
    cross = Attention(HEADS, SIZE, role="cross", kind="cross", features=mask.features, context=context)
    before = Attention(HEADS, SIZE, role="self", kind="self", context=context)
    plan = (cross if separate else before).plan_of(Stream("video", ROWS))
    held = plan.query_rows(mesh.rank)
    out = cross(take(query, held), text, text, mask, plan=plan)
    gathered = context.transport.gather_rows(out, plan)
    whole = Attention(HEADS, SIZE, role="cross", kind="cross", context=context_of(backend=backend))
    return relative_error(gathered, whole(query, text, text, mask).double())


@pytest.mark.ray
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
def test_cross_attention_over_ranks_takes_masks_of_each_query(
    gloo_ranks: GlooRanks, backend: str, separate: bool
) -> None:
    assert max(gloo_ranks(3).run(cross_with_a_mask, backend, separate)) < 1e-6


# --- rows of any stream -----------------------------------------------------------------------------------------------


def gathered_streams(mesh: Mesh) -> list[bool]:
    """Whether each stream of a joint call comes back whole, in its shape, from what the ranks hold."""
    layer = layer_of(mesh, ParallelConfig(strategy="ulysses"))
    plan, transport = layer.plan_of(*TEXT_AND_VIDEO), layer.context.transport
    whole = tensors()[0].split([stream.length for stream in plan.streams], dim=1)
    found = []
    for index, (stream, rows) in enumerate(zip(plan.streams, whole, strict=True)):
        mine = take(rows, plan.stream_rows(stream.name, mesh.rank))
        found += [torch.equal(transport.gather_rows(mine, plan, which), rows) for which in (stream.name, index)]
    first: Rows = plan.stream_rows("video", mesh.rank)
    found.append(torch.equal(transport.gather_rows(take(whole[1].flatten(2), first), plan), whole[1].flatten(2)))
    return found


@pytest.mark.ray
def test_the_rows_of_any_stream_can_be_gathered(gloo_ranks: GlooRanks) -> None:
    for found in gloo_ranks(3).run(gathered_streams):
        assert all(found)
