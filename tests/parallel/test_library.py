"""Sequence parallelism over the caller's own ranks: no Ray, the same answer, and no trace left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.mesh import Mesh
from tests.conftest import CHECKOUT
from tests.exact import attention64, relative_error
from tests.parallel import library_ranks as ranks
from tests.ranks import Ranks
from tests.runtime.command import environment

GlooRanks = Callable[[int], Ranks]
over_live_ranks = pytest.mark.ray  # their mesh is left aside: what counts is the default group


def run(of: Ranks, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return of.run(_without_mesh, function, arguments)


def _without_mesh(mesh: Mesh, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)


@over_live_ranks
@pytest.mark.parametrize(
    ("world_size", "options", "way"),
    [
        (3, {"attention": "attention.default=TORCH_SDPA", "strategy": "ulysses"}, "ulysses 3x1"),
        (3, {"attention": {"per_role": {"self": "REFERENCE"}}, "ring": 3}, "ring 1x3"),
        (2, {"attention": ["attention.default=REFERENCE", "parallel.strategy=gather_kv"]}, "gather_kv 1x2"),
    ],
    ids=str,
)
def test_ranks_of_the_callers_own_give_the_models_own_answer_and_leave_it_as_it_was(
    gloo_ranks: GlooRanks, world_size: int, options: dict[str, Any], way: str
) -> None:
    for rank, found in enumerate(run(gloo_ranks(world_size), ranks.everything, options)):
        check(found, rank, world_size, way)


def test_processes_that_plain_torch_has_started_do_the_same(tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.start(ranks.everything, 2, tmp_path, {})):
        check(found, rank, 2, "ulysses 2x1")


def check(found: dict[str, Any], rank: int, world_size: int, way: str) -> None:
    assert relative_error(found["shared"], found["before"]) <= 1e-5
    assert torch.equal(found["after"], found["before"])
    assert found["hooks"][0] == found["hooks"][1]
    assert found["processors"]
    assert found["place"] == (rank, world_size)
    assert found["moved"].forwards == 1
    assert found["moved"].planned == found["moved"].measured
    assert found["moved"].measured.calls["gather_rows"] == 1
    assert found["then"].forwards == 0
    assert [line for line in found["served"] if line.startswith("self:") and f" {way}, 2 layers" in line]
    assert [line for line in found["served"] if line.startswith("cross:") and " local, 2 layers" in line]


@over_live_ranks
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "ulysses"), (3, "ring")])
def test_the_mean_of_the_ranks_gradients_is_the_models_gradient(
    gloo_ranks: GlooRanks, world_size: int, strategy: str
) -> None:
    for found in run(gloo_ranks(world_size), ranks.trained, {"attention": "REFERENCE", "strategy": strategy}):
        assert found["shared"].keys() == found["recomputed"].keys() == found["whole"].keys()
        for name, whole in found["whole"].items():
            for got in (found["shared"][name], found["recomputed"][name]):
                assert (got - whole).norm() <= 1e-4 * whole.norm() + 1e-6, name


@over_live_ranks
def test_meshes_and_groups_say_who_takes_part(gloo_ranks: GlooRanks) -> None:
    expected = {"square": ("ulysses_ring 2x2", 4), "part": (None, 2), "line": ("ring 1x4", 4), "group": (None, 2)}
    for found in run(gloo_ranks(4), ranks.on_meshes):
        for name, (way, world_size) in expected.items():
            out, ways, of = found[name]
            assert relative_error(out, found["whole"]) <= 1e-5
            assert of == world_size
            assert way is None or ways == {way}


@over_live_ranks
def test_what_cannot_be_is_refused_with_a_way_out_on_every_rank(gloo_ranks: GlooRanks) -> None:
    beginnings = [
        "model=Linear: that class is not known; known are WanTransformer3DModel; ",
        "mesh=1x2 ('dp', 'sp'): a mesh is of one dimension",
        "run.seed=3: this call configures attention, and nothing would use it",
        "attention.per_role.slef=REFERENCE: the model has no role 'slef'; its roles are cross, self; ",
        "attention.defualt=REFERENCE: no such key; did you mean attention.default?",
        "attention.default=FLASH_ATTN: ",
        "parallel.ulysses=3: degrees of 3 do not make up 2 ranks",
        "control: it must be of the ranks [0, 1]",
        "device=cuda: the group moves tensors of cpu only",
        "model=WanTransformer3DModel: its sequence is shared already; close()",
    ]
    first, second = run(gloo_ranks(2), ranks.refusals)
    for told, beginning in zip(first, beginnings, strict=True):
        assert told
        assert told[0].startswith(beginning)
    assert "raylysses.Attention layers" in first[0][0]
    last = len(beginnings) - 2  # a group that the second rank is not in
    assert second[last][0].startswith("mesh=")
    assert second[:last] + second[last + 1 :] == first[:last] + first[last + 1 :]


@over_live_ranks
def test_a_layer_of_ones_own_model_takes_its_context_from_the_callers_group(gloo_ranks: GlooRanks) -> None:
    for found in run(gloo_ranks(3), ranks.by_hand):
        assert found["strategy"] == "ring"
        assert relative_error(found["out"], attention64(*found["qkv"], scale=8**-0.5)) <= 1e-12


ALONE = """
import sys, torch, torch.distributed as dist, raylysses
from tests.parallel import library_ranks as ranks
try:
    raylysses.sequence_parallel(ranks.model())
except raylysses.FaultError as error:
    print(error)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with torch.no_grad(), raylysses.sequence_parallel(transformer := ranks.model()) as shared:
    print(shared.world_size, torch.isfinite(ranks.output(transformer)).all().item(), shared.traffic().measured.calls)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("ray", "runtime")))
"""


def test_nothing_of_ray_is_imported_and_one_rank_needs_no_other() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        timeout=120,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "mesh: this process is in no process group; call torch.distributed.init_process_group() first",
        "1 True {}",
        "[]",
    ]
