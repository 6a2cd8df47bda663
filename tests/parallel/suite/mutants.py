"""Faults of sequence parallelism, each put into the smallest function that can make it, on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from parallel import merge, plan
from parallel.agreement import Carried
from parallel.attention import Attention
from parallel.kernel import BackendKernel
from parallel.mesh import Mesh
from parallel.rows import Rows
from parallel.strategies.sharded import Attended
from parallel.strategies.work import HeldKeys
from parallel.transport import base
from tests.parallel.suite.drawn import Drawn
from tests.parallel.suite.on_rank import Outcome, run_calls

Mutant = Callable[[], AbstractContextManager[None]]


def run_mutated(mesh: Mesh, name: str, cases: Sequence[Drawn]) -> list[Outcome]:
    with MUTANTS[name]():
        return run_calls(mesh, cases)


@contextmanager
def a_row_dropped() -> Iterator[None]:
    """Ranks get equal parts of a stream, and what is left over is nobody's."""
    real = plan.ShardPlan._held

    def evenly(of: plan.ShardPlan, stream: plan.Stream) -> tuple[Rows, ...]:
        held = real(of, stream)
        return tuple(part.cut(range(min(map(len, held)))) for part in held)

    with _new_plans(), patch.object(plan.ShardPlan, "_held", evenly):
        yield


@contextmanager
def two_heads_swapped() -> Iterator[None]:
    real = base.unpack_results

    def swapped(*given: Any) -> torch.Tensor:
        out = real(*given)
        return torch.cat((out[:, :, 1:2], out[:, :, :1], out[:, :, 2:]), dim=2)

    with patch.object(base, "unpack_results", swapped):
        yield


@contextmanager
def text_counted_twice() -> Iterator[None]:
    real = HeldKeys.joined

    def twice(held: HeldKeys, keys: Rows, fixed: Rows) -> tuple[torch.Tensor, torch.Tensor, Rows]:
        key, value, every = real(held, keys, fixed)
        if held.fixed_key is None or held.fixed_value is None:
            return key, value, every
        return torch.cat((key, held.fixed_key), dim=1), torch.cat((value, held.fixed_value), dim=1), every

    with patch.object(HeldKeys, "joined", twice):
        yield


@contextmanager
def the_mask_ignored() -> Iterator[None]:
    real = BackendKernel.__call__

    def unmasked(kernel: BackendKernel, query: Any, key: Any, value: Any, metadata: Any, **options: Any) -> Any:
        return real(kernel, query, key, value, replace(metadata, mask=None), **options)

    with patch.object(BackendKernel, "__call__", unmasked):
        yield


@contextmanager
def a_wrong_lse_layout() -> Iterator[None]:
    """[B, H, S] read as [B, S, H]."""

    def misread(weights: torch.Tensor) -> torch.Tensor:
        batch, heads, rows = weights.shape
        return weights.reshape(batch, rows, heads, 1)

    with patch.object(merge, "_by_row", misread):
        yield


@contextmanager
def a_stale_plan() -> Iterator[None]:
    """Plans are kept by layer, whatever the lengths."""
    real, kept = Attention.plan_of, {}

    def first(layer: Attention, *streams: plan.Stream) -> plan.ShardPlan:
        facts = (layer.rules.call.heads, layer.rules.call.kv_heads, layer.way)
        return kept.setdefault(facts, real(layer, *streams))

    with patch.object(Attention, "plan_of", first):
        yield


@contextmanager
def a_kv_head_off_by_one() -> Iterator[None]:
    real = base.unpack_heads

    def next_to_it(*given: Any) -> base.QueryKeyValue:
        query, key, value = real(*given)
        return query, key.roll(1, dims=2), value.roll(1, dims=2)

    with patch.object(base, "unpack_heads", next_to_it):
        yield


@contextmanager
def values_as_wide_as_keys() -> Iterator[None]:
    """The numbers of V begin where they would if it had the head size of Q and K."""
    real = base.unpack_heads

    def misplaced(received: torch.Tensor, shape: tuple[int, int, int, int], *given: Any) -> base.QueryKeyValue:
        query, key, value = real(received, shape, *given)
        return query, key, value.roll(shape[3] - shape[2], dims=3)

    with patch.object(base, "unpack_heads", misplaced):
        yield


@contextmanager
def heads_first_results() -> Iterator[None]:
    with patch.object(Attended, "contiguous", lambda attended: replace(attended, out=_heads_first(attended.out))):
        yield


def _heads_first(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@contextmanager
def an_agreement_ignored() -> Iterator[None]:
    """What later calls with a plan carry is not compared with what the first one did."""
    with patch.object(Carried, "__eq__", lambda carried, other: True):
        yield


@contextmanager
def _new_plans() -> Iterator[None]:
    """Plans are kept; these are made anew, and forgotten."""
    plan.plan_streams.cache_clear()
    try:
        yield
    finally:
        plan.plan_streams.cache_clear()


MUTANTS: Mapping[str, Mutant] = {
    "a row dropped": a_row_dropped,
    "two heads swapped": two_heads_swapped,
    "text counted twice": text_counted_twice,
    "the mask ignored": the_mask_ignored,
    "a wrong LSE layout": a_wrong_lse_layout,
    "a stale plan": a_stale_plan,
    "a KV head off by one": a_kv_head_off_by_one,
    "values as wide as keys": values_as_wide_as_keys,
    "heads-first results": heads_first_results,
    "an agreement ignored": an_agreement_ignored,
}
