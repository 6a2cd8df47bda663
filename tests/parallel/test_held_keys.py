"""How much of the other ranks' keys and values a rank holds, and computes with: no more than its queries look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import ShardPlan, Stream
from parallel.strategies.work import Result
from parallel.transport.base import Rotation
from tests.parallel.cases import GRIDS, Case, GlooRanks, layer_of, metadata_of, tensors_of
from tests.parallel.test_joint import STREAMS

RANKS = 4
GATHER, RING = ParallelConfig(strategy="gather_kv"), ParallelConfig(strategy="ring")
LONG = Case((Stream("video", 64),), heads=4, kv_heads=4, size=64)


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that were made under it and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        return out

    @property
    def bytes(self) -> int:
        self._made = {place: made for place, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


def rows_of(layer: Attention, rank: int, case: Case) -> tuple[list[torch.Tensor], ShardPlan]:
    plan = layer.plan_of(*case.streams)
    share = plan.shares[rank]
    held = share.query_rows, share.key_rows, share.key_rows
    return [take(tensor, place).clone() for tensor, place in zip(tensors_of(case), held, strict=True)], plan


def call(layer: Attention, rank: int, case: Case) -> None:
    (query, key, value), plan = rows_of(layer, rank, case)
    layer(query, key, value, metadata_of(case), plan=plan)


def gathered(mesh: Mesh, case: Case) -> tuple[float, float, float]:
    """The most that a call on this rank makes, and what is left of it when the kernel runs, as parts of all keys and
    values; and the keys that the kernel gets, as a part of all.
    """
    layer, live, seen = layer_of(mesh, case, GATHER), Live(), []

    def compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Result:
        seen.append((live.bytes, key.shape[1]))
        return Result(torch.zeros_like(query), None)

    compute.name = "none"  # type: ignore[attr-defined]
    layer.kernel_call = compute  # type: ignore[assignment]
    (query, key, value), plan = rows_of(layer, mesh.rank, case)
    with live:
        layer(query, key, value, plan=plan)
    whole = 2 * tensors_of(case)[1].nbytes
    ((at_kernel, keys),) = seen
    return live.peak / whole, at_kernel / whole, keys / case.keys


@pytest.mark.ray
def test_gathered_keys_are_held_once(gloo_ranks: GlooRanks) -> None:
    for rank, (peak, at_kernel, keys) in enumerate(gloo_ranks(RANKS).run(gathered, LONG)):
        assert peak <= 1 + 2 / RANKS, rank  # what is received, and a message of the rank's own rows as it is packed
        assert at_kernel <= 1.02, rank
        assert keys == 1


@pytest.mark.ray
def test_gathered_keys_of_several_streams_are_held_once_when_the_kernel_runs(gloo_ranks: GlooRanks) -> None:
    case = Case((Stream("text", 8), Stream("video", 56)), heads=4, kv_heads=4, size=64, kind="joint")
    for rank, (peak, at_kernel, keys) in enumerate(gloo_ranks(RANKS).run(gathered, case)):
        assert peak <= 2 + 2 / RANKS, rank
        assert at_kernel <= 1.02 + 1 / RANKS, rank
        assert keys == 1


def keys_seen(mesh: Mesh, case: Case, parallel: ParallelConfig) -> list[int]:
    """How many keys each call of the kernel gets."""
    layer, seen = layer_of(mesh, case, parallel), []
    real = layer.kernel_call

    def compute(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Result:
        seen.append(key.shape[1])
        return real(query, key, *args, **options)

    compute.name = real.name  # type: ignore[attr-defined]
    layer.kernel_call = compute  # type: ignore[assignment]
    call(layer, mesh.rank, case)
    return seen


EXPECTED: Mapping[str, tuple[Case, list[list[int]]]] = {
    "causal": (Case(causal=True), [[10], [20], [29]]),
    "not causal": (Case(), [[29], [29], [29]]),
    "causal window": (Case(causal=True, carried=("window",)), [[10], [13], [12]]),
    "window": (Case(carried=("window",)), [[15], [18], [12]]),
    "causal mask and documents": (Case(causal=True, carried=("full", "packed", "sinks")), [[10], [20], [29]]),
    "fewer rows than ranks": (Case((Stream("video", 2),), causal=True), [[1], [2], [0]]),
    # 7 of text, of which each asks some, and 22 of video, of which 8, 7 and 7
    "text in front": (Case(STREAMS["text in front"], kind="joint", causal=True), [[15], [22], [29]]),
    "text behind": (Case(STREAMS["text behind"], kind="joint", causal=True), [[25], [27], [29]]),
}


@pytest.mark.ray
@pytest.mark.parametrize("name", EXPECTED)
def test_gathered_keys_that_no_query_of_the_rank_may_see_are_not_computed(gloo_ranks: GlooRanks, name: str) -> None:
    case, expected = EXPECTED[name]
    assert gloo_ranks(3).run(keys_seen, case, GRIDS["gather 3"][1]) == expected


def blocks_held(mesh: Mesh, case: Case) -> tuple[int, int]:
    """The most blocks of a ring that this rank holds at once in a call, beside its own rows; and how many it got."""
    layer = layer_of(mesh, case, RING)
    transport, kernel = layer.context.transport, layer.kernel_call
    messages: dict[int, StorageWeakRef] = {}
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, sum(not each.expired() for each in messages.values()))

    real_rotate = transport.rotate

    def rotate(message: torch.Tensor, *args: Any) -> Rotation:
        rotation = real_rotate(message, *args)
        for tensor in (message, rotation.message):
            messages.setdefault(tensor.untyped_storage()._cdata, StorageWeakRef(tensor.untyped_storage()))
        count()
        return rotation

    def compute(*args: Any, **options: Any) -> Result:
        count()
        return kernel(*args, **options)

    compute.name = kernel.name  # type: ignore[attr-defined]
    transport.rotate = rotate  # type: ignore[method-assign]
    layer.kernel_call = compute  # type: ignore[assignment]
    call(layer, mesh.rank, case)
    return most, len(messages)


@pytest.mark.ray
@pytest.mark.parametrize("case", [LONG, Case(causal=True), Case(STREAMS["text in front"], kind="joint")], ids=str)
def test_no_rank_of_a_ring_ever_holds_all_keys(gloo_ranks: GlooRanks, case: Case) -> None:
    for most, _ in gloo_ranks(RANKS).run(blocks_held, case):
        assert most == 2  # the one that is computed and passed on, and the one that is under way
