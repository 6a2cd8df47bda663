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
        "model=WanTransformer3DModel: its sequence is shared already; call close() of ",
        "model=int: that class is not known",
        "mesh=int: expected a DeviceMesh or a ProcessGroup that contains this rank; ",
        "timeout=5: expected a datetime.timedelta above 0; pass one such as timedelta(seconds=60)",
        "on_event=3: expected a function of one event; ",
        "name='': expected a name of at least one character; ",
        "denoising=0.5: expected a DenoisingTime; pass raylysses.DenoisingTime()",
        "dtype='bfloat16': expected a floating-point torch.dtype; ",
        "control=4: expected a ProcessGroup that contains this rank; ",
        "device=nowhere: torch knows no such device; ",
        "parallel.exchange_dtype=fp9: ",
        "parallel.transport=ncl: ",
        "parallel.transport=nccl: it moves tensors of CUDA GPUs, and this rank's device is cpu; leave it on auto",
    ]
    first, second = run(gloo_ranks(2), ranks.refusals)
    for told, beginning in zip(first, beginnings, strict=True):
        assert told
        assert told[0].startswith(beginning)
    assert "raylysses.Attention layers" in first[0][0]
    last = next(index for index, text in enumerate(beginnings) if text.startswith("device=cuda"))
    # That one is about a group that the second rank is not in.
    assert second[last][0].startswith("mesh=")
    assert second[:last] + second[last + 1 :] == first[:last] + first[last + 1 :]


@over_live_ranks
def test_a_layer_of_ones_own_model_takes_its_context_from_the_callers_group(gloo_ranks: GlooRanks) -> None:
    for found in run(gloo_ranks(3), ranks.by_hand):
        assert found["strategy"] == "ring"
        assert relative_error(found["out"], attention64(*found["qkv"], scale=8**-0.5)) <= 1e-12


@over_live_ranks
@pytest.mark.parametrize("kind", ["whole", "ring x ulysses", "part", "square mesh", "context"])
def test_wiring_again_and_again_opens_no_more_descriptors_and_threads(gloo_ranks: GlooRanks, kind: str) -> None:
    for counts in run(gloo_ranks(4), ranks.cycles, kind):
        first, last = counts[0], counts[-1]  # a group has at least two of each, and Ray may start a thread of its own
        assert last[0] - first[0] <= 1, counts
        assert last[1] - first[1] <= 1, counts


@over_live_ranks
def test_a_wiring_that_fails_leaves_the_model_and_the_groups_ready_for_the_next(gloo_ranks: GlooRanks) -> None:
    for found in run(gloo_ranks(2), ranks.failed_wirings):
        assert found["errors"] == ["AttributeError", "KeyboardInterrupt"]
        assert found["untouched"] == [True, True]
        assert relative_error(found["shared"], found["before"]) <= 1e-5


@over_live_ranks
@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_under_autocast_the_answer_is_that_of_the_plain_model_on_any_number_of_ranks(
    gloo_ranks: GlooRanks, strategy: str
) -> None:
    for found in run(gloo_ranks(2), ranks.under_autocast, strategy):
        whole = found["exact"]
        plain = relative_error(found["plain"], whole)
        for name in ("given", "inferred", "alone"):
            assert relative_error(found[name], whole) <= 1.5 * plain, name
        assert relative_error(found["given"], found["alone"]) <= 1.5 * plain
        assert torch.equal(found["given"], found["inferred"])
        assert found["planned"] == found["measured"]
        assert found["refused"] == (
            "dtype=float32: the layers are for float32, and torch.autocast gives them torch.bfloat16; pass "
            "dtype=torch.bfloat16 to sequence_parallel, or call it under the same torch.autocast"
        )
        for name, gradient in found["gradients"].items():
            of_exact, of_plain = found["exact gradients"][name], found["plain gradients"][name]
            error = (gradient - of_exact).norm()
            assert error <= 2 * (of_plain - of_exact).norm() + 1e-2 * of_exact.norm() + 1e-5, name


@over_live_ranks
def test_the_exchange_dtype_and_the_transport_are_arguments(gloo_ranks: GlooRanks) -> None:
    for found in run(gloo_ranks(2), ranks.exchanged_in_fp8):
        assert found["config"] == ("fp8", "torch")
        assert 0 < relative_error(found["fp8"], found["whole"]) < 0.1


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
