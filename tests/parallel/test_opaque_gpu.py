"""Kernels of a GPU that torch.compile cannot trace, as one operator of a compiled graph."""

from __future__ import annotations

import pytest
import torch

from backends.platforms.facts import local_device
from backends.registry import Registry
from kernel_grid.cases import claims
from parallel.attention import Attention
from parallel.mesh import Mesh
from tests.parallel.layers import context_of

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
HEADS, SIZE = 4, 128
FACTS = local_device("cuda", Registry().distributions())
BACKENDS = sorted({claim.backend.get_name() for claim in claims(Registry(), FACTS)} - {"REFERENCE", "FLEX_ATTENTION"})


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_compiled_call_is_one_graph_the_same_and_does_not_wait_for_the_device(backend: str) -> None:
    torch.compiler.reset()
    context = context_of(Mesh(0, 1, DEVICE), dtype=torch.bfloat16, backend=backend)
    layer = Attention(HEADS, SIZE, role="self", kind="self", context=context)
    generator = torch.Generator(DEVICE).manual_seed(0)
    query, key, value = (
        torch.randn(1, 256, HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16, generator=generator) for _ in range(3)
    )

    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(q, k, v) * 2
        return out

    compiled = torch.compile(twice, fullgraph=True)
    assert torch.equal(compiled(query, key, value), twice(query, key, value))
    torch.cuda.set_sync_debug_mode("error")
    try:
        compiled(query, key, value)
    finally:
        torch.cuda.set_sync_debug_mode("default")
