"""Models whose layers differ: each has the plan of its own heads, and all hold the same rows outside attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.interface import Kind
from configs.faults import FaultError
from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.forwards import Forwards
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream
from parallel.traffic import call_traffic
from tests.parallel.cases import GRIDS, Case, GlooRanks, exact, metadata_of, tensors_of
from tests.parallel.layers import CPU, context_of

USUAL = Case((Stream("video", 29),), batch=1)
OTHERS = (
    USUAL,
    replace(USUAL, heads=4, kv_heads=2),
    replace(USUAL, heads=1, kv_heads=1),
    replace(USUAL, size=16),
    replace(USUAL, heads=6, kv_heads=2, carried=("full",)),
    USUAL,
)


def model_of(
    mesh: Mesh, cases: tuple[Case, ...], parallel: ParallelConfig, kinds: tuple[Kind, ...] | None = None
) -> Forwards:
    """A model with a layer for each case, each in a role of its own unless they are alike."""
    context = context_of(mesh, dtype=torch.float64, backend="REFERENCE", parallel=parallel)
    layers = [
        Attention(
            case.heads,
            case.size,
            role=f"{kind}.{case.heads}",
            kind=kind,
            num_kv_heads=case.kv_heads,
            causal=case.causal,
            features=metadata_of(case).features,
            context=context,
            name=f"layer {index}",
        )
        for index, (case, kind) in enumerate(zip(cases, kinds or ("self",) * len(cases), strict=True))
    ]
    return Forwards("model", layers, mesh)


def run_model(
    mesh: Mesh, cases: tuple[Case, ...], parallel: ParallelConfig, kinds: tuple[Kind, ...] | None = None
) -> tuple[float, bool]:
    """The largest error of two forwards on this rank, and whether they moved what the plans say."""
    forwards = model_of(mesh, cases, parallel, kinds)
    transport, worst = forwards.layers[0].context.transport, 0.0
    for _ in range(2):
        forwards.begin(*USUAL.streams, batch=1, dtype=torch.float64)
        for layer, case in zip(forwards.layers, cases, strict=True):
            plan = forwards.plan_for(layer, metadata_of(case))
            held = plan.shares[mesh.rank].query_rows
            assert forwards.plan is not None
            assert held == forwards.plan.shares[mesh.rank].query_rows
            query, key, value = tensors_of(case)
            if layer.strategy != "local":
                key, value = take(key, held), take(value, held)
            out = layer(take(query, held), key, value, metadata_of(case), plan=plan)
            worst = max(worst, float((out - take(exact(case)[0], held)).abs().amax()))
        forwards.finish()
    planned = [
        call_traffic(forwards.plans[shape], mesh.rank, batch=1, head_size=shape.head_size, element_size=8)
        for shape, count in forwards.sharded.items()
        for _ in range(2 * count)
    ]
    sent = sum(sum(traffic.bytes_sent.values()) for traffic in planned)
    return worst, sent == sum(transport.take_traffic().bytes_sent.values())


@pytest.mark.ray
@pytest.mark.parametrize("grid", ["ulysses 2", "ring 3", "gather 3", "ulysses 2 x ring 2"])
def test_layers_of_other_heads_and_sizes_have_plans_of_their_own(gloo_ranks: GlooRanks, grid: str) -> None:
    world_size, parallel = GRIDS[grid]
    for error, as_planned in gloo_ranks(world_size).run(run_model, OTHERS, parallel):
        assert error < 1e-11
        assert as_planned


@pytest.mark.ray
def test_cross_attention_beside_a_causal_ring_cuts_its_mask_where_the_rows_lie(gloo_ranks: GlooRanks) -> None:
    cases = replace(USUAL, causal=True), replace(USUAL, carried=("full",))
    for error, _ in gloo_ranks(3).run(run_model, cases, GRIDS["ring 3"][1], ("self", "cross")):
        assert error < 1e-11


@pytest.mark.parametrize("strategy", ["ulysses", "gather_kv"])
def test_causal_layers_and_others_share_their_rows(strategy: str) -> None:
    cases = replace(USUAL, causal=True), replace(USUAL, heads=4, kv_heads=4)
    forwards = model_of(Mesh(0, 2, CPU), cases, ParallelConfig(strategy=strategy))
    forwards.begin(*USUAL.streams, batch=1, dtype=torch.float64)
    assert len({plan.rows for plan in forwards.plans.values()}) == 1
    assert len(forwards.plans) == 2


def test_layers_that_want_the_same_rows_at_other_places_are_refused() -> None:
    cases = replace(USUAL, causal=True), replace(USUAL, heads=4, kv_heads=4)
    with pytest.raises(FaultError) as caught:
        model_of(Mesh(0, 2, CPU), cases, ParallelConfig(strategy="ring"))
    assert str(caught.value) == (
        "parallel.strategy: a rank holds its rows of model at one place, and layer 0 (self.6) by ring 1x2 wants an "
        "early and a late piece, layer 1 (self.4) by ring 1x2 wants one piece of them; use parallel.strategy=ulysses "
        "or gather_kv, or make all of them causal, or none"
    )
