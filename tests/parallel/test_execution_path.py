"""Which path a call takes, as a layer tells it before the call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.execution import ExecutionPath, Fallback, Support, SupportStatus
from backends.interface import (
    AttentionBackend,
    Capabilities,
    Features,
    Variant,
)
from backends.kernels.torch_sdpa import TorchSdpaImpl
from configs.faults import FaultError
from configs.schema import AttentionConfig, AttentionSpec
from parallel.mesh import Mesh
from tests.parallel.contract import CARRIED, layer_of, qkv
from tests.parallel.layers import ONE_RANK, context_of


class UntriedBackend(AttentionBackend):
    variants = (
        Variant("untried", "backends.kernels.torch_sdpa.TorchSdpaImpl", takes=Capabilities(), compilation="traceable"),
    )

    @staticmethod
    def get_name() -> str:
        return "UNTRIED"


def path_of(backend: str, mesh: Mesh = ONE_RANK, **options: Any) -> ExecutionPath:
    register = {"UNTRIED": f"{__name__}.UntriedBackend"}
    return layer_of(context_of(mesh, backend=backend, register=register), **options).execution_path()


def test_a_verified_path_says_so_and_compiles_as_one_graph() -> None:
    path = path_of("TORCH_SDPA")
    assert (path.backend, path.variant, path.strategy, path.platform) == ("TORCH_SDPA", "torch", "local", "cpu")
    assert (path.compilation, path.support.status) == ("traceable", SupportStatus.SUPPORTED)
    assert path.support_for(fullgraph=True) == path.support


def test_a_path_that_was_never_run_there_is_unverified_and_has_no_full_graph() -> None:
    path = path_of("UNTRIED")
    assert path.support == Support(SupportStatus.UNVERIFIED, "not run on cpu hardware")
    assert path.support_for(fullgraph=False) == path.support
    refused = path.support_for(fullgraph=True)
    assert refused.status is SupportStatus.UNSUPPORTED
    assert "no verified full graph on cpu" in refused.reason
    assert path.support.status is SupportStatus.UNVERIFIED


def test_an_exchange_is_outside_of_compiled_graphs() -> None:
    path = path_of("TORCH_SDPA", Mesh(0, 2, torch.device("cpu")))
    assert (path.strategy, path.compilation) == ("ulysses", "eager")
    assert "outside of compiled graphs" in path.support_for(fullgraph=True).reason


def test_an_unsupported_path_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="without a reason"):
        Support(SupportStatus.UNSUPPORTED)


def test_the_path_and_the_call_refuse_alike() -> None:
    layer = layer_of()
    with pytest.raises(FaultError) as of_path:
        layer.execution_path(Features(soft_cap=True))
    with pytest.raises(FaultError) as of_call:
        layer(*qkv(), CARRIED["soft_cap"])
    assert of_path.value.faults == of_call.value.faults
    assert layer.execution_path(Features(mask="full")).mask == "full"


def test_the_kernel_of_a_path_is_that_of_the_initialised_implementation() -> None:
    class Renamed(TorchSdpaImpl):
        @property
        def kernel(self) -> str:
            return "my.kernel"

    assert path_of("TORCH_SDPA", impl_overrides={"TORCH_SDPA": Renamed}).kernel == "my.kernel"


def test_a_fallback_that_the_configuration_allows_is_declared() -> None:
    context = context_of()
    config = AttentionConfig(default=AttentionSpec("FLASH_ATTN", on_unsupported="fallback"))
    layer = layer_of(replace(context, config=config))
    selection = layer.selection
    assert (selection.requested, selection.backend, selection.source) == ("FLASH_ATTN", "TORCH_SDPA", "platform")
    assert selection.rejected[0].backend == "FLASH_ATTN"
    fallback = layer.execution_path().fallback
    assert isinstance(fallback, Fallback)
    assert (fallback.requested, fallback.backend) == ("FLASH_ATTN", "TORCH_SDPA")
    assert fallback.trigger == tuple(fault.rule for fault in selection.rejected[0].faults)
    assert "masks" in fallback.preserves


def test_a_local_call_compiles_without_breaks_and_gives_the_same() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = layer_of()
    eager = layer(*qkv())
    compiled = torch.compile(layer_of(), backend=count, fullgraph=True)  # one that has never run
    assert torch.equal(compiled(*qkv()), eager)
    assert torch.equal(compiled(*qkv()), eager)
    assert len(graphs) == 1
