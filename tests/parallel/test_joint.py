"""Joint attention of several streams: every key counts once, no rank repeats another's work, and outputs keep their
places.
"""

from __future__ import annotations

import pytest
import torch

from backends.interface import AttentionMetadata
from configs.schema import ParallelConfig
from parallel.events import AttentionRan
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Grid, Stream, plan_streams
from tests.parallel.cases import GRIDS, Case, GlooRanks, check, on_some_grids, tensors_of
from tests.parallel.layers import collecting, layer_with

pytestmark = pytest.mark.ray

STREAMS = {
    "text in front": (Stream("text", 7, sharded=False), Stream("video", 22)),
    "text behind": (Stream("video", 22), Stream("text", 7, sharded=False)),
    "sharded text in front": (Stream("text", 7), Stream("video", 22)),
    "sharded text behind": (Stream("video", 22), Stream("text", 7)),
    "text of one token": (Stream("text", 1, sharded=False), Stream("video", 22)),
    "no text": (Stream("text", 0, sharded=False), Stream("video", 22)),
    "keys alone in front": (Stream("text", 7, sharded=False, queries=False), Stream("video", 22)),
    "keys alone behind": (Stream("video", 22), Stream("text", 7, sharded=False, queries=False)),
    "less video than ranks": (Stream("text", 9, sharded=False), Stream("video", 1)),
    "video in the middle": (
        *(Stream("text", 5, sharded=False), Stream("video", 13), Stream("audio", 6), Stream("clip", 4, sharded=False)),
    ),
    "text alone": (Stream("text", 9, sharded=False),),
}
CARRIED = (("key_padding",), ("full", "sinks"), ("per_head",), ("packed", "soft_cap"), ("window",))


@pytest.mark.parametrize("heads", [(6, 6), (5, 1)], ids=str)
@on_some_grids("streams", STREAMS, count=3)
def test_streams_in_any_order_sharded_or_not(
    gloo_ranks: GlooRanks, grid: str, streams: str, heads: tuple[int, int]
) -> None:
    world_size, parallel = GRIDS[grid]
    check(gloo_ranks(world_size), Case(STREAMS[streams], *heads, kind="joint"), parallel)


@pytest.mark.parametrize("streams", ["text in front", "sharded text behind", "video in the middle"])
@on_some_grids("carried", CARRIED, count=2)
def test_what_joint_calls_carry_is_of_all_streams_in_order(
    gloo_ranks: GlooRanks, grid: str, streams: str, carried: tuple[str, ...]
) -> None:
    world_size, parallel = GRIDS[grid]
    check(gloo_ranks(world_size), Case(STREAMS[streams], 5, 5, kind="joint", carried=carried), parallel)


ASKING = [name for name, streams in STREAMS.items() if all(stream.queries for stream in streams)]


@on_some_grids("streams", ASKING, count=3)
def test_causal_attention_counts_through_the_streams(gloo_ranks: GlooRanks, grid: str, streams: str) -> None:
    world_size, parallel = GRIDS[grid]
    check(gloo_ranks(world_size), Case(STREAMS[streams], kind="self", causal=True), parallel)


@pytest.mark.parametrize("streams", ["text in front", "text behind", "video in the middle"])
@on_some_grids("carried", CARRIED, count=2)
def test_what_causal_calls_carry_is_of_all_streams_in_order(
    gloo_ranks: GlooRanks, grid: str, streams: str, carried: tuple[str, ...]
) -> None:
    world_size, parallel = GRIDS[grid]
    check(gloo_ranks(world_size), Case(STREAMS[streams], 5, 5, kind="joint", causal=True, carried=carried), parallel)


def kernel_shapes(mesh: Mesh, case: Case, parallel: ParallelConfig) -> tuple[AttentionRan, list[tuple[int, int]]]:
    """What the layer reports, and the query and key rows of every kernel call."""
    context, events = collecting(mesh, dtype=case.dtype, backend="REFERENCE", parallel=parallel)
    layer = layer_with(context, case.heads, case.size, kind="joint")
    seen: list[tuple[int, int]] = []
    real = layer.kernel_call

    def note(query: torch.Tensor, key: torch.Tensor, *args: object, **options: object) -> object:
        seen.append((query.shape[1] * query.shape[2], key.shape[1]))
        return real(query, key, *args, **options)  # type: ignore[arg-type]

    layer.kernel_call = note  # type: ignore[assignment]
    layer.kernel_call.name = real.name  # type: ignore[union-attr]
    plan = layer.plan_of(*case.streams)
    share = plan.shares[mesh.rank]
    query, key, value = tensors_of(case)
    mine = take(query, share.query_rows), take(key, share.key_rows), take(value, share.key_rows)
    layer(*mine, AttentionMetadata(), plan=plan)
    (event,) = events
    return event, seen


@pytest.mark.parametrize("grid", GRIDS)
def test_text_keys_count_once_and_text_queries_are_asked_once(gloo_ranks: GlooRanks, grid: str) -> None:
    world_size, parallel = GRIDS[grid]
    case = Case(STREAMS["text in front"], kind="joint")
    results = gloo_ranks(world_size).run(kernel_shapes, case, parallel)
    pairs = [sum(rows * keys for rows, keys in seen) for _, seen in results]
    assert sum(pairs) == case.queries * case.heads * case.keys  # every (query, head, key) once over all ranks
    assert all(sum(keys for _, keys in seen) == case.keys for _, seen in results)
    even = case.queries * case.heads * case.keys / world_size
    assert max(pairs) <= even * 1.25  # and no rank has much more than its share
    for event, seen in results:
        assert event.query[1] * event.query[2] == seen[0][0]
        assert event.key[1] == seen[0][1]


def test_a_call_has_one_exchange_each_way() -> None:
    for streams in STREAMS.values():
        plan = plan_streams(streams, 6, Grid(3), "ulysses")
        sent = sum(len(plan.held[index][0]) for index, stream in enumerate(streams) if stream.sharded)
        assert sum(plan.scatter_heads(0).sends) == sent * 3 * 6
        fixed = sum(stream.length for stream in streams if not stream.sharded and stream.queries)
        back = plan.gather_heads(0)
        assert sum(back.receives) == (sent + fixed) * 6


def test_a_sharded_stream_that_has_no_queries_is_refused() -> None:
    with pytest.raises(ValueError, match="stream text is sharded and has no queries"):
        Stream("text", 7, queries=False)
    with pytest.raises(ValueError, match="length of stream text is -1; give a whole number"):
        Stream("text", -1)
