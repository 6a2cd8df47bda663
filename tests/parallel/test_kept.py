"""Masks of blocks are made once for all layers and calls that carry the same ones, and go with them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from backends.interface import AttentionMetadata
from configs.schema import ParallelConfig
from parallel import restrict
from parallel.kept import Kept
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.restrict import of_heads, of_rows
from parallel.rows import rows
from parallel.strategies import work
from tests.parallel.cases import GRIDS, Case, GlooRanks, exact, exact_of, layer_of, metadata_of, tensors_of
from tests.parallel.layers import CPU, layer_with

MADE = ("_bounded", "_cut", "_heads", "_blocks_of")


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
    homes = dict.fromkeys(MADE, restrict) | {"_index": work}
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
        assert [made["_heads"] for made, _ in once] == [2 * int("each head" in name)] * 3
    else:
        assert all(made["_bounded"] + made["_cut"] for made, _ in once)


def written_to(mesh: Mesh) -> list[float]:
    """Errors of calls between which the mask is written to."""
    case = Case(carried=("full",), causal=True)
    layer, carried = layer_of(mesh, case, ParallelConfig(strategy="ring")), metadata_of(case)
    plan = layer.plan_of(*case.streams)
    held, errors = plan.shares[mesh.rank].query_rows, []
    query, key, value = tensors_of(case)
    assert carried.mask is not None
    for column in range(3):
        carried.mask[..., column] ^= True
        out = layer(take(query, held), take(key, held), take(value, held), carried, plan=plan)
        errors.append(float((out - take(exact_of(case, (query, key, value), carried)[0], held)).abs().amax()))
    return errors


@pytest.mark.ray
def test_a_mask_that_was_written_to_is_another_one(gloo_ranks: GlooRanks) -> None:
    for errors in gloo_ranks(3).run(written_to):
        assert max(errors) < 1e-11


HEADS = range(1, 3)
QUERIES, KEYS = rows(range(2, 5)), rows(range(0, 3), range(6, 9))


def cut(mask: torch.Tensor, kept: Kept, window: tuple[int, int] | None = None) -> torch.Tensor:
    """Of some heads and then of a block, as a call does it."""
    of_mine = of_heads(AttentionMetadata(mask=mask, window=window), HEADS, kept)
    found = of_rows(of_mine, QUERIES, KEYS, CPU, kept).mask
    assert found is not None
    return found


def full_mask() -> torch.Tensor:
    return torch.rand(1, 4, 9, 9) < 0.5


@pytest.mark.parametrize("window", [None, (2, 2)])
def test_what_is_made_of_a_mask_goes_with_it(window: tuple[int, int] | None) -> None:
    kept, mask = Kept(), full_mask()
    assert cut(mask, kept, window) is cut(mask, kept, window)
    assert len(kept) == 2
    gone, left = weakref.ref(mask), weakref.ref(cut(mask, kept, window))
    del mask
    gc.collect()
    assert gone() is None
    assert left() is None
    assert (len(kept), kept.bytes) == (0, 0)


def test_a_block_mask_is_cut_once_and_goes_too() -> None:
    def of_each_head(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return key <= row + head

    kept, blocks = Kept(), create_block_mask(of_each_head, None, 4, 300, 300, device="cpu")
    once, again = (of_heads(AttentionMetadata(block_mask=blocks), HEADS, kept).block_mask for _ in range(2))
    assert isinstance(once, BlockMask)
    assert once is again
    assert of_heads(AttentionMetadata(block_mask=blocks), range(2), kept).block_mask is not once
    gone = weakref.ref(blocks)
    del blocks
    gc.collect()
    assert gone() is None
    assert (len(kept), kept.bytes) == (0, 0)


def test_equal_masks_are_not_taken_for_each_other() -> None:
    kept, mask = Kept(), full_mask()
    assert cut(mask, kept) is not cut(mask.clone(), kept)


def test_only_so_much_is_kept_and_the_oldest_goes_first() -> None:
    kept = Kept(limit=250)
    for size in (100, 101, 100, 102):
        assert kept.get(None, size, lambda size=size: torch.ones(size, dtype=torch.uint8)).numel() == size  # type: ignore[misc]
    assert (len(kept), kept.bytes) == (2, 202)
    assert kept.get(None, 300, lambda: torch.ones(300, dtype=torch.uint8)).numel() == 300
    assert (len(kept), kept.bytes) == (0, 0)


def test_what_records_gradients_or_is_of_inference_mode_is_not_kept() -> None:
    kept, bias = Kept(), torch.zeros(1, 4, 9, 9, requires_grad=True)
    of_mine = of_heads(AttentionMetadata(bias=bias), HEADS, kept).bias
    assert of_mine is not None
    of_mine.sum().backward()
    assert bias.grad is not None
    assert int(bias.grad.sum()) == 2 * 81
    with torch.inference_mode():
        mask = full_mask()
        before = cut(mask, kept).clone()
        mask ^= True
        assert torch.equal(cut(mask, kept), ~before)
    assert len(kept) == 0


def test_what_was_made_in_inference_mode_stays_there() -> None:
    kept, mask = Kept(), full_mask()
    with torch.inference_mode():
        assert cut(mask, kept, (2, 2)).is_inference()
    assert not cut(mask, kept, (2, 2)).is_inference()


def test_a_length_that_changes_is_another_block() -> None:
    kept, window = Kept(), AttentionMetadata(window=(1, 1))
    shapes = {of_rows(window, rows(range(n)), rows(range(n)), CPU, kept).mask.shape for n in (3, 4, 3)}  # type: ignore[union-attr]
    assert shapes == {(1, 1, 3, 3), (1, 1, 4, 4)}
    assert len(kept) == 2
