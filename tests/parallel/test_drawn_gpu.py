"""Drawn calls over NCCL ranks with the kernels of a GPU, and the two transports bit for bit.

`pytest -m gpu tests/parallel/test_drawn_gpu.py --calls 600` takes every GPU of the machine. With `--ranks-per-gpu 4`
one will do: its ranks reach each other as if they were on other hosts, over sockets.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch

from parallel.plan import Stream
from tests.parallel.suite.drawing_cuda import KERNELS, batches
from tests.parallel.suite.drawn import Drawn
from tests.parallel.suite.histogram import lines, ran
from tests.parallel.suite.on_rank import Ran, run_calls
from tests.parallel.suite.search import Search, judge_calls
from tests.ranks import Ranks
from tests.summary import LINES

pytestmark = [pytest.mark.gpu, pytest.mark.ray]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TEXT, VIDEO = Stream("text", 77, sharded=False), Stream("video", 1031)
STRATEGIES = ("ulysses", "ring", "gather_kv")


@pytest.fixture(scope="module")
def nccl_ranks(ray_cluster: None, pytestconfig: pytest.Config) -> Iterator[Ranks]:
    each = pytestconfig.getoption("--ranks-per-gpu")
    world_size = each * torch.cuda.device_count()
    if world_size < 2:
        pytest.skip("needs two CUDA devices, or --ranks-per-gpu 2")
    ranks = Ranks(world_size, cpus=0, timeout_s=60, ranks_per_gpu=each)
    yield ranks
    ranks.close()


def among(ranks: Ranks, cases: Sequence[Drawn]) -> list[Drawn]:
    """The cases over all of the ranks."""
    return [replace(case, world_size=ranks.world_size) for case in cases]


def test_drawn_calls_are_exact(nccl_ranks: Ranks, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--calls-seed")
    search = Search(nccl_ranks, batches(nccl_ranks.world_size), shrinks=False)
    search.run(pytestconfig.getoption("--calls"), seed)
    told = [f"Attention over {nccl_ranks.world_size} NCCL ranks, seed {seed}:", *lines(list(search.verdicts.values()))]
    pytestconfig.stash.setdefault(LINES, []).extend(told)
    if search.failure is not None:
        raise search.failure
    verdicts = ran(search.verdicts.values())
    assert not [verdict for verdict in verdicts if verdict.complaints]
    assert {verdict.case.backend for verdict in verdicts} >= set(KERNELS)
    assert {verdict.strategy for verdict in verdicts} >= set(STRATEGIES)


FLEX = Drawn(strategy="ulysses", streams=(VIDEO,), heads=5, kv_heads=5, size=64, value_size=64, dtype="bfloat16")
FLEX_CALLS = [
    replace(FLEX, backend="FLEX_ATTENTION", mask="block", seed=1),
    replace(FLEX, backend="FLEX_ATTENTION", mask="block", seed=2),
    replace(FLEX, backend="FLEX_ATTENTION", mask="full", gradient=True),
    replace(FLEX, backend="FLEX_ATTENTION", strategy="ring", window=(100, 30)),
    replace(FLEX, backend="FLEX_ATTENTION", strategy="ring", lse=True, kind="joint", streams=(TEXT, VIDEO)),
]


def test_compiled_kernels_are_exact(nccl_ranks: Ranks) -> None:
    for verdict in judge_calls(nccl_ranks, among(nccl_ranks, FLEX_CALLS)):
        assert not verdict.complaints, verdict.case
        assert not verdict.refused, verdict.case


CARRIED = [
    Drawn(
        strategy=strategy,
        kind=kind,
        streams=streams,
        heads=5,
        kv_heads=5,
        size=128,
        value_size=128,
        dtype="bfloat16",
        backend="FLASH_ATTN",
        lse=lse,
    )
    for strategy in STRATEGIES
    for kind, streams in (("self", (VIDEO,)), ("joint", (TEXT, VIDEO)))
    for lse in (False, True)
]


@pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="needs nccl4py")
def test_the_transports_carry_the_same_bits(nccl_ranks: Ranks) -> None:
    size, cases = nccl_ranks.world_size, among(nccl_ranks, CARRIED)
    found = {
        transport: ray.get(nccl_ranks.start_among_first(size, run_calls, cases, transport), timeout=300)
        for transport in ("torch", "nccl")
    }
    for ours, theirs in zip(found["torch"], found["nccl"], strict=True):
        for case, one, other in zip(cases, ours, theirs, strict=True):
            assert isinstance(one, Ran), one
            assert isinstance(other, Ran), other
            assert np.array_equal(one.out, other.out, equal_nan=True), case
            assert (one.lse is None) == (other.lse is None)
            assert one.lse is None or np.array_equal(one.lse, other.lse), case
            assert one.moved == other.moved == one.planned
