"""torch.compile of layers and models: the numbers of eager calls, for changing lengths, on one rank and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

import raylysses
from configs.schema import ParallelConfig
from parallel.mesh import Mesh
from parallel.plan import Stream
from tests.exact import relative_error
from tests.parallel import library_ranks as ranks
from tests.parallel.cases import Case, layer_of, metadata_of, tensors_of
from tests.parallel.layers import rows_of
from tests.ranks import Ranks

GlooRanks = Callable[[int], Ranks]
LATENTS = ((3, 6, 10), (2, 4, 6), (5, 6, 4))  # 45, 12 and 30 tokens


def compiled(model: Any, part: str, backend: Any) -> Any:
    if part == "whole":
        return torch.compile(model, backend=backend)
    if part == "blocks":
        model.compile_repeated_blocks(backend=backend)
    elif part == "blocks replaced":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    else:
        for block in model.blocks:
            block.attn1.compile(backend=backend)
            block.attn2.compile(backend=backend)
    return model


def step(model: Any, latent: tuple[int, int, int], world_size: int) -> list[torch.Tensor]:
    """The output, and the gradients of all parameters."""
    model.zero_grad()
    out = model(**ranks.inputs(latent), return_dict=False)[0]
    out.square().mean().backward()
    gradients = {str(index): each.grad.clone() for index, each in enumerate(model.parameters())}
    return [out.detach(), *(ranks.averaged(gradients) if world_size > 1 else gradients).values()]


def compiled_steps(mesh: Mesh, part: str, when: str) -> tuple[float, int, bool]:
    """(the largest error, graphs, whether all traffic was as planned)."""
    torch.compiler.reset()
    counter = CompileCounter()
    model = ranks.model()
    expected = [step(model, latent, 1) for latent in LATENTS]
    run = compiled(model, part, counter) if when == "before" else model
    errors = []
    alone = not dist.is_initialized()  # as a single rank is
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with raylysses.sequence_parallel(run, mesh.data, attention="TORCH_SDPA") as shared:
        run = compiled(model, part, counter) if when == "after" else run
        for latent, whole in zip(LATENTS, expected, strict=True):
            found = step(run, latent, mesh.world_size)
            errors += [relative_error(*each) for each in zip(found, whole, strict=True) if each[1].norm() > 1e-4]
        with torch.no_grad():
            shared.traffic()
            run(**ranks.inputs(LATENTS[0]), return_dict=False)
            moved = shared.traffic()
        model.enable_gradient_checkpointing()
        model.train()
        found = step(run, LATENTS[0], mesh.world_size)
        errors += [relative_error(*each) for each in zip(found, expected[0], strict=True) if each[1].norm() > 1e-4]
    if alone:
        dist.destroy_process_group()
    return max(errors), counter.frame_count, moved.planned == moved.measured


@pytest.mark.ray
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", ["whole", "blocks", "blocks replaced", "attention"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_model_computes_what_it_computes_alone(
    gloo_ranks: GlooRanks, world_size: int, part: str, when: str
) -> None:
    for error, graphs, as_planned in gloo_ranks(world_size).run(compiled_steps, part, when):
        assert error <= 1e-4
        assert graphs > 1
        assert as_planned


def compiled_calls(mesh: Mesh, backend: str, carried: tuple[str, ...], strategy: str, lse: bool) -> float:
    """The largest difference to eager calls, over plans of several lengths."""
    torch.compiler.reset()
    parallel = ParallelConfig(strategy=strategy) if mesh.world_size > 1 else ParallelConfig()
    dtype = torch.float32
    cases = [Case((Stream("video", n),), size=16, carried=carried, dtype=dtype, backend=backend) for n in (12, 17, 30)]
    layer = layer_of(mesh, cases[0], parallel, lse=lse)

    def call(*qkv: torch.Tensor, metadata: Any, plan: Any) -> torch.Tensor:
        if not lse:
            out: torch.Tensor = layer(*qkv, metadata, plan=plan) * 2
            return out
        out, sums = layer.forward_with_lse(*qkv, metadata, plan=plan)
        return out * 2 + sums.transpose(1, 2).unsqueeze(-1)

    errors = [0.0]
    graph = torch.compile(call, backend="aot_eager")
    for case in (*cases, cases[0]):
        # Plans that a graph has never seen, of lengths that it has.
        plans = [layer.plan_of(*case.streams) for _ in range(2)]
        mine = [rows_of(tensor, plans[0], mesh.rank) for tensor in tensors_of(case)]
        with torch.no_grad() if case.queries % 2 else torch.inference_mode():
            eager, found = (
                each(*mine, metadata=metadata_of(case), plan=plan)
                for each, plan in zip((call, graph), plans, strict=True)
            )
        errors.append(float((found - eager).abs().amax()))
    return max(errors)


@pytest.mark.ray
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("backend", "carried", "strategy", "lse"),
    [
        ("TORCH_SDPA", ("full",), "ulysses", False),
        ("TORCH_SDPA", (), "gather_kv", False),
        ("REFERENCE", ("packed",), "ulysses", True),
        ("REFERENCE", ("key_padding",), "ring", True),
        ("FLEX_ATTENTION", ("window",), "ulysses", False),
        ("FLEX_ATTENTION", (), "gather_kv", True),
    ],
)
def test_a_graph_holds_no_plan_and_no_length(
    gloo_ranks: GlooRanks, world_size: int, backend: str, carried: tuple[str, ...], strategy: str, lse: bool
) -> None:
    assert max(gloo_ranks(world_size).run(compiled_calls, backend, carried, strategy, lse)) <= 1e-5


def one_graph(mesh: Mesh) -> str:
    torch.compiler.reset()
    case = Case(backend="TORCH_SDPA")
    layer = layer_of(mesh, case, ParallelConfig(strategy="ulysses"))
    plan = layer.plan_of(*case.streams)
    mine = [rows_of(tensor, plan, mesh.rank) for tensor in tensors_of(case)]
    try:
        torch.compile(layer, fullgraph=True, backend="eager")(*mine, plan=plan)
    except torch._dynamo.exc.Unsupported as error:
        assert layer.context.transport.take_traffic().calls == {}
        layer(*mine, plan=plan)  # the ranks are still in step
        return str(error)
    return "compiled"


@pytest.mark.ray
def test_a_full_graph_over_ranks_is_refused_before_anything_is_exchanged(gloo_ranks: GlooRanks) -> None:
    for told in gloo_ranks(2).run(one_graph):
        assert "compile without fullgraph=True" in told
