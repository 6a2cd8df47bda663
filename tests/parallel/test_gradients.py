"""Gradients over live ranks: those of the whole attention in fp64, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.interface import AttentionMetadata
from configs.schema import ParallelConfig
from parallel.events import Traffic
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream
from parallel.traffic import call_traffic
from tests.parallel.cases import GRIDS, Case, GlooRanks, exact_of, layer_of, metadata_of, on_some_grids, tensors_of
from tests.parallel.test_joint import STREAMS

pytestmark = pytest.mark.ray

Gradients = list[torch.Tensor]
CASES = {
    "plain": Case(),
    "grouped": Case(heads=6, kv_heads=2),
    "uneven heads": Case(heads=5, kv_heads=1),
    "fewer heads than ranks": Case(heads=1, kv_heads=1),
    "fewer rows than ranks": Case((Stream("video", 2),)),
    "one row": Case((Stream("video", 1),)),
    "causal": Case(causal=True),
    "causal window": Case(causal=True, carried=("window",)),
    "blind rows": Case(carried=("blind",)),
    "mask of each head": Case(carried=("per_head",)),
    "sinks and documents": Case(heads=5, kv_heads=5, carried=("sinks", "packed")),
    "soft cap": Case(carried=("soft_cap",)),
    "bias": Case(carried=("bias of each head", "sinks")),
    "text": Case(STREAMS["text in front"], kind="joint"),
    "keys alone": Case(STREAMS["keys alone behind"], kind="joint", heads=6, kv_heads=2),
    "sharded text": Case(STREAMS["sharded text behind"], kind="joint"),
    "causal text": Case(STREAMS["text in front"], kind="joint", causal=True),
    "causal streams": Case(STREAMS["video in the middle"], kind="self", causal=True, carried=("sinks",)),
    "many streams": Case(STREAMS["video in the middle"], kind="joint", carried=("full", "sinks")),
}


def weights_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What the loss multiplies outputs and log-sum-exps with."""
    generator = torch.Generator().manual_seed(2)
    out = torch.randn(case.batch, case.queries, case.heads, case.size, generator=generator, dtype=torch.float64)
    return out, torch.randn(case.batch, case.heads, case.queries, generator=generator, dtype=torch.float64)


def loss_of(out: torch.Tensor, lse: torch.Tensor | None, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = (out * weights[0]).sum()
    if lse is None:
        return loss
    return loss + (lse.masked_fill(torch.isinf(lse), 0) * weights[1]).sum()


def learned(case: Case) -> tuple[Gradients, AttentionMetadata]:
    """Inputs that want gradients: Q, K, V and what the call carries and is learned."""
    tensors = [tensor.requires_grad_() for tensor in tensors_of(case)]
    carried = metadata_of(case)
    tensors += [tensor.requires_grad_() for tensor in (carried.sinks, carried.bias) if tensor is not None]
    return tensors, carried


def backward_on_rank(mesh: Mesh, case: Case, parallel: ParallelConfig, lse: bool) -> tuple[Gradients, Traffic, Traffic]:
    """This rank's gradients of Q, K and V, put back to their places, and of the sinks; rows of replicated streams bear
    an equal part of the loss on every rank.
    """
    layer = layer_of(mesh, case, parallel, lse=lse)
    plan = layer.plan_of(*case.streams)
    share = plan.shares[mesh.rank]
    tensors, carried = learned(case)
    mine = [take(t, held) for t, held in zip(tensors, (share.query_rows, share.key_rows, share.key_rows), strict=False)]
    if lse:
        out, log_sums = layer.forward_with_lse(mine[0], mine[1], mine[2], carried, plan=plan)
    else:
        out, log_sums = layer(mine[0], mine[1], mine[2], carried, plan=plan), None
    moved = layer.context.transport.take_traffic()
    factors = torch.ones(case.queries, dtype=torch.float64)
    factors[[row for row in share.query_rows if row not in set(share.sent_queries)]] = 1 / mesh.world_size
    of_out, of_lse = weights_of(case)
    of_out, of_lse = of_out * factors[:, None, None], of_lse * factors
    loss_of(out, log_sums, (take(of_out, share.query_rows), take(of_lse, share.query_rows, dim=2))).backward()
    planned = call_traffic(
        plan, mesh.rank, batch=case.batch, head_size=case.size, element_size=8, lse=lse, gradient=True
    )
    found = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
    return found, moved, planned


def whole_gradients(case: Case, lse: bool) -> Gradients:
    tensors, carried = learned(case)
    out, log_sums = exact_of(case, (tensors[0], tensors[1], tensors[2]), carried)
    loss_of(out, log_sums if lse else None, weights_of(case)).backward()
    return [tensor.grad for tensor in tensors]  # type: ignore[misc]


def check_gradients(gloo_ranks: GlooRanks, grid: str, case: Case, lse: bool = False) -> None:
    world_size, parallel = GRIDS[grid]
    results = gloo_ranks(world_size).run(backward_on_rank, case, parallel, lse)
    for index, whole in enumerate(whole_gradients(case, lse)):
        summed = torch.stack([found[index] for found, _, _ in results]).sum(dim=0)
        assert torch.allclose(summed, whole, atol=1e-10, rtol=1e-10), index
    for _, moved, planned in results:
        assert moved == planned


@on_some_grids("name", CASES, count=3)
def test_gradients_are_those_of_the_whole_attention(gloo_ranks: GlooRanks, grid: str, name: str) -> None:
    check_gradients(gloo_ranks, grid, CASES[name])


@pytest.mark.parametrize("grid", ["ulysses 3", "ring 3", "ulysses 2 x ring 2", "gather 3"])
@pytest.mark.parametrize("name", ["grouped", "causal", "blind rows", "many streams", "sinks and documents"])
def test_the_log_sum_exp_has_gradients_too(gloo_ranks: GlooRanks, grid: str, name: str) -> None:
    check_gradients(gloo_ranks, grid, CASES[name], lse=True)


@pytest.mark.parametrize("grid", ["ulysses 3", "gather 3", "ulysses 2 x gather 2"])
@pytest.mark.parametrize(
    "case",
    [
        Case(backend="TORCH_SDPA"),
        Case(backend="TORCH_SDPA", heads=6, kv_heads=2, causal=True),
        Case(backend="TORCH_SDPA", carried=("per_head",)),
        Case(STREAMS["text in front"], kind="joint", backend="TORCH_SDPA"),
    ],
    ids=str,
)
def test_gradients_through_torchs_own_kernel(gloo_ranks: GlooRanks, grid: str, case: Case) -> None:
    check_gradients(gloo_ranks, grid, case)


def requires_one(mesh: Mesh, which: int, parallel: ParallelConfig) -> Any:
    case = Case()
    layer = layer_of(mesh, case, parallel)
    plan = layer.plan_of(*case.streams)
    mine = [take(tensor, plan.rows[mesh.rank]).clone() for tensor in tensors_of(case)]
    mine[which].requires_grad_()
    layer(mine[0], mine[1], mine[2], plan=plan).square().sum().backward()
    return mine[which].grad is not None and bool(mine[which].grad.isfinite().all())  # type: ignore[union-attr]


@pytest.mark.parametrize("grid", ["ulysses 3", "ring 3", "gather 3", "ulysses 2 x ring 2"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_input_that_requires_gradients_is_enough(gloo_ranks: GlooRanks, grid: str, which: int) -> None:
    world_size, parallel = GRIDS[grid]
    assert all(gloo_ranks(world_size).run(requires_one, which, parallel))
