"""Calls of random shapes, streams, heads, strategies and contents over live ranks, against the whole answer in fp64."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch

from configs.schema import ParallelConfig
from parallel.mesh import Mesh
from parallel.plan import Stream
from tests.parallel.cases import Case, GlooRanks, exact, run_case

pytestmark = pytest.mark.ray

CASES, BATCH = 60, 20  # for each number of ranks; so many are run at once, as ranks wait for each other in any case
CONTENTS = ("key_padding", "full", "per_head", "blind", "bias", "bias of each head")
BESIDE = ("window", "soft_cap", "sinks", "packed")


def random_case(random: Random, world_size: int) -> tuple[Case, ParallelConfig]:
    kind = random.choice(("self", "self", "joint"))
    if kind == "joint":
        streams = tuple(_random_stream(random, index) for index in range(random.randint(1, 3)))
    else:
        streams = (Stream("video", random.choice((1, 2, random.randint(1, 70)))),)
    if not any(stream.queries and stream.length for stream in streams):
        streams = (*streams, Stream("video", 3))
    kv_heads, group = random.randint(1, 9), random.choice((1, 1, 2, 3))
    causal = kind == "self" and random.random() < 0.4
    carried = random.sample(CONTENTS, random.randint(0, 1)) + random.sample(BESIDE, random.choice((0, 0, 1, 2)))
    same_lengths = all(stream.queries for stream in streams)
    case = Case(
        streams,
        kv_heads * group,
        kv_heads,
        random.choice((4, 8, 12)),
        random.randint(1, 3),
        kind=kind,  # type: ignore[arg-type]
        causal=causal,
        carried=tuple(name for name in carried if same_lengths or name != "window"),
    )
    return case, random_way(random, world_size)


def _random_stream(random: Random, index: int) -> Stream:
    sharded = random.random() < 0.5
    length = random.choice((0, 1, random.randint(1, 30)))
    return Stream(f"stream{index}", length, sharded=sharded, queries=sharded or random.random() < 0.6)


def random_way(random: Random, world_size: int) -> ParallelConfig:
    mixed = [degree for degree in range(2, world_size) if world_size % degree == 0]
    between = random.choice(("ring", "gather_kv"))
    if mixed and random.random() < 0.4:
        return ParallelConfig(ulysses=random.choice(mixed), strategy=between)
    return ParallelConfig(strategy=random.choice(("ulysses", between, "auto")))


def errors_of(mesh: Mesh, cases: list[tuple[Case, ParallelConfig]]) -> list[tuple[str, str]]:
    """For each case the strategy that ran, and what is wrong with this rank's rows of it."""
    found = []
    for case, parallel in cases:
        ran = run_case(mesh, case, parallel)
        out, lse = exact(case)
        wrong = ""
        if ran.measured != ran.planned:
            wrong = f"sent {ran.measured} and not {ran.planned}"
        for name, got, whole in (("out", ran.out, out[:, ran.positions]), ("lse", ran.lse, lse[:, :, ran.positions])):
            if got.shape != whole.shape or not torch.allclose(got, whole, atol=1e-11, rtol=1e-11):
                wrong += f" {name} differs"
        found.append((ran.strategy, wrong))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_random_calls_are_exact(gloo_ranks: GlooRanks, world_size: int) -> None:
    random = Random(world_size)
    strategies: Counter[str] = Counter()
    for _ in range(CASES // BATCH):
        cases = [random_case(random, world_size) for _ in range(BATCH)]
        for rank, found in enumerate(gloo_ranks(world_size).run(errors_of, cases)):
            for (strategy, wrong), case in zip(found, cases, strict=True):
                assert not wrong, (rank, strategy, case, wrong)
                strategies[strategy] += 1
    assert len(strategies) >= (3 if world_size in (2, 3) else 5)
