"""Calls on a whole sequence for tests of strategies: what they carry, what each rank runs, and the exact answer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any, TypeVar

import pytest
import torch

from backends.interface import AttentionMetadata, Kind, PackedLengths
from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.events import Traffic
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream
from parallel.traffic import call_traffic
from tests.parallel.layers import context_of
from tests.ranks import Ranks

GlooRanks = Callable[[int], Ranks]
VIDEO = (Stream("video", 29),)
GRIDS: Mapping[str, tuple[int, ParallelConfig]] = {
    "ulysses 2": (2, ParallelConfig(strategy="ulysses")),
    "ulysses 3": (3, ParallelConfig(strategy="ulysses")),
    "ring 2": (2, ParallelConfig(strategy="ring")),
    "ring 3": (3, ParallelConfig(strategy="ring")),
    "ring 4": (4, ParallelConfig(strategy="ring")),
    "gather 3": (3, ParallelConfig(strategy="gather_kv")),
    "ulysses 2 x ring 2": (4, ParallelConfig(ulysses=2, ring=2)),
    "ulysses 3 x ring 2": (6, ParallelConfig(ulysses=3)),
    "ulysses 2 x ring 3": (6, ParallelConfig(ring=3)),
    "ulysses 2 x gather 2": (4, ParallelConfig(ulysses=2, strategy="gather_kv")),
}

Item = TypeVar("Item")


def on_some_grids(name: str, items: Iterable[Item], count: int = 3) -> pytest.MarkDecorator:
    """Parametrize `grid` and `name`: each item runs on `count` grids, taken in rotation.

    The drawn suite covers the product of all grids with everything that a call may have; named cases need to meet each
    kind of strategy only.
    """
    grids = cycle(GRIDS)
    pairs = [(grid, item) for item in items for grid in islice(grids, count)]
    return pytest.mark.parametrize(("grid", name), pairs, ids=str)


@dataclass(frozen=True)
class Case:
    """A call on the whole sequence; carried: names of what `metadata_of` makes."""

    streams: tuple[Stream, ...] = VIDEO
    heads: int = 6
    kv_heads: int = 6
    size: int = 8
    batch: int = 2
    kind: Kind = "self"
    causal: bool = False
    carried: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    backend: str = "REFERENCE"

    @property
    def queries(self) -> int:
        return sum(stream.length for stream in self.streams if stream.queries)

    @property
    def keys(self) -> int:
        return sum(stream.length for stream in self.streams)


def tensors_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(case.batch, rows, heads, case.size, generator=generator, dtype=torch.float64).to(case.dtype)

    return draw(case.queries, case.heads), draw(case.keys, case.kv_heads), draw(case.keys, case.kv_heads)


def metadata_of(case: Case) -> AttentionMetadata:
    generator = torch.Generator().manual_seed(8)
    shapes = {
        "key_padding": (case.batch, 1, 1, case.keys),
        "full": (1, 1, case.queries, case.keys),
        "per_head": (case.batch, case.heads, case.queries, case.keys),
    }
    found: dict[str, Any] = {}
    for name in case.carried:
        if name in shapes:
            mask = torch.rand(*shapes[name], generator=generator) < 0.6
            mask[:, :, : case.queries // 3] &= torch.rand(mask.shape[-1], generator=generator) < 0.5
            found["mask"] = mask
        elif name == "blind":
            found["mask"] = torch.ones(1, 1, case.queries, case.keys, dtype=torch.bool)
            found["mask"][:, :, 2 : case.queries // 2] = False
        elif name.startswith("bias"):
            heads = case.heads if name == "bias of each head" else 1
            found["bias"] = torch.randn(1, heads, case.queries, case.keys, generator=generator, dtype=case.dtype)
            found["bias"][..., case.keys // 2] = float("-inf")
            found["bias"][:, :, case.queries // 2] = float("-inf")
        elif name == "window":
            found["window"] = (3, 5)
        elif name == "soft_cap":
            found["soft_cap"] = 2.0
        elif name == "sinks":
            found["sinks"] = torch.linspace(-1, 2, case.heads, dtype=case.dtype)
        elif name == "packed":
            found["packed"] = PackedLengths(*(_documents(length) for length in (case.queries, case.keys)))
    return AttentionMetadata(**found)


def _documents(length: int) -> tuple[int, ...]:
    first = length // 4
    return (first, 0, 1, length - first - 1) if length > first else (length, 0, 0, 0)


def layer_of(mesh: Mesh, case: Case, parallel: ParallelConfig, **options: Any) -> Attention:
    context = context_of(mesh, dtype=case.dtype, backend=case.backend, parallel=parallel)
    return Attention(
        case.heads,
        case.size,
        role=case.kind,
        kind=case.kind,
        num_kv_heads=case.kv_heads,
        causal=case.causal,
        features=metadata_of(case).features,
        context=context,
        **options,
    )


@dataclass(frozen=True)
class Ran:
    """A rank's results, with the positions of its rows and what it sent."""

    out: torch.Tensor
    lse: torch.Tensor
    positions: list[int]
    measured: Traffic
    planned: Traffic
    strategy: str


def run_case(mesh: Mesh, case: Case, parallel: ParallelConfig) -> Ran:
    layer = layer_of(mesh, case, parallel, lse=True)
    plan = layer.plan_of(*case.streams)
    share = plan.shares[mesh.rank]
    query, key, value = tensors_of(case)
    mine = take(query, share.query_rows), take(key, share.key_rows), take(value, share.key_rows)
    before = [tensor.clone() for tensor in mine]
    out, lse = layer.forward_with_lse(*mine, metadata_of(case), plan=plan)
    assert all(torch.equal(*pair) for pair in zip(mine, before, strict=True))
    measured = layer.context.transport.take_traffic()
    planned = call_traffic(
        plan, mesh.rank, batch=case.batch, head_size=case.size, element_size=case.dtype.itemsize, lse=True
    )
    return Ran(out, lse, list(share.query_rows), measured, planned, layer.strategy)


def exact(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp in fp64."""
    query, key, value = tensors_of(case)
    return exact_of(case, (query.double(), key.double(), value.double()), metadata_of(case))


def exact_of(
    case: Case, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], carried: AttentionMetadata
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head, apart from the package's own reference; gradients flow through it."""
    (query, key, value), group = qkv, case.heads // case.kv_heads
    rows, columns = torch.arange(case.queries)[:, None], torch.arange(case.keys)[None]
    seen = torch.ones(case.queries, case.keys, dtype=torch.bool)
    if case.causal:
        seen &= columns <= rows
    if carried.window is not None:
        seen &= (columns >= rows - carried.window[0]) & (columns <= rows + carried.window[1])  # type: ignore[operator]
    if carried.packed is not None:
        lengths = carried.packed.query, carried.packed.key
        asking, asked = (torch.tensor([i for i, n in enumerate(each) for _ in range(n)]) for each in lengths)
        seen &= asking[:, None] == asked[None]
    out = torch.zeros_like(query)
    lse = torch.full((case.batch, case.heads, case.queries), float("-inf"), dtype=torch.float64)
    for item, head in product(range(case.batch), range(case.heads)):
        scores = query[item, :, head] @ key[item, :, head // group].T * case.size**-0.5
        if carried.soft_cap is not None:
            scores = carried.soft_cap * torch.tanh(scores / carried.soft_cap)
        visible = seen
        if carried.bias is not None:
            added = carried.bias.double().expand(case.batch, case.heads, case.queries, case.keys)[item, head]
            scores, visible = scores + added, visible & (added > float("-inf"))
        if carried.mask is not None:
            mask = carried.mask.expand(case.batch, case.heads, case.queries, case.keys)
            visible = visible & mask[item, head]
        weights = torch.where(visible, scores.exp(), 0.0)
        total = weights.sum(dim=1)
        if carried.sinks is not None:
            total = total + carried.sinks[head].double().exp()
        out[item, :, head] = (weights / total.clamp_min(1e-300)[:, None]) @ value[item, :, head // group]
        lse[item, head] = torch.where(total > 0, total, 1.0).log().masked_fill(total == 0, float("-inf"))
    return out, lse


def check(ranks: Ranks, case: Case, parallel: ParallelConfig, tolerance: float = 1e-11) -> list[Ran]:
    whole, whole_lse = exact(case)
    results = ranks.run(run_case, case, parallel)
    seen: set[int] = set()
    for rank, ran in enumerate(results):
        assert ran.measured == ran.planned, rank
        positions = torch.tensor(ran.positions, dtype=torch.long)
        assert ran.out.shape == whole[:, positions].shape
        assert ran.lse.shape == whole_lse[:, :, positions].shape
        assert torch.allclose(ran.out.double(), whole[:, positions], atol=tolerance, rtol=tolerance), rank
        assert torch.allclose(ran.lse.double(), whole_lse[:, :, positions], atol=tolerance, rtol=tolerance), rank
        seen.update(ran.positions)
    assert seen == set(range(case.queries))
    return results
