"""What the tests of the library run on the ranks of a default group, whoever has started them. Free of Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import raylysses

TINY: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 5,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 12,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
}
LATENT = (3, 6, 10)  # 3 x 3 x 5 = 45 tokens: neither 2 nor 3 ranks have equal shares of rows and of 5 heads


def start(function: Callable[..., Any], world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on each of so many processes of one gloo group; the results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_enter, (world_size, port, folder, function, arguments), nprocs=world_size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _enter(
    rank: int, world_size: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.save(function(*arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()


def model() -> Any:
    """A small Wan with the same weights in every process."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(5)
    made = WanTransformer3DModel(**TINY).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def inputs(latent: tuple[int, int, int] = LATENT) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {
        "hidden_states": torch.randn(2, TINY["in_channels"], *latent, generator=generator),
        "encoder_hidden_states": torch.randn(2, 9, TINY["text_dim"], generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }


def output(of: Any) -> torch.Tensor:
    out: torch.Tensor = of(**inputs(), return_dict=False)[0]
    return out


def gradients(of: Any) -> dict[str, torch.Tensor]:
    """Of every parameter, of a loss over the whole output."""
    of.zero_grad()
    output(of).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in of.named_parameters() if parameter.grad is not None}


def averaged(of: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for gradient in of.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return of


def everything(options: dict[str, Any]) -> dict[str, Any]:
    """A model's output before, while and after its sequence is shared, and what the handle tells."""
    transformer = model()
    hooks, processors = hook_count(transformer), dict(transformer.attn_processors)
    found: dict[str, Any] = {}
    with torch.no_grad():
        found["before"] = output(transformer)
        with raylysses.sequence_parallel(transformer, **options) as shared:
            found["shared"] = output(transformer)
            found["moved"] = shared.traffic()
            found["then"] = shared.traffic()
            found["served"] = [str(each) for each in shared.selections()]
            found["place"] = (shared.rank, shared.world_size)
        found["after"] = output(transformer)
    found["hooks"] = (hooks, hook_count(transformer))
    found["processors"] = all(transformer.attn_processors[name] is each for name, each in processors.items())
    return found


def hook_count(of: torch.nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in of.modules())


def trained(options: dict[str, Any]) -> dict[str, Any]:
    """Gradients of an unwired model, of one on all ranks, and of one that computes its blocks again."""
    transformer = model()
    found: dict[str, Any] = {"whole": gradients(transformer)}
    with raylysses.sequence_parallel(transformer, **options):
        found["shared"] = averaged(gradients(transformer))
        transformer.enable_gradient_checkpointing()
        transformer.train()
        found["recomputed"] = averaged(gradients(transformer))
    return found


def on_meshes() -> dict[str, Any]:
    """The same model over every kind of mesh that 4 ranks can have."""
    from torch.distributed.device_mesh import init_device_mesh

    transformer, found = model(), {}
    pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    apart = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
    meshes = {"square": square, "part": apart["sp"], "line": line, "group": pairs[dist.get_rank() // 2]}
    with torch.no_grad():
        for name, mesh in meshes.items():
            with raylysses.sequence_parallel(transformer, mesh, attention="REFERENCE") as shared:
                own = output(transformer)
                ways = {str(each.way) for each in shared.selections() if each.selection.role == "self"}
                found[name] = (own, ways, shared.world_size)
        found["whole"] = output(transformer)
    return found


def refusals() -> list[list[str]]:
    """What the caller is told, for each thing that cannot be."""
    from torch.distributed.device_mesh import init_device_mesh

    transformer = model()
    odd = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    first = dist.new_group([0])
    calls: list[Callable[[], Any]] = [
        lambda: raylysses.sequence_parallel(torch.nn.Linear(2, 2)),
        lambda: raylysses.sequence_parallel(transformer, odd),
        lambda: raylysses.sequence_parallel(transformer, attention=["run.seed=3"]),
        lambda: raylysses.sequence_parallel(transformer, attention="attention.per_role.slef=REFERENCE"),
        lambda: raylysses.sequence_parallel(transformer, attention={"defualt": "REFERENCE"}),
        lambda: raylysses.sequence_parallel(transformer, attention="FLASH_ATTN"),
        lambda: raylysses.sequence_parallel(transformer, ulysses=3),
        lambda: raylysses.sequence_parallel(transformer, control=first),
        lambda: raylysses.attention_context_of(first, dtype=torch.float32, device="cuda"),
    ]
    found = [_told(call) for call in calls]
    with raylysses.sequence_parallel(transformer):
        found.append(_told(lambda: raylysses.sequence_parallel(transformer)))
    return found


def _told(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except raylysses.FaultError as error:
        return [str(fault) for fault in error.faults]
    return []


def by_hand() -> dict[str, Any]:
    """An attention layer of a model of one's own: 7 rows, 3 query heads, one KV head."""
    context = raylysses.attention_context_of(dtype=torch.float64, attention={"default": "REFERENCE"}, strategy="ring")
    with raylysses.attention_context(context):
        layer = raylysses.Attention(3, 8, role="self", kind="self", num_kv_heads=1)
    plan = layer.plan_of(raylysses.Stream("tokens", 7))
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 7, heads, 8, generator=generator).double() for heads in (3, 1, 1))
    mine = plan.rows[context.mesh.rank]
    out = layer(*(raylysses.take(tensor, mine) for tensor in (query, key, value)), plan=plan)
    whole = context.transport.gather_rows(out.flatten(2), plan).unflatten(2, (3, 8))
    return {"qkv": (query, key, value), "out": whole, "strategy": layer.strategy}
