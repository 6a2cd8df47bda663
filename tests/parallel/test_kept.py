"""What follows from a plan alone is made once for all layers and calls; what is made of masks is made of them as they
are.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from backends.interface import AttentionMetadata
from configs.schema import ParallelConfig
from parallel import restrict
from parallel.kept import ENTRIES, Kept
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.restrict import of_rows
from parallel.rows import rows
from parallel.strategies import work
from tests.parallel.cases import GRIDS, Case, GlooRanks, exact, exact_of, layer_of, metadata_of, tensors_of
from tests.parallel.layers import CPU, layer_with

MADE = ("_seen", "_index")


def made_in(mesh: Mesh, case: Case, parallel: ParallelConfig, calls: int) -> tuple[Counter[str], float]:
    """What a rank makes of its masks in some calls of two layers, and their largest error."""
    layer, made = layer_of(mesh, case, parallel), Counter[str]()
    features = layer.rules.call.features
    options: dict[str, Any] = {"num_kv_heads": case.kv_heads, "causal": case.causal, "features": features}
    layers = layer, layer_with(layer.context, case.heads, case.size, **options)
    carried, plan = metadata_of(case), layer.plan_of(*case.streams)
    share, worst = plan.shares[mesh.rank], 0.0
    held = share.query_rows, share.key_rows, share.key_rows
    query, key, value = (take(tensor, place) for tensor, place in zip(tensors_of(case), held, strict=True))
    homes = {"_seen": restrict, "_index": work}
    real = {name: getattr(home, name) for name, home in homes.items()}

    def counted(name: str) -> Any:
        def make(*args: Any) -> Any:
            made[name] += 1
            return real[name](*args)

        return make

    try:
        for name, home in homes.items():
            setattr(home, name, counted(name))
        for _ in range(calls):
            for each in layers:
                out = each(query, key, value, carried, plan=plan)
                worst = max(worst, float((out - take(exact(case)[0], share.query_rows)).abs().amax()))
    finally:
        for name, home in homes.items():
            setattr(home, name, real[name])
    return made, worst


CASES = {
    "window": Case(carried=("window",)),
    "causal window": Case(causal=True, carried=("window",)),
    "causal mask": Case(causal=True, carried=("full",)),
    "mask of each head and bias": Case(heads=5, kv_heads=5, carried=("per_head", "bias of each head")),
    "KV heads that are expanded": Case(heads=8, kv_heads=2, carried=("key_padding", "window")),
}


@pytest.mark.ray
@pytest.mark.parametrize("grid", ["ring 3", "gather 3", "ulysses 2 x ring 2", "ulysses 3"])
@pytest.mark.parametrize("name", CASES)
def test_masks_of_blocks_are_made_once_whatever_the_number_of_layers_and_calls(
    gloo_ranks: GlooRanks, grid: str, name: str
) -> None:
    world_size, parallel = GRIDS[grid]
    once = gloo_ranks(world_size).run(made_in, CASES[name], parallel, 1)
    often = gloo_ranks(world_size).run(made_in, CASES[name], parallel, 3)
    assert [made for made, _ in once] == [made for made, _ in often]
    assert max(worst for _, worst in (*once, *often)) < 1e-11
    if grid == "ulysses 3":  # 2 KV heads and 8 of queries over 3 ranks
        assert [made["_index"] for made, _ in once] == [int(name == "KV heads that are expanded")] * 3
    elif "window" in CASES[name].carried:
        assert all(made["_seen"] for made, _ in once)


def written_to(mesh: Mesh) -> list[float]:
    """Errors of calls between which the mask is written to."""
    case = Case(carried=("full",), causal=True)
    layer, carried = layer_of(mesh, case, ParallelConfig(strategy="ring")), metadata_of(case)
    plan = layer.plan_of(*case.streams)
    held, errors = plan.shares[mesh.rank].query_rows, []
    query, key, value = tensors_of(case)
    assert carried.mask is not None
    for column in range(3):
        flipped = carried.mask[..., column] ^ True
        carried.mask.data[..., column] = flipped if mesh.rank else flipped.clone()
        dist.broadcast(carried.mask.view(torch.uint8), 0)  # neither tells the tensor's version
        out = layer(take(query, held), take(key, held), take(value, held), carried, plan=plan)
        errors.append(float((out - take(exact_of(case, (query, key, value), carried)[0], held)).abs().amax()))
    return errors


@pytest.mark.ray
def test_a_mask_that_was_written_to_is_another_one(gloo_ranks: GlooRanks) -> None:
    for errors in gloo_ranks(3).run(written_to):
        assert max(errors) < 1e-11


def test_only_so_much_is_kept_and_the_oldest_goes_first() -> None:
    kept = Kept(limit=250)
    for size in (100, 101, 100, 102):
        assert kept.get(size, lambda size=size: torch.ones(size, dtype=torch.uint8)).numel() == size  # type: ignore[misc]
    assert (len(kept), kept.bytes) == (2, 202)
    assert kept.get(300, lambda: torch.ones(300, dtype=torch.uint8)).numel() == 300
    assert (len(kept), kept.bytes) == (0, 0)
    for number in range(ENTRIES + 3):
        kept.get(number, lambda: torch.ones(0))
    assert len(kept) == ENTRIES


WINDOW = AttentionMetadata(window=(2, 2))


def bounded(kept: Kept, length: int = 9) -> torch.Tensor:
    found = of_rows(WINDOW, rows(range(length)), rows(range(length)), CPU, kept).mask
    assert found is not None
    return found


def test_a_window_is_worked_out_once_for_each_block() -> None:
    kept = Kept()
    assert bounded(kept) is bounded(kept)
    assert {bounded(kept, n).shape for n in (3, 4, 3)} == {(1, 1, 3, 3), (1, 1, 4, 4)}
    assert len(kept) == 3


def test_what_was_made_in_inference_mode_stays_there() -> None:
    kept = Kept()
    with torch.inference_mode():
        assert bounded(kept).is_inference()
    assert not bounded(kept).is_inference()


def test_what_a_mode_only_plays_through_is_not_kept() -> None:
    kept = Kept()
    with FakeTensorMode():
        bounded(kept)
    assert len(kept) == 0
    assert type(bounded(kept)) is torch.Tensor


def test_threads_share_it() -> None:
    kept = Kept(limit=400)

    def work_on(seed: int) -> None:
        for step in range(300):
            size = 1 + (seed * 7 + step) % 50
            assert kept.get(size, lambda size=size: torch.ones(size, dtype=torch.uint8)).numel() == size  # type: ignore[misc]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work_on, range(6)))
    assert kept.bytes == sum(tensor.nbytes for tensor in kept._made.values()) <= 400
