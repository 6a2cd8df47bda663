"""What travels arrives bit for bit, under every strategy; items of a batch never meet."""

from __future__ import annotations

from itertools import product

import pytest
import ray
import torch

from backends.interface import AttentionMetadata
from parallel.kept import Kept
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.strategies.sharded import sharded_attention
from parallel.strategies.work import Result
from tests.parallel.cases import GRIDS, Case, layer_of, tensors_of
from tests.parallel.layers import same_bits
from tests.parallel.test_joint import STREAMS
from tests.ranks import Ranks

pytestmark = pytest.mark.ray

HEADS = ((6, 6), (5, 5), (6, 2), (4, 1), (1, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
by_grid = pytest.mark.parametrize("grid", GRIDS)


class Echo:
    """A kernel that returns its queries, and keeps the keys and values that it was given."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **_: object
    ) -> Result:
        self.keys.append(key)
        self.values.append(value)
        return Result(query, query.new_zeros(query.shape[0], query.shape[2], query.shape[1], dtype=torch.float64))


def odd_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """With a NaN, an infinity and a negative zero, and the position of each row at the end of it."""
    tensor = tensor.clone()
    if tensor.shape[1]:
        tensor[:, 0, :, :3] = torch.tensor([float("nan"), float("-inf"), -0.0], dtype=tensor.dtype)
    tensor[..., -1] = torch.arange(tensor.shape[1], dtype=tensor.dtype)[:, None]
    return tensor


def wrong_trips(mesh: Mesh, grid: str) -> list[str]:
    """What came back, or reached a kernel, otherwise than it was sent."""
    wrong = []
    for name, heads, dtype in product(STREAMS, HEADS, DTYPES):
        case = Case(STREAMS[name], *heads, kind="joint", dtype=dtype)
        layer = layer_of(mesh, case, GRIDS[grid][1])
        plan = layer.plan_of(*case.streams)
        share = plan.shares[mesh.rank]
        query, key, value = (odd_numbers(tensor) for tensor in tensors_of(case))
        mine = take(query, share.query_rows), take(key, share.key_rows), take(value, share.key_rows)
        echo = Echo()
        out = sharded_attention(mine, echo, AttentionMetadata(), plan, layer.context.transport, Kept()).out
        if plan.strategy in ("ulysses", "gather_kv", "ulysses_gather_kv") and not same_bits(out, mine[0]):
            wrong.append(f"the output of {case}")
        of_rank = plan.heads.kv[plan.grid.place(mesh.rank)[1]]
        reads = plan.heads.expansion[plan.grid.place(mesh.rank)[1]] or range(len(of_rank))
        wrong += [
            f"the {what} of {case}"
            for what, sent, seen in (("keys", key, echo.keys), ("values", value, echo.values))
            if seen and not same_bits(in_order(seen), sent[:, :, [of_rank.start + head for head in reads]])
        ]
    return wrong


def in_order(blocks: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all blocks by the positions that they carry."""
    every = torch.cat(blocks, dim=1)
    return every[:, every[0, :, 0, -1].argsort()]


@by_grid
def test_rows_and_heads_travel_bit_for_bit(eight_ranks: Ranks, grid: str) -> None:
    started = eight_ranks.start_among_first(GRIDS[grid][0], wrong_trips, grid)
    assert ray.get(started, timeout=120) == [[]] * GRIDS[grid][0]


def strangers_matter(mesh: Mesh, grid: str) -> list[str]:
    """Calls in which an item of a batch changes with another, which is NaN all over."""
    touched = []
    for name, heads, causal in product(("text in front", "sharded text behind", "one stream"), HEADS, (False, True)):
        streams = STREAMS.get(name, STREAMS["no text"][1:])
        causal = causal and len(streams) == 1
        case = Case(streams, *heads, batch=3, kind="self" if len(streams) == 1 else "joint", causal=causal)
        layer = layer_of(mesh, case, GRIDS[grid][1])
        plan = layer.plan_of(*streams)
        share = plan.shares[mesh.rank]
        held = (share.query_rows, share.key_rows, share.key_rows)
        clean = [take(tensor, place) for tensor, place in zip(tensors_of(case), held, strict=True)]
        poisoned = [tensor.clone() for tensor in clean]
        for tensor in poisoned:
            tensor[1] = float("nan")
        before = layer(clean[0], clean[1], clean[2], plan=plan)
        after = layer(poisoned[0], poisoned[1], poisoned[2], plan=plan)
        alike = all(same_bits(before[item], after[item]) for item in (0, 2))
        if not alike or not bool(after[1].isnan().all()) or bool(before.isnan().any()):
            touched.append(str(case))
    return touched


@by_grid
def test_items_of_a_batch_never_meet(eight_ranks: Ranks, grid: str) -> None:
    started = eight_ranks.start_among_first(GRIDS[grid][0], strangers_matter, grid)
    assert ray.get(started, timeout=120) == [[]] * GRIDS[grid][0]
