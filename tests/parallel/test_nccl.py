"""The transport over nccl4py, with a double of it: bit for bit what torch's moves, and aborted when something fails.

What is not run here is NCCL itself: these tests hold our calls against the published signatures only.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.platforms.facts import DeviceFacts
from configs.faults import FaultError
from configs.schema import ParallelConfig
from parallel.events import Traffic
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Grid, Strategy, Stream, plan_streams
from parallel.transport import choice
from parallel.transport.base import Transport
from parallel.transport.choice import open_transport
from parallel.transport.nccl import NcclFailureError, NcclTransport, load_nccl
from parallel.transport.torch_dist import TorchTransport
from runtime.check import transport_faults
from tests.backends.published import differences
from tests.parallel.cases import Case, layer_of, metadata_of, tensors_of
from tests.parallel.layers import CPU, ONE_RANK, same_bits
from tests.parallel.nccl_double import STREAM, NcclDouble
from tests.ranks import Ranks
from vendor_signatures.record import load

GlooRanks = Callable[[int], Ranks]
SIGNATURES = load(Path(__file__).with_name("nccl_signatures.json"))


def over_double(mesh: Mesh, double: NcclDouble | None = None) -> NcclTransport:
    return NcclTransport(mesh, double or NcclDouble(), lambda: STREAM)


# --- bit for bit ------------------------------------------------------------------------------------------------------


def moved_by(transport: Transport, tensors: list[torch.Tensor], exchange: Any, streams: Any) -> list[torch.Tensor]:
    """What every verb gives on this rank."""
    mesh = transport.mesh
    heads, kv_heads = tensors[0].shape[2], tensors[1].shape[2]
    strategy: Strategy = "ulysses"
    plan = plan_streams(streams, heads, Grid(mesh.world_size), strategy, kv_heads=kv_heads, exchange=exchange)
    mine = [take(tensor, plan.shares[mesh.rank].sent_keys) for tensor in tensors]
    query, key, value = transport.scatter_heads(mine[0], mine[1], mine[2], plan)
    back = transport.gather_heads(query.contiguous(), plan)
    rows = transport.gather_rows(mine[0].flatten(2), plan)
    ring = plan_streams(streams, heads, Grid(1, mesh.world_size), "ring", kv_heads=kv_heads)
    blocks = transport.gather_keys(mine[1], mine[2], ring)
    previous = ring.shares[(mesh.rank - 1) % mesh.world_size]
    message = mine[1].transpose(0, 1).contiguous().view(-1)
    expected = (
        len(previous.keys) * mine[1][:, :1].numel()
        if mine[1].shape[1]
        else len(previous.keys) * tensors[1][:, :1].numel()
    )
    rotated = transport.rotate(message, expected, ring).wait()
    return [query, key, value, back, rows, *blocks, rotated]


def verbs(
    mesh: Mesh, length: int, heads: tuple[int, int], dtype: torch.dtype, exchange: str
) -> tuple[bool, bool, Traffic]:
    generator = torch.Generator().manual_seed(2)
    counts = (heads[0], heads[1], heads[1])
    tensors = [torch.randn(2, length, count, 6, generator=generator).to(dtype) for count in counts]
    streams = (Stream("video", length),)
    ours, torchs = over_double(mesh), TorchTransport(mesh)
    got, expected = (moved_by(transport, tensors, exchange, streams) for transport in (ours, torchs))
    traffic, without = ours.take_traffic(), torchs.take_traffic()
    return all(map(same_bits, got, expected)), traffic == without, traffic


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("length", [1, 2, 29])
@pytest.mark.parametrize("heads", [(6, 6), (5, 5), (6, 2), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "exchange"), [(torch.float32, "same"), (torch.bfloat16, "same"), (torch.bfloat16, "fp8")], ids=str
)
def test_every_verb_moves_what_torchs_moves_bit_for_bit(
    gloo_ranks: GlooRanks, world_size: int, length: int, heads: tuple[int, int], dtype: torch.dtype, exchange: str
) -> None:
    for equal, counted, traffic in gloo_ranks(world_size).run(verbs, length, heads, dtype, exchange):
        assert equal
        assert counted
        assert set(traffic.calls) == {"scatter_heads", "gather_heads", "gather_rows", "gather_keys", "rotate_keys"}


def closed_twice(mesh: Mesh) -> list[bool]:
    double = NcclDouble()
    transport = NcclTransport(mesh, double, lambda: STREAM)
    before = double.made[0].aborted
    transport.close()
    transport.close()
    return [before, double.made[0].aborted]


@pytest.mark.ray
def test_closing_a_transport_releases_its_communicator(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks(2).run(closed_twice) == [[False, True]] * 2


GRIDS = {
    "ulysses": ParallelConfig(strategy="ulysses"),
    "fp8": ParallelConfig(strategy="ulysses", exchange_dtype="fp8"),
    "ring": ParallelConfig(strategy="ring"),
    "gather_kv": ParallelConfig(strategy="gather_kv"),
    "ulysses 2 x ring 2": ParallelConfig(ulysses=2, ring=2),
    "ulysses 2 x gather 2": ParallelConfig(ulysses=2, strategy="gather_kv"),
}
JOINT = Case((Stream("video", 29), Stream("text", 7, sharded=False)), kind="joint", heads=5, kv_heads=5)


def attend(mesh: Mesh, case: Case, parallel: ParallelConfig, gradient: bool) -> tuple[bool, bool]:
    """Whether a layer over the double gives the bits that it gives over torch's, and of its gradients."""
    results = []
    layer = layer_of(mesh, case, parallel, lse=True)
    plan = layer.plan_of(*case.streams)
    share = plan.shares[mesh.rank]
    for transport in (over_double(mesh), TorchTransport(mesh)):
        layer.context = replace(layer.context, transport=transport)
        full = tensors_of(case)
        mine = [take(full[0], share.query_rows), take(full[1], share.key_rows), take(full[2], share.key_rows)]
        mine = [tensor.clone().requires_grad_(gradient) for tensor in mine]
        out, lse = layer.forward_with_lse(*mine, metadata_of(case), plan=plan)
        if gradient:
            (out.sum() + out.square().sum()).backward()
        results.append(([out.detach(), lse.detach()], [tensor.grad for tensor in mine] if gradient else []))
    (one, one_back), (other, other_back) = results
    return all(map(same_bits, one, other)), all(map(same_bits, one_back, other_back))


@pytest.mark.ray
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("case", [Case(heads=5, kv_heads=5), Case(causal=True, kv_heads=2), JOINT], ids=str)
def test_attention_is_the_same_to_the_last_bit(gloo_ranks: GlooRanks, grid: str, case: Case) -> None:
    if case.causal and grid == "gather_kv":
        case = replace(case, causal=False, carried=("key_padding",))
    world_size = 4 if " x " in grid else 3
    gradient = grid != "fp8"
    assert gloo_ranks(world_size).run(attend, case, GRIDS[grid], gradient) == [(True, True)] * world_size


# --- failures ---------------------------------------------------------------------------------------------------------


def fail(mesh: Mesh, how: str) -> tuple[str, bool]:
    """What is raised, and whether the communicator was aborted."""
    double = NcclDouble()
    mesh = replace(mesh, timeout=timedelta(seconds=0.05))
    if how.startswith("joining"):
        double.states = [7] * 10**4 if how == "joining takes too long" else [7, 7, 2]
    try:
        transport = over_double(mesh, double)
        double.states = {"an error": [7, 6], "too long": [7] * 10**4, "soon": [7, 7, 0]}.get(how, [])
        double.raises = ValueError("no such buffer") if how == "send raises" else None
        plan = plan_streams((Stream("video", 4),), 2, Grid(2), "ulysses")
        transport.gather_rows(torch.ones(1, len(plan.rows[mesh.rank]), 3), plan)
    except (NcclFailureError, ValueError) as error:
        return str(error), double.made[0].aborted
    return "moved", double.made[0].aborted


FAILURES = {
    "soon": ("moved", False),
    "joining fails": ("nccl: joining the ranks failed: result 2 (the last error); see the other ranks' errors", True),
    "joining takes too long": ("nccl: joining the ranks failed: other ranks did not take part within 0.05 s", True),
    "an error": ("nccl: an exchange failed: result 6 (the last error)", True),
    "too long": ("nccl: an exchange failed: other ranks did not take part within 0.05 s", True),
    "send raises": ("no such buffer", True),
}


@pytest.mark.ray
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_aborts_the_communicator_and_is_told(gloo_ranks: GlooRanks, how: str) -> None:
    said, aborted = FAILURES[how]
    for message, was_aborted in gloo_ranks(2).run(fail, how):
        assert message.startswith(said)
        assert was_aborted == aborted


def test_the_failure_survives_pickling() -> None:
    error = NcclFailureError("an exchange", "result 6")
    back = pickle.loads(pickle.dumps(error))
    assert (back.what, back.reason, str(back)) == ("an exchange", "result 6", str(error))


# --- the library ------------------------------------------------------------------------------------------------------


def put(monkeypatch: pytest.MonkeyPatch, double: NcclDouble | None) -> None:
    monkeypatch.setitem(sys.modules, "nccl", double)
    monkeypatch.setitem(sys.modules, "nccl.core", double)


def test_a_library_of_torchs_version_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    double = NcclDouble("2.28.9")
    put(monkeypatch, double)
    assert load_nccl((2, 28, 9)) is double


@pytest.mark.parametrize(
    ("double", "rule"),
    [
        (NcclDouble("2.30.7"), "nccl4py works with NCCL 2.30.7 at /lib/libnccl.so.2, and torch with 2.28.9"),
        (NcclDouble(library=False), "nccl4py finds no libnccl"),
        (None, "nccl4py cannot be imported"),
    ],
    ids=["version", "no library", "no package"],
)
def test_another_library_or_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, double: NcclDouble | None, rule: str
) -> None:
    put(monkeypatch, double)
    with pytest.raises(FaultError) as caught:
        load_nccl((2, 28, 9))
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("parallel.transport", "nccl")
    assert fault.rule.startswith(rule)
    assert "parallel.transport=torch" in fault.remedy


@pytest.mark.parametrize("asked", ["auto", "torch", "nccl"])
def test_the_transport_is_torchs_unless_another_is_asked_for(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    assert type(open_transport(ParallelConfig(transport=asked), ONE_RANK)) is TorchTransport  # nothing to move
    put(monkeypatch, NcclDouble())
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(choice, "NcclTransport", lambda mesh, nccl: ("nccl", mesh, nccl))
    mesh = Mesh(0, 2, CPU)
    opened: Any = open_transport(ParallelConfig(transport=asked), mesh)
    if asked == "nccl":
        assert opened == ("nccl", mesh, sys.modules["nccl.core"])
    else:
        assert type(opened) is TorchTransport


@pytest.mark.parametrize(
    ("device", "rule"),
    [
        (
            DeviceFacts("cpu", packages={"nccl4py": "0.6.0"}),
            "it moves tensors of NVIDIA GPUs, and the ranks are on cpu",
        ),
        (DeviceFacts("cuda", (9, 0)), "it needs the package nccl4py, which is not installed"),
        (DeviceFacts("cuda", (9, 0), packages={"nccl4py": "0.6.0"}), None),
    ],
    ids=["cpu", "no package", "fits"],
)
def test_the_driver_refuses_what_no_rank_could_do(device: DeviceFacts, rule: str | None) -> None:
    found = transport_faults(ParallelConfig(transport="nccl"), device)
    assert [fault.rule for fault in found] == ([] if rule is None else [rule])
    for asked in ("auto", "torch"):
        assert transport_faults(ParallelConfig(transport=asked), device) == []


@pytest.mark.parametrize("entry", SIGNATURES, ids=lambda entry: entry.callable)
def test_the_double_takes_what_the_wheel_takes(entry: Any) -> None:
    from tests.parallel import nccl_double

    owner, name = entry.callable.split(".")[-2:]
    if owner in ("Communicator", "UniqueId"):
        double = inspect.getattr_static(getattr(nccl_double, owner), name)
        double = double.__func__ if isinstance(double, staticmethod) else double
    else:
        double = inspect.unwrap(getattr(NcclDouble, name))
    ours = [part for part in inspect.signature(double).parameters.values() if part.name not in ("self", "module")]
    stripped = replace(entry, parameters=tuple(part for part in entry.parameters if part.name != "self"))
    stand_in: Any = lambda: None  # noqa: E731
    stand_in.__signature__ = inspect.Signature(ours)
    assert list(differences(stand_in, stripped)) == []
    assert (entry.distribution, entry.version) == ("nccl4py", "0.6.0")
