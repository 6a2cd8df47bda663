"""Exchanges in fp8: what they lose, what they never touch, and what they carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from backends.platforms.facts import DeviceFacts
from configs.faults import FaultError
from configs.schema import AttentionConfig, ParallelConfig
from parallel.exchange import SCALE_BYTES
from parallel.mesh import Mesh
from parallel.plan import Grid, Stream, plan_streams
from parallel.planner import plan_role
from parallel.transport.fp8 import dequantise, quantise
from parallel.transport.torch_dist import TorchTransport
from tests.exact import relative_error
from tests.parallel.cases import Case, exact, layer_of, run_case, tensors_of
from tests.parallel.layers import same_bits
from tests.ranks import Ranks

GlooRanks = Callable[[int], Ranks]
FP8 = ParallelConfig(exchange_dtype="fp8")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TEXT = Stream("text", 7, sharded=False)


def there_and_back(rows: torch.Tensor) -> torch.Tensor:
    packed = quantise(rows)
    assert (packed.shape, packed.dtype) == ((*rows.shape[:-1], rows.shape[-1] + SCALE_BYTES), torch.uint8)
    return dequantise(packed, rows.dtype)


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 64])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_a_number_comes_back_within_a_sixteenth_or_a_step_of_its_row(
    dtype: torch.dtype, size: int, magnitude: float
) -> None:
    rows = (rows_of(2, 5, 3, size) * magnitude).to(dtype)
    got = there_and_back(rows)
    assert (got.shape, got.dtype) == (rows.shape, dtype)
    step = rows.abs().amax(dim=-1, keepdim=True).double() / 448 * 2**-10
    bound = torch.maximum(rows.abs().double() / 16, step) * 1.01 + 2**-24  # and what the dtype itself rounds
    assert ((got.double() - rows.double()).abs() <= bound).all()
    assert torch.equal(got.sign(), rows.sign()) or magnitude < 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_come_back_as_zeros(dtype: torch.dtype) -> None:
    rows = rows_of(1, 4, 2, 8, dtype=dtype)
    rows[:, 1] = 0
    got = there_and_back(rows)
    assert (got[:, 1] == 0).all()
    assert (got[:, [0, 2, 3]] != 0).any(dim=-1).all()


@pytest.mark.parametrize("outlier", [1e30, float("inf"), float("nan")])
def test_an_outlier_harms_only_its_own_row_and_head(outlier: float) -> None:
    rows = rows_of(2, 6, 3, 16)
    spoiled = rows.clone()
    spoiled[1, 2, 1, 4] = outlier
    usual, got = there_and_back(rows), there_and_back(spoiled)
    others = torch.ones(2, 6, 3, dtype=torch.bool)
    others[1, 2, 1] = False
    assert same_bits(got[others], usual[others])
    assert not torch.equal(got[1, 2, 1], usual[1, 2, 1])
    assert torch.isfinite(got[1, 2, 1]).all() == (outlier == 1e30)


def test_the_smallest_numbers_do_not_become_nan() -> None:
    for smallest in (1e-45, 1e-38, 1e-30):
        got = there_and_back(torch.full((1, 1, 1, 4), smallest))
        assert (got >= 0).all()
        assert (got <= 2 * smallest).all()


# --- over ranks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    key: bool
    query_error: float
    value_error: float
    untouched: bool
    out_error: float
    lse: bool
    zeros: bool


def exchange(mesh: Mesh, heads: tuple[int, int], length: int, dtype: torch.dtype) -> Moved:
    plan = plan_streams(
        (Stream("video", length),), heads[0], Grid(mesh.world_size), "ulysses", kv_heads=heads[1], exchange="fp8"
    )
    generator = torch.Generator().manual_seed(3)
    full = [torch.randn(2, length, count, 6, generator=generator).to(dtype) for count in (heads[0], heads[1], heads[1])]
    full[2][:, length // 2] = 0
    held = plan.rows[mesh.rank].runs
    span = slice(held[0].start, held[0].stop) if held else slice(0, 0)
    mine = [tensor[:, span].transpose(2, 3).contiguous().transpose(2, 3) for tensor in full]  # rows lie apart
    before = [tensor.clone() for tensor in mine]
    transport = TorchTransport(mesh)
    query, key, value = transport.scatter_heads(mine[0], mine[1], mine[2], plan)
    q, kv = plan.heads.query[mesh.rank], plan.heads.kv[mesh.rank]
    expected = [t[:, :, h.start : h.stop] for t, h in zip(full, (q, kv, kv), strict=True)]
    out = transport.gather_heads(full[0][:, :, q.start : q.stop].contiguous(), plan)
    lse = full[0][:, :, q.start : q.stop, :1].float().contiguous()
    returned = transport.gather_heads(lse, plan, whole=True)

    def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        return relative_error(got, wanted) if wanted.numel() else 0.0

    return Moved(
        key=same_bits(key, expected[1]),
        query_error=error(query, expected[0]),
        value_error=error(value, expected[2]),
        untouched=all(map(same_bits, mine, before)),
        out_error=error(out, mine[0]),
        lse=same_bits(returned, full[0][:, span, :, :1].float().contiguous()),
        zeros=bool((value[:, length // 2] == 0).all()),
    )


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("heads", [(4, 4), (5, 5), (6, 2), (7, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("length", [1, 2, 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_log_sum_exps_are_exact_and_the_rest_is_near(
    gloo_ranks: GlooRanks, world_size: int, heads: tuple[int, int], length: int, dtype: torch.dtype
) -> None:
    for rank, moved in enumerate(gloo_ranks(world_size).run(exchange, heads, length, dtype)):
        assert moved.key, rank
        assert moved.lse, rank
        assert moved.untouched, rank
        assert moved.zeros, rank
        assert max(moved.query_error, moved.value_error, moved.out_error) < 0.04, rank


GRIDS = {
    "ulysses 2": (2, replace(FP8, strategy="ulysses")),
    "ulysses 3": (3, replace(FP8, strategy="ulysses")),
    "ulysses 2 x ring 2": (4, replace(FP8, ulysses=2, ring=2)),
    "ulysses 2 x gather 2": (4, replace(FP8, ulysses=2, strategy="gather_kv")),
}
CASES = {
    "even": Case(heads=6, dtype=torch.float32),
    "uneven heads": Case(heads=5, kv_heads=5, dtype=torch.float32),
    "grouped": Case(heads=6, kv_heads=2, dtype=torch.float32, size=6),
    "one KV head": Case(heads=7, kv_heads=1, dtype=torch.bfloat16, size=3),
    "text replicated": Case((Stream("video", 29), TEXT), kind="joint", dtype=torch.float32),
    "text in front, sharded": Case((Stream("text", 7), Stream("video", 29)), kind="joint", dtype=torch.float32),
    "causal, padded": Case(causal=True, carried=("key_padding",), dtype=torch.float32),
    "no rows for some": Case((Stream("video", 1),), dtype=torch.float32),
}


@pytest.mark.ray
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", CASES)
def test_attention_differs_little_and_moves_what_the_plan_says(gloo_ranks: GlooRanks, grid: str, name: str) -> None:
    (world_size, parallel), case = GRIDS[grid], CASES[name]
    whole, whole_lse = exact(case)
    plain = gloo_ranks(world_size).run(run_case, case, replace(parallel, exchange_dtype="same"))
    for ran, without in zip(gloo_ranks(world_size).run(run_case, case, parallel), plain, strict=True):
        assert ran.measured == ran.planned
        assert ran.measured.calls == without.measured.calls
        positions = torch.tensor(ran.positions, dtype=torch.long)
        if not ran.positions:
            continue
        assert 0 < relative_error(ran.out, whole[:, positions]) < 0.1
        finite = torch.isfinite(whole_lse[:, :, positions])
        assert torch.equal(torch.isfinite(ran.lse), finite)
        assert (ran.lse.double() - whole_lse[:, :, positions])[finite].abs().max() < 0.2


@pytest.mark.parametrize(("dtype", "ratio"), [(2, 3 / 4), (4, 5 / 8)])
def test_bytes_are_those_of_the_rows_and_their_scales(dtype: int, ratio: float) -> None:
    from parallel.traffic import call_traffic

    streams = (Stream("video", 10),)
    sent = {}
    for exchange_dtype in ("same", "fp8"):
        plan = plan_streams(streams, 4, Grid(2), "ulysses", exchange=exchange_dtype)  # type: ignore[arg-type]
        sent[exchange_dtype] = call_traffic(plan, 0, batch=1, head_size=128, element_size=dtype).bytes_sent
    rows, heads, size = 5, 2, 128
    assert sent["same"] == {
        "scatter_heads": 3 * rows * heads * size * dtype,
        "gather_heads": rows * heads * size * dtype,
    }
    quantised = rows * heads * (size + 4)
    assert sent["fp8"] == {"scatter_heads": 2 * quantised + rows * heads * size * dtype, "gather_heads": quantised}
    assert sum(sent["fp8"].values()) / sum(sent["same"].values()) < ratio


# --- what is told, and refused ----------------------------------------------------------------------------------------


def planned(parallel: ParallelConfig, world_size: int = 2, kind: Any = "self", heads: int = 4) -> Any:
    from backends.registry import Registry
    from backends.selector import Selector
    from parallel.models.facts import RoleFacts

    selector = Selector(DeviceFacts("cpu"), AttentionConfig(), Registry())
    return plan_role(RoleFacts(kind, kind, kind, 2, heads, heads, 8), "float32", world_size, parallel, selector)


def test_a_role_whose_exchange_is_fp8_is_lossy() -> None:
    got = planned(FP8)
    assert (got.way.exchange, got.selection.exchange_dtype) == ("fp8", "fp8")
    assert got.selection.exactness == "lossy-quantised"
    without = planned(ParallelConfig())
    assert (without.selection.exchange_dtype, without.selection.exactness) == ("same", "exact")


def test_a_role_that_exchanges_nothing_stays_exact() -> None:
    for got in (planned(FP8, kind="cross"), planned(FP8, world_size=1)):
        assert (got.way.exchange, got.selection.exchange_dtype) == ("same", "same")
        assert got.selection.exactness == "exact"


@pytest.mark.parametrize("strategy", ["ring", "gather_kv"])
def test_a_ring_alone_refuses_fp8_with_the_reason(strategy: str) -> None:
    with pytest.raises(FaultError) as caught:
        planned(replace(FP8, strategy=strategy))
    assert str(caught.value) == (
        f"parallel.exchange_dtype=fp8: {strategy} 1x2 moves keys and values alone, and keys are never quantised; leave "
        "it on same, or give parallel.ulysses a degree above 1"
    )


def test_an_automatic_strategy_passes_over_a_ring_for_fp8() -> None:
    got = planned(FP8, world_size=3)
    assert (got.way.strategy, got.way.exchange) == ("ulysses", "fp8")
    (rejected,) = got.selection.rejected_strategies
    assert rejected.strategy == "ring 1x3"
    assert rejected.faults[0].key == "parallel.exchange_dtype"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_inputs_that_require_gradients_are_refused_before_any_exchange(which: int) -> None:
    case = Case(dtype=torch.float32)
    layer = layer_of(Mesh(0, 2, torch.device("cpu")), case, FP8)
    plan = layer.plan_of(*case.streams)
    mine = [tensor[:, : len(plan.rows[0])].clone() for tensor in tensors_of(case)]
    mine[which].requires_grad_()
    with pytest.raises(FaultError, match=r"attention: parallel\.exchange_dtype=fp8: rounding to fp8 has no gradient"):
        layer(*mine, plan=plan)


def test_a_plan_of_another_exchange_is_refused() -> None:
    case = Case(dtype=torch.float32)
    layer = layer_of(Mesh(0, 2, torch.device("cpu")), case, FP8)
    plan = replace(layer.plan_of(*case.streams), exchange="same")
    mine = [tensor[:, : len(plan.rows[0])] for tensor in tensors_of(case)]
    with pytest.raises(
        ValueError, match="its calls go by ulysses 2x1 in fp8, and the plan is for ulysses 2x1; make a plan with"
    ):
        layer(*mine, plan=plan)
