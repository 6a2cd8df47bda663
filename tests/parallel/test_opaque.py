"""A kernel that torch.compile cannot trace, as one operator of a compiled graph."""

from __future__ import annotations

import gc
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from backends.interface import AttentionBackend, AttentionImpl, AttentionMetadata, CallShape, PackedLengths, Variant
from backends.kernels.reference import ReferenceImpl
from backends.requirements import Features, Requirements
from backends.variant import EVERYTHING
from configs.schema import ParallelConfig
from parallel import opaque
from parallel.attention import Attention
from parallel.mesh import Mesh
from parallel.pieces import take
from parallel.plan import Stream
from parallel.planner import RoleCall
from tests.exact import random_qkv
from tests.parallel.cases import Case, GlooRanks, exact, tensors_of
from tests.parallel.cases import layer_of as sharded_layer_of
from tests.parallel.layers import context_of, layer_with

HEADS, SIZE = 4, 16


class UntraceableImpl(ReferenceImpl):
    """Asks for values and plans by shape, which no graph can hold."""

    planned: tuple[CallShape, ...] = ()

    def plan(self, shape: CallShape) -> str:
        type(self).planned += (shape,)
        return f"of {shape.query_length}"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any = None,
    ) -> torch.Tensor:
        assert plan == f"of {query.shape[1]}"
        assert sum(query.flatten()[:2].tolist()) < 1e9
        return super().forward(query, key, value, metadata).transpose(1, 2).contiguous().transpose(1, 2)


class UntraceableBackend(AttentionBackend):
    variants = (Variant("opaque", f"{__name__}.UntraceableImpl", takes=EVERYTHING, run_on=("cpu",)),)

    @staticmethod
    def get_name() -> str:
        return "UNTRACEABLE"


def layer_of(**options: Any) -> Attention:
    register = {"UNTRACEABLE": f"{__name__}.UntraceableBackend"}
    context = context_of(backend="UNTRACEABLE", register=register)
    return Attention(HEADS, SIZE, role="self", kind="self", context=context, **options)


def qkv(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_qkv(2, rows, rows, HEADS, HEADS, SIZE, torch.float32)


MASK = torch.rand(2, HEADS, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.6
CARRIED = {
    "nothing": AttentionMetadata(),
    "mask": AttentionMetadata(MASK),
    "bias": AttentionMetadata(bias=MASK.float()),
    "sinks": AttentionMetadata(sinks=torch.linspace(-1, 1, HEADS)),
    "window": AttentionMetadata(window=(3, None)),
    "soft_cap": AttentionMetadata(soft_cap=1.5),
    "packed": AttentionMetadata(packed=PackedLengths((5, 7), (5, 7))),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", CARRIED)
@torch.no_grad()
def test_a_compiled_call_is_one_graph_and_the_same(name: str, backend: str) -> None:
    if backend == "inductor" and name not in ("nothing", "mask"):
        pytest.skip("compiling is slow, and the operator the same")
    torch.compiler.reset()
    layer = layer_of()
    compiled = torch.compile(lambda q, k, v: layer(q, k, v, CARRIED[name]) * 2, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*qkv()), layer(*qkv(), CARRIED[name]) * 2)


@torch.no_grad()
def test_equal_layers_share_a_graph() -> None:
    torch.compiler.reset()
    counter = CompileCounter()

    class Block(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.attention = layer_of(name=f"blocks.{number}")

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attention(q, k, v)
            return out + 1

    blocks = [Block(number) for number in range(3)]
    compiled = [torch.compile(block, fullgraph=True, backend=counter) for block in blocks]
    for block, each in zip(blocks, compiled, strict=True):
        assert torch.equal(each(*qkv()), block(*qkv()))
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_layer_that_ran_before_shares_its_graph() -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    layers = [layer_of(), layer_of()]
    layers[0](*qkv())
    for layer in layers:
        torch.compile(layer, fullgraph=True, backend=counter)(*qkv())
    assert counter.frame_count == 1


@torch.no_grad()
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "REFERENCE"])
def test_one_graph_is_for_any_length(backend: str) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    layer = layer_with(context_of(backend=backend), HEADS, SIZE)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 7, 64, 192):
        qkv = random_qkv(2, rows, rows, HEADS, HEADS, SIZE, torch.float32)
        assert torch.allclose(compiled(*qkv), layer(*qkv), atol=1e-6)
    assert counter.frame_count == 1


@torch.no_grad()
def test_the_path_says_that_a_graph_holds_it() -> None:
    path = layer_of().execution_path(Features(soft_cap=True))
    assert (path.compilation, path.support_for(fullgraph=True).status.value) == ("custom-op", "supported")


def test_a_call_with_gradients_runs_between_two_graphs() -> None:
    torch.compiler.reset()
    layer = layer_of()
    gradients = []
    for call in (layer, torch.compile(layer, backend="eager")):
        query, key, value = (tensor.requires_grad_() for tensor in qkv())
        call(query, key, value).square().sum().backward()
        gradients.append(query.grad)
    assert torch.equal(*gradients)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        torch.compile(layer, fullgraph=True, backend="eager")(query, key, value)


@torch.no_grad()
def test_the_operator_keeps_its_promises() -> None:
    kernel = opaque.Opaque(lambda q, k, v, metadata: q * 2)
    query, key, value = qkv()
    none = (None,) * 3
    torch.library.opcheck(opaque._attend, (query, key, value, kernel.handle, *none, [3, -1], None, None, None))


def test_a_kernel_goes_with_its_layer() -> None:
    gc.collect()
    before = len(opaque._HELD)
    layer = layer_of()
    assert len(opaque._HELD) == before + 1
    del layer
    gc.collect()
    assert len(opaque._HELD) == before


def test_a_kernel_that_is_traced_needs_no_operator() -> None:
    gc.collect()
    before = len(opaque._HELD)
    assert issubclass(ReferenceImpl, AttentionImpl)
    layer = Attention(HEADS, SIZE, role="self", kind="self", context=context_of(backend="TORCH_SDPA"))
    assert len(opaque._HELD) == before
    assert layer.execution_path().compilation == "traceable"


def compiled_over_ranks(mesh: Mesh, case: Case, strategy: str) -> float:
    torch.compiler.reset()
    layer = sharded_layer_of(mesh, case, ParallelConfig(strategy=strategy))
    plan = layer.plan_of(*case.streams)
    held = plan.shares[mesh.rank].query_rows
    mine = [take(tensor, held) for tensor in tensors_of(case)]
    compiled = torch.compile(lambda *qkv: layer(*qkv, plan=plan) * 2, backend="eager")
    with torch.no_grad():
        out = compiled(*mine)
        assert out.is_contiguous()
        return float((out / 2 - take(exact(case)[0], held)).abs().amax())


@pytest.mark.ray
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strategy", ["ulysses", "ring", "gather_kv"])
def test_a_layer_over_ranks_can_be_compiled(gloo_ranks: GlooRanks, strategy: str, causal: bool) -> None:
    case = Case((Stream("video", 13),), causal=causal)
    assert max(gloo_ranks(2).run(compiled_over_ranks, case, strategy)) < 1e-11


@pytest.mark.parametrize("value", [RoleCall, Requirements, Features])
def test_what_a_graph_makes_has_plain_defaults(value: type[Any]) -> None:
    """torch 2.11 traces no call of a function with another default."""
    defaults = [field.default for field in fields(value) if field.default is not MISSING]
    assert all(default is None or type(default) in (bool, int, str) for default in defaults)
    assert all(field.default_factory is MISSING for field in fields(value))
