"""An exchange that fails says whose it was, what happened and what to look at."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs.schema import ParallelConfig
from parallel.attention import Attention
from parallel.forwards import Forwards
from parallel.mesh import Mesh
from parallel.plan import Stream
from parallel.transport.base import Rotation
from parallel.transport.errors import ExchangeError, ExchangeSizeError
from parallel.transport.nccl import NcclFailureError
from runtime.ray_api import Raised
from runtime.supervisor import classify
from tests.parallel.layers import CPU, context_of
from tests.ranks import Ranks

FIRST_OF_TWO = Mesh(0, 2, CPU)  # without groups
LOST = "Connection closed by peer [10.0.0.2]:2345"
WAY_OUT = "; look at the errors of the other ranks: one of them has ended, is stuck, or makes other calls"


def layer_of(strategy: str, mesh: Mesh = FIRST_OF_TWO) -> Attention:
    context = context_of(mesh, backend="REFERENCE", parallel=ParallelConfig(strategy=strategy))
    return Attention(2, 8, role="self", kind="self", context=context, name="blocks.3.attn1")


def call(layer: Attention) -> torch.Tensor:
    rows = torch.zeros(1, 4, 2, 8)
    return layer(rows, rows, rows, plan=layer.plan_of(Stream("video", 8)))


class Lost:
    def wait(self) -> None:
        raise RuntimeError(LOST)


@pytest.mark.parametrize(
    ("strategy", "collective", "verb"),
    [
        ("ulysses", "all_to_all_single", "scatter_heads"),
        ("gather_kv", "batch_isend_irecv", "gather_keys"),
        ("ring", "batch_isend_irecv", "rotate_keys"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_lost_peer_is_told_with_the_layer_and_the_way_out(
    strategy: str, collective: str, verb: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> list[Lost]:
        if late and collective != "all_to_all_single":
            return [Lost()]
        raise RuntimeError(LOST)

    monkeypatch.setattr(dist, collective, fail)
    monkeypatch.setattr(dist, "P2POp", lambda *args, **options: None)
    with pytest.raises(ExchangeError) as caught:
        call(layer_of(strategy))
    assert str(caught.value) == f"blocks.3.attn1: {verb}: {LOST}{WAY_OUT}"
    assert (caught.value.layer, caught.value.verb, caught.value.reason) == ("blocks.3.attn1", verb, LOST)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert classify(Raised(caught.value, "")) == "disconnected"


def test_a_device_without_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dist, "all_to_all_single", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        call(layer_of("ulysses"))


def test_an_exchange_error_within_a_rotation_is_not_wrapped_again() -> None:
    def fail() -> None:
        raise ExchangeError("rotate_keys", "once")

    with pytest.raises(ExchangeError, match=r"^rotate_keys: once; ") as caught:
        Rotation(torch.zeros(1), (fail,)).wait()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "error", [ExchangeError("a", "b", "c"), ExchangeSizeError("a", "b"), NcclFailureError("an exchange", "result 6")]
)
def test_the_errors_survive_pickling(error: ExchangeError) -> None:
    error.layer = "blocks.3.attn1"
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.layer) == (type(error), str(error), "blocks.3.attn1")
    assert str(back).startswith("blocks.3.attn1: ")


def call_alone(mesh: Mesh) -> None:
    if mesh.rank == 0:
        call(layer_of("ulysses", mesh))


def begin_alone(mesh: Mesh) -> None:
    if mesh.rank == 0:
        forwards = Forwards("my model", [layer_of("ulysses", mesh)], mesh)
        forwards.begin(Stream("video", 8), batch=1, dtype=torch.float32)


@pytest.mark.ray
def test_an_agreement_that_nobody_joins_says_whose_it_was(ray_cluster: None) -> None:
    for function, whose in (
        (call_alone, "blocks.3.attn1: the agreement before the first call with a plan: "),
        (begin_alone, "my model: the agreement before a forward: "),
    ):
        ranks = Ranks(2, cpus=0, timeout_s=2)
        try:
            alone, other = ranks.outcomes(function, [(), ()])
        finally:
            ranks.close()
        assert isinstance(alone, ExchangeError)
        assert str(alone).startswith(whose)
        assert str(alone).endswith(WAY_OUT)
        assert other is None
