"""Every strategy over live ranks: the whole answer, for any lengths, heads and what calls carry."""

from __future__ import annotations

import pytest
import torch

from configs.schema import ParallelConfig
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream, plan_sequence
from tests.exact import TOLERANCE, relative_error
from tests.parallel.cases import (
    GRIDS,
    Case,
    GlooRanks,
    check,
    exact,
    metadata_of,
    on_some_grids,
    run_case,
    tensors_of,
)
from tests.parallel.layers import context_of, layer_with

pytestmark = pytest.mark.ray

SIZES = ((1, 6, 6), (2, 6, 2), (5, 5, 5), (29, 4, 1), (36, 6, 6), (1, 4, 1), (2, 5, 5))
"""Rows, heads and KV heads: fewer rows than ranks, heads that ranks do not divide, one KV head for all."""


@on_some_grids("size", SIZES, count=4)
def test_any_length_and_any_heads(gloo_ranks: GlooRanks, grid: str, size: tuple[int, int, int]) -> None:
    world_size, parallel = GRIDS[grid]
    length, heads, kv_heads = size
    case = Case((Stream("video", length),), heads, kv_heads)
    check(gloo_ranks(world_size), case, parallel)


CARRIED = (
    (),
    *((name,) for name in ("key_padding", "full", "per_head", "blind", "window", "soft_cap", "sinks", "packed")),
    ("bias",),
    ("bias of each head", "window", "key_padding"),
    ("packed", "window", "sinks"),
    ("per_head", "packed", "sinks"),
)


@pytest.mark.parametrize("causal", [False, True])
@on_some_grids("carried", CARRIED, count=3)
def test_whatever_a_call_carries(gloo_ranks: GlooRanks, grid: str, causal: bool, carried: tuple[str, ...]) -> None:
    world_size, parallel = GRIDS[grid]
    check(gloo_ranks(world_size), Case(heads=5, kv_heads=5, causal=causal, carried=carried), parallel)


def test_each_grid_runs_what_its_name_says(gloo_ranks: GlooRanks) -> None:
    named = {
        "ulysses": "ulysses",
        "ring": "ring",
        "gather": "gather_kv",
        "ulysses x ring": "ulysses_ring",
        "ulysses x gather": "ulysses_gather_kv",
    }
    for grid, (world_size, parallel) in GRIDS.items():
        (ran, *_) = gloo_ranks(world_size).run(run_case, Case(), parallel)
        kind = "".join(letter for letter in grid if not letter.isdigit()).replace("  ", " ").strip()
        assert ran.strategy == named[kind], grid


@pytest.mark.parametrize("causal", [False, True])
@on_some_grids("dtype", [torch.float32, torch.bfloat16], count=5)
def test_narrow_numbers_are_as_near_as_on_one_rank(
    gloo_ranks: GlooRanks, grid: str, causal: bool, dtype: torch.dtype
) -> None:
    world_size, parallel = GRIDS[grid]
    case = Case((Stream("video", 45),), 4, 2, 32, causal=causal, dtype=dtype)
    results = gloo_ranks(world_size).run(run_case, case, parallel)
    whole, whole_lse = exact(case)
    for ran in results:
        out, lse = whole[:, ran.positions], whole_lse[:, :, ran.positions]
        assert (ran.out.dtype, ran.lse.dtype) == (dtype, torch.float32)
        assert relative_error(ran.out, out) <= TOLERANCE[dtype]
        assert relative_error(ran.lse, lse) <= TOLERANCE[torch.float32]


def two_layers(mesh: Mesh, parallel: ParallelConfig) -> list[bool]:
    """Two models with other heads, and lengths that change from call to call."""
    right = []
    for length in (29, 3, 30, 29):
        for heads in (4, 6):
            case = Case((Stream("video", length),), heads, heads)
            ran, whole = run_case(mesh, case, parallel), exact(case)[0]
            right.append(torch.allclose(ran.out, whole[:, ran.positions], atol=1e-11))
    return right


@pytest.mark.parametrize("grid", ["ulysses 3", "ring 3", "ulysses 2 x ring 2", "gather 3"])
def test_models_and_lengths_may_alternate(gloo_ranks: GlooRanks, grid: str) -> None:
    world_size, parallel = GRIDS[grid]
    assert all(all(right) for right in gloo_ranks(world_size).run(two_layers, parallel))


def cross_of_rows(mesh: Mesh, carried: tuple[str, ...]) -> torch.Tensor:
    """Sharded queries, and keys that every rank has, with a mask or documents of the whole sequence."""
    case = Case((Stream("video", 29),), 4, 4, carried=carried)
    layer = layer_with(context_of(mesh, dtype=case.dtype, backend="REFERENCE"), 4, 8, kind="cross")
    plan = plan_sequence(29, 4, mesh.world_size)
    query, key, value = tensors_of(case)
    return layer(take(query, plan.rows[mesh.rank]), key, value, metadata_of(case), plan=plan)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("carried", [("full",), ("per_head",), ("key_padding",), ("packed",)])
def test_cross_attention_cuts_what_is_told_of_each_row(
    gloo_ranks: GlooRanks, world_size: int, carried: tuple[str, ...]
) -> None:
    out = torch.cat(gloo_ranks(world_size).run(cross_of_rows, carried), dim=1)
    assert torch.allclose(out, exact(Case((Stream("video", 29),), 4, 4, carried=carried))[0], atol=1e-11)
