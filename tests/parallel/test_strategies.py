"""Every strategy over live ranks: the whole answer, for any lengths, heads and what calls carry."""

from __future__ import annotations

import pytest

from parallel.plan import Stream
from tests.parallel.cases import GRIDS, Case, GlooRanks, check

pytestmark = pytest.mark.ray

by_grid = pytest.mark.parametrize("grid", GRIDS)


@by_grid
@pytest.mark.parametrize("length", [1, 2, 5, 29, 36])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (5, 5), (4, 1)], ids=str)
def test_any_length_and_any_heads(gloo_ranks: GlooRanks, grid: str, length: int, heads: tuple[int, int]) -> None:
    world_size, parallel = GRIDS[grid]
    case = Case((Stream("video", length),), heads[0], heads[1])
    check(gloo_ranks(world_size), case, parallel)


CARRIED = (
    (),
    *((name,) for name in ("key_padding", "full", "per_head", "blind", "window", "soft_cap", "sinks", "packed")),
    ("packed", "window", "sinks"),
    ("per_head", "packed", "sinks"),
)


@by_grid
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("carried", CARRIED, ids=str)
def test_whatever_a_call_carries(gloo_ranks: GlooRanks, grid: str, causal: bool, carried: tuple[str, ...]) -> None:
    world_size, parallel = GRIDS[grid]
    check(gloo_ranks(world_size), Case(heads=5, kv_heads=5, causal=causal, carried=carried), parallel)
